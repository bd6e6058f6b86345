# SPDX-License-Identifier: Apache-2.0
"""The whole optimizer on a GPU: against the reference and against the same optimizer on the CPU, bit for bit.

Each test runs on CPU tensors too, in small, so that the test itself is known to work where there is no GPU.
"""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from backward import backward_of
from compare import assert_all_same, assert_same_state
from reference import ReferenceZenFlow
from small_model import LENGTH, WORDS, Shared, small_model
from strategies import BF16, DTYPES, FP16, FP32, runs
from training import Pair, moved, moved_parameters, on_cpu
from zenflow import ZenFlowOptimizer

MODES = pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])


# Any run


def edit_as(kind, ours, theirs):
    """Gives `ours` the values of `theirs`, which were edited, in the way that `kind` names."""
    for p, q in zip(ours, theirs, strict=True):
        values = moved(q, p.device)
        if kind == "edit in place":
            with torch.no_grad():
                p.copy_(values)
        elif kind == "edit .data":
            p.data.copy_(values)
        elif kind == "edit storage":
            p.data = values
        else:  # another tensor of the same memory: no version counter sees it
            torch.from_dlpack(p.detach()).copy_(values)


@MODES
@settings(max_examples=settings.default.max_examples // 2)
@given(run=runs(max_steps=10))
def test_any_run_equals_the_reference(device, hooks, run):
    theirs = run.new_parameters()
    ours = moved_parameters(run.new_parameters(), device)
    optimizer = run.new_optimizer(ZenFlowOptimizer, ours, offload_gradients=hooks)
    reference = run.new_optimizer(ReferenceZenFlow, theirs)
    for i, step in enumerate(run.steps):
        for player in (optimizer, reference):
            run.set_settings(i, player)
        run.set_gradients(i, theirs)
        gradients = [None if p.grad is None else moved(p.grad, device) for p in theirs]
        optimizer.zero_grad()
        if hooks:
            backward_of(zip(ours, gradients, strict=True))
        else:
            for p, g in zip(ours, gradients, strict=True):
                p.grad = g
        optimizer.step()
        reference.step()
        assert_all_same(on_cpu(ours), theirs, f"after step {i + 1}")

        run.act(i, theirs, reference)
        if step.after == "state":
            assert_same_state(optimizer, reference, f"after step {i + 1}")
        elif step.after.startswith("edit"):
            edit_as(step.after, ours, theirs)
        else:
            run.act(i, ours, optimizer)
        assert_all_same(on_cpu(ours), theirs, f"after step {i + 1} and {step.after!r}")
    assert_same_state(optimizer, reference, "at the end")


# Large parameters against the same optimizer on the CPU


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_large_parameters_equal_the_cpu(device, dtype, hooks):
    pair = Pair(device, dtype, hooks=hooks, max_grad_norm=50.0)
    for _ in range(9):
        pair.step()
    pair.check_state()
    norms = [optimizer.stats().global_grad_norm for optimizer in (pair.optimizer, pair.twin)]
    assert norms[0] == norms[1]


@MODES
@pytest.mark.parametrize(
    "changed",
    [
        {"update_delay": 0},
        {"update_interval": 3, "update_delay": 3, "select_interval": 3},
        {"deferred_rule": "mean"},
        {"host_buffer": "stream"},
        {"full_warm_up_rounds": 3},
        {"topk_ratio": 0.0},
        {"topk_ratio": 1.0},
        {"skip_nonfinite": True, "maximize": True},
    ],
    ids=lambda changed: ",".join(map(str, changed)),
)
def test_settings_equal_the_cpu(device, hooks, changed):
    shapes = None if torch.device(device).type == "cpu" else [((1024, 1024), "contiguous"), ((512, 700), "transposed")]
    pair = Pair(device, BF16, hooks=hooks, shapes=shapes, **changed)
    for _ in range(8):
        pair.step()
    pair.check_state()


@MODES
def test_edits_of_large_parameters(device, hooks):
    """In place, by another storage, and by another tensor of the same memory; also in a step that publishes."""
    pair, generator = Pair(device, BF16, hooks=hooks), torch.Generator().manual_seed(9)
    for kind in ("edit in place", "edit storage", "edit without a version", "edit .data", ""):
        pair.step()
        if kind:
            with torch.no_grad():
                for p in pair.theirs:
                    p.masked_fill_(torch.rand(p.shape, generator=generator) < 0.01, 0.5)
            edit_as(kind, pair.ours, pair.theirs)
    pair.step()
    pair.check_state()


@MODES
def test_settled_synchronize_and_flush(device, hooks):
    pair = Pair(device, BF16, hooks=hooks)
    for step in range(8):
        pair.step()
        with pair.optimizer.settled(), pair.twin.settled():
            pair.check("inside settled()")
        pair.check("after settled()")
        for method in {2: ("synchronize",), 5: ("flush",), 7: ("flush", "synchronize")}.get(step, ()):
            for optimizer in (pair.optimizer, pair.twin):
                getattr(optimizer, method)()
            pair.check(f"after {method}()")
    pair.check_state()


@MODES
@pytest.mark.parametrize("announced", [False, True], ids=["accumulate", "announced"])
def test_accumulated_gradients(device, hooks, announced):
    """Sums are made in p.grad by torch, on either side, from the same addends."""
    changed = {"gradient_accumulation_steps": 3} if announced and hooks else {}
    pair = Pair(device, FP32, hooks=False, max_grad_norm=50.0)
    if hooks:
        pair.hooks, pair.settings = True, {**pair.settings, **changed}
        pair.optimizer = pair.new_optimizer()
    for _ in range(6):
        if announced and hooks:
            for micro_batch in range(3):
                pair.backward(micro_batch)
        else:
            with pair.optimizer.accumulate():
                pair.backward(0)
                pair.backward(1)
            pair.backward(2)
        pair.finish_step()
    pair.check_state()


# Checkpoints

RESUME = """
import sys
import torch
from training import Pair

path, device, hooks = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
saved = torch.load(path)
pair = Pair(device, torch.bfloat16, hooks=hooks, max_grad_norm=50.0)
with torch.no_grad():
    for p, q, value in zip(pair.ours, pair.theirs, saved["weights"], strict=True):
        p.copy_(value)
        q.copy_(value)
for optimizer in (pair.optimizer, pair.twin):
    optimizer.load_state_dict(saved["optimizer"])
pair.done = saved["done"]
for _ in range(5):
    pair.step()
torch.save([p.detach().cpu() for p in pair.ours], path)
"""


@MODES
def test_a_run_resumes_in_a_new_process(device, hooks, tmp_path):
    """There it goes on beside a CPU optimizer that loads the same checkpoint, and here without a break."""
    pair = Pair(device, BF16, hooks=hooks, max_grad_norm=50.0)
    for _ in range(5):
        pair.step()
    saved = {"weights": on_cpu(pair.ours), "optimizer": pair.optimizer.state_dict(), "done": pair.done}
    torch.save(saved, tmp_path / "checkpoint")
    for _ in range(5):
        pair.step()
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n" + RESUME]
    arguments = [str(tmp_path / "checkpoint"), device, str(hooks)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert_all_same(torch.load(tmp_path / "checkpoint"), on_cpu(pair.ours), "in the new process")


@MODES
def test_a_checkpoint_moves_between_cpu_and_device(device, hooks):
    pair = Pair(device, FP32, hooks=hooks)
    for _ in range(3):
        pair.step()
    states = pair.optimizer.state_dict(), pair.twin.state_dict()
    pair.optimizer.load_state_dict(states[1])
    pair.twin.load_state_dict(states[0])
    for _ in range(4):
        pair.step()
    pair.check_state()


@MODES
def test_a_checkpoint_that_was_mapped_to_the_device_leaves_host_state_on_the_host(device, hooks):
    pair, file = Pair(device, BF16, hooks=hooks), io.BytesIO()
    for _ in range(3):
        pair.step()
    torch.save(pair.optimizer.state_dict(), file)
    held = pair.optimizer.stats().device_bytes
    for location in (device, "cpu"):
        file.seek(0)
        pair.optimizer.load_state_dict(torch.load(file, map_location=location, weights_only=True))
        assert pair.optimizer.stats().device_bytes <= held
    for _ in range(4):
        pair.step()
    pair.check_state()


def test_masters_for_export_are_those_of_the_cpu(device):
    pair = Pair(device, BF16)
    for _ in range(5):
        pair.step()
        ours = pair.optimizer.master_weights(nn.ParameterList(pair.ours))
        theirs = pair.twin.master_weights(nn.ParameterList(pair.theirs))
        assert_all_same(list(ours.values()), list(theirs.values()), f"after step {pair.done}")


def test_a_model_moves_to_another_dtype(device):
    pair = Pair(device, FP32)
    for dtype in (FP32, BF16, FP16):
        for p in (*pair.ours, *pair.theirs):
            p.data = p.data.to(dtype)
        for _ in range(3):
            pair.step()
    pair.check_state()


# Mixed precision as torch drives it


def test_a_grad_scaler_changes_no_bit_and_skips_steps(device):
    """Scaling by a power of two is exact. Step 4 overflows."""
    kind = torch.device(device).type
    pair = Pair(device, FP32)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=3)
    for step in range(8):
        gradients = pair.gradients()
        # the gradient of (p * g).sum() is g, times the scale
        loss = sum((p * moved(g, device)).sum() for p, g in zip(pair.ours, gradients, strict=True))
        scaler.scale(loss).backward()
        overflows = step == 4
        if overflows:
            pair.ours[0].grad[0, 0] = float("inf")
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
        if not overflows:
            backward_of(zip(pair.theirs, gradients, strict=True))
            pair.twin.step()
            pair.twin.zero_grad()
        pair.done += 1
        pair.check(f"after step {pair.done}")
    assert pair.optimizer.stats().total.steps == 7
    pair.check_state()


def batches(steps, device):
    return torch.randint(WORDS, (steps, 4, LENGTH + 1), generator=torch.Generator().manual_seed(6)).to(device)


def loss_of(model, batch):
    with sdpa_kernel(SDPBackend.MATH):  # others add up in an order of their own each time
        logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@MODES
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_autocast_trains(device, hooks, dtype):
    """Gradients of fp32 weights are fp32 under autocast; loss goes down as with AdamW."""
    model, other = small_model().to(device), small_model().to(device)
    schedule = {"update_interval": 2, "select_interval": 4, "topk_ratio": 0.2, "min_offload_numel": 1000}
    optimizer = ZenFlowOptimizer(model.parameters(), 1e-3, offload_gradients=hooks, **schedule)
    adamw = torch.optim.AdamW(other.parameters(), 1e-3)
    batch = batches(1, device)[0]
    for network, player in ((model, optimizer), (other, adamw)):
        for _ in range(30):
            with torch.autocast(torch.device(device).type, dtype=dtype):
                loss = loss_of(network, batch)
            loss.backward()
            assert all(p.grad.dtype == FP32 for p in network.parameters())
            player.step()
            player.zero_grad()
    optimizer.flush()
    start, ours, theirs = (loss_of(network, batch).item() for network in (small_model().to(device), model, other))
    assert ours < theirs + 0.2 * (start - theirs)


# A real model in both modes


def bits_of_training(model, device, hooks, accumulated, clips):
    """The weights' bits after each of 50 steps; on the CPU, where other tests do this, after a few."""
    torch.manual_seed(0)
    model = model().to(device)
    schedule = {"update_interval": 4, "select_interval": 8, "topk_ratio": 0.15, "min_offload_numel": 1000}
    announced = {"gradient_accumulation_steps": accumulated} if hooks else {}
    optimizer = ZenFlowOptimizer(
        model.parameters(),
        1e-3,
        max_grad_norm=0.5 if clips else None,
        offload_gradients=hooks,
        **schedule,
        **announced,
    )
    history = []
    steps = 50 if torch.device(device).type == "cuda" else 10
    for step in batches(steps * accumulated, device).split(accumulated):
        for batch in step:
            (loss_of(model, batch) / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.flush()
    return [*on_cpu(history), *on_cpu(model.parameters())]


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    "model",
    [lambda: small_model(BF16), lambda: Shared(True), lambda: Shared(False)],
    ids=["bf16", "shared, reentrant", "shared"],
)
def test_a_real_model_has_the_same_bits_in_both_modes(device, model, accumulated, clips):
    default, hooked = (bits_of_training(model, device, hooks, accumulated, clips) for hooks in (False, True))
    assert_all_same(hooked, default, "step or parameter")


def test_a_state_dict_is_of_the_cpu(device):
    """So that a checkpoint takes no device memory and loads anywhere."""
    pair = Pair(device, BF16)
    pair.step()
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    for state in torch.load(file)["state"].values():
        assert all(value.is_cpu for value in state.values() if isinstance(value, torch.Tensor))
