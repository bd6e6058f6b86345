# SPDX-License-Identifier: Apache-2.0
"""torch.amp as torch drives any optimizer: GradScaler unscales once, a skipped step changes nothing, autocast is the
model's own affair."""

import copy

import pytest
import torch
from torch import nn

from compare import assert_all_same, assert_same_saved
from small_model import batches, loss_of, small_model
from zenflow import ZenFlowOptimizer

SETTINGS = {"update_interval": 2, "select_interval": 4, "topk_ratio": 0.2, "min_offload_numel": 1000}


def optimizer_of(model, **changed):
    return ZenFlowOptimizer(model.parameters(), 1e-3, **{**SETTINGS, **changed})


def poison(model):
    """As an overflow in half precision does."""
    next(model.parameters()).grad[0, 0] = float("inf")


@pytest.mark.parametrize("clipping", [None, "user", "inside"])
def test_a_power_of_two_scale_changes_no_bit(clipping):
    """Scaling and unscaling by it is exact."""
    scaled, plain = small_model(), small_model()
    inside = {"max_grad_norm": 0.5 if clipping == "inside" else None}
    scaled_optimizer, plain_optimizer = optimizer_of(scaled, **inside), optimizer_of(plain, **inside)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step, batch in enumerate(batches(12)):
        scaler.scale(loss_of(scaled, batch)).backward()
        loss_of(plain, batch).backward()
        if clipping:
            scaler.unscale_(scaled_optimizer)
        if clipping == "user":
            for model in (scaled, plain):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(scaled_optimizer)
        scaler.update()
        plain_optimizer.step()
        for optimizer in (scaled_optimizer, plain_optimizer):
            optimizer.zero_grad()
        assert_all_same(list(scaled.parameters()), list(plain.parameters()), f"after step {step + 1}")
    assert scaler.get_scale() == 1024.0 * 2**4
    assert_same_saved(scaled_optimizer, plain_optimizer, "at the end")


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("when", range(1, 7))
def test_a_skipped_step_leaves_everything_as_if_it_had_not_been(when, unscales):
    """At a window's first, last and selecting step, and at one with an update in flight."""
    model, straight = small_model(), small_model()
    optimizer, straight_optimizer = optimizer_of(model), optimizer_of(straight)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(batch, overflows):
        scaler.scale(loss_of(model, batch)).backward()
        if overflows:
            poison(model)
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for i, batch in enumerate(batches(8)):
        if i == when:
            weights = [p.detach().clone() for p in model.parameters()]
            versions = [p._version for p in model.parameters()]
            state = copy.deepcopy(optimizer.state_dict())
            step(batch, overflows=True)
            assert_all_same(list(model.parameters()), weights, "after the skipped step")
            assert [p._version for p in model.parameters()] == versions
            assert_same_state_dict(optimizer.state_dict(), state)
            assert optimizer.stats().total.steps == i and optimizer.stats().skipped_steps == 0
        step(batch, overflows=False)
        loss_of(straight, batch).backward()
        if unscales:
            nn.utils.clip_grad_norm_(straight.parameters(), 1.0)
        straight_optimizer.step()
        straight_optimizer.zero_grad()
        assert_all_same(list(model.parameters()), list(straight.parameters()), f"after step {i + 1}")
    assert scaler.get_scale() == 128.0


def assert_same_state_dict(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][index][key], value), key


def test_unscaling_twice_is_refused_by_torch():
    model = small_model()
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_the_scaler_and_the_optimizer_resume_together():
    def run(interrupted):
        model = small_model()
        optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step, batch in enumerate(batches(9)):
            if step == 5 and interrupted:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
                model = small_model()
                optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu")
                for thing, state in zip((model, optimizer, scaler), saved, strict=True):
                    thing.load_state_dict(state)
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return list(model.parameters()), scaler.get_scale()

    (straight, scale), (resumed, resumed_scale) = run(False), run(True)
    assert_all_same(resumed, straight, "after nine steps")
    assert scale == resumed_scale


@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_trains(dtype, hooks):
    """Gradients of fp32 weights are fp32 under autocast; loss goes down as with AdamW."""
    model, other = small_model(), small_model()
    optimizer = optimizer_of(model, offload_gradients=hooks)
    adamw = torch.optim.AdamW(other.parameters(), 1e-3)
    batch = batches(1)[0]
    for network, player in ((model, optimizer), (other, adamw)):
        for _ in range(30):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(network, batch)
            loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in network.parameters())
            player.step()
            player.zero_grad()
    optimizer.flush()
    start, ours, theirs = (loss_of(network, batch).item() for network in (small_model(), model, other))
    assert ours < theirs + 0.2 * (start - theirs)
