# SPDX-License-Identifier: Apache-2.0
"""The equalities that must hold for any shapes, ratio and selection interval, each as a test."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adamw
from compare import assert_all_same, assert_same, assert_same_saved, assert_same_state, saved_state
from reference import ReferenceZenFlow
from strategies import ACTIONS, BF16, FP16, FP32, ORDINARY, ParameterSpec, Run, StepSpec, runs
from zenflow import ZenFlowOptimizer

TESTS = Path(__file__).parent
WITHOUT_EDITS = tuple(a for a in ACTIONS if not a.startswith("edit"))
MANY = settings(max_examples=4 * settings.default.max_examples)


def play(run, **changed):
    """The whole run on a ZenFlowOptimizer: parameters, their values after each step, and the optimizer."""
    parameters = run.new_parameters()
    optimizer = run.new_optimizer(ZenFlowOptimizer, parameters, **changed)
    history = []
    for i in range(len(run.steps)):
        run.play(i, parameters, optimizer)
        history.append([p.detach().clone() for p in parameters])
        run.act(i, parameters, optimizer)
    return parameters, history, optimizer


def assert_equals_reference(run, **changed):
    ours, theirs = run.new_parameters(), run.new_parameters()
    optimizer = run.new_optimizer(ZenFlowOptimizer, ours, **changed)
    reference = run.new_optimizer(ReferenceZenFlow, theirs)
    for i, step in enumerate(run.steps):
        run.play(i, ours, optimizer)
        run.play(i, theirs, reference)
        assert_all_same(ours, theirs, f"after step {i + 1}")
        if step.after == "settled":
            with optimizer.settled(), reference.settled():
                assert_all_same(ours, theirs, f"settled after step {i + 1}")
        elif step.after == "state":
            assert_same_state(optimizer, reference, f"after step {i + 1}")
        else:
            run.act(i, ours, optimizer)
            run.act(i, theirs, reference)
        assert_all_same(ours, theirs, f"after step {i + 1} and {step.after!r}")
    assert_same_state(optimizer, reference, "at the end")
    for method in ("synchronize", "flush"):
        getattr(optimizer, method)()
        getattr(reference, method)()
        assert_all_same(ours, theirs, f"after {method}()")
    assert_same_state(optimizer, reference, "after flush()")


@MANY
@given(runs())
def test_any_run_equals_the_reference(run):
    assert_equals_reference(run)


@given(runs(max_steps=30, kinds=ORDINARY, actions=("",)))
def test_a_long_undisturbed_run_equals_the_reference(run):
    assert_equals_reference(run)


def flushing_denormals(method):
    def wrapped(*args, **kwargs):
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormals")
        try:
            return method(*args, **kwargs)
        finally:
            torch.set_flush_denormal(False)

    return wrapped


@given(runs(kinds=("normal", "tiny", "denormal", "none"), actions=("", "", "synchronize", "flush")))
def test_the_callers_flush_to_zero_mode_changes_no_bit(run):
    ours, theirs = run.new_parameters(), run.new_parameters()
    optimizer = run.new_optimizer(ZenFlowOptimizer, ours)
    reference = run.new_optimizer(ReferenceZenFlow, theirs)
    for method in ("step", "synchronize", "flush"):
        setattr(optimizer, method, flushing_denormals(getattr(optimizer, method)))
    for i in range(len(run.steps)):
        for parameters, player in ((ours, optimizer), (theirs, reference)):
            run.play(i, parameters, player)
            run.act(i, parameters, player)
        assert_all_same(ours, theirs, f"after step {i + 1}")
    assert_same_state(optimizer, reference, "at the end")


# AdamW


def saved_moments(optimizer):
    return [(state["exp_avg"], state["exp_avg_sq"]) for state in saved_state(optimizer).values()]


EVERY_STEP = {"update_interval": 1, "update_delay": 0}
SYNCHRONOUS = [
    {**EVERY_STEP, "topk_ratio": 0.0},
    {**EVERY_STEP, "topk_ratio": 0.1},
    {**EVERY_STEP, "topk_ratio": 0.4, "select_interval": 3},
    {**EVERY_STEP, "topk_ratio": 0.4, "select_interval": 2, "deferred_rule": "mean"},
]
ALL_SELECTED = [
    {"update_interval": 1, "update_delay": 1, "topk_ratio": 1.0},
    {"update_interval": 4, "update_delay": 0, "topk_ratio": 1.0, "deferred_rule": "mean"},
    {"update_interval": 4, "update_delay": 1, "topk_ratio": 1.0},
    {"update_interval": 5, "update_delay": 5, "topk_ratio": 1.0},
]


@pytest.mark.parametrize("schedule", SYNCHRONOUS + ALL_SELECTED, ids=str)
def test_each_step_of_a_synchronous_schedule_is_adamws(schedule):
    adamw.assert_each_step_is_adamws(ZenFlowOptimizer, saved_moments, **schedule)


@pytest.mark.parametrize("schedule", SYNCHRONOUS + ALL_SELECTED, ids=str)
def test_200_steps_of_a_synchronous_schedule_stay_adamws(schedule):
    adamw.assert_200_steps_stay_adamws(ZenFlowOptimizer, **schedule)


@given(runs(kinds=ORDINARY, actions=WITHOUT_EDITS), st.integers(1, 4), st.integers(0, 4))
def test_all_columns_selected_is_the_synchronous_schedule_bit_for_bit(run, interval, delay):
    run = replace(run, groups=tuple({k: v for k, v in g.items() if k != "topk_ratio"} for g in run.groups))
    common = {"full_warm_up_rounds": 0, "select_interval": None, "steps_per_epoch": None}
    deferring = {"topk_ratio": 1.0, "update_interval": interval, "update_delay": min(delay, interval)}
    _, ours, _ = play(run, **common, **deferring)
    _, synchronous, _ = play(run, **common, **EVERY_STEP, topk_ratio=0.3, lookahead=0)
    for i, (a, b) in enumerate(zip(ours, synchronous, strict=True)):
        assert_all_same(a, b, f"after step {i + 1}")


def test_nothing_selected_one_step_late_is_adamw_one_step_late():
    shapes = [(24, 40), (3, 5, 16), (6, 4, 3, 3)]
    generator = torch.Generator().manual_seed(8)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    late, now, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(3))
    common = {"lr": adamw.LR, "weight_decay": adamw.DECAY, "min_offload_numel": 0, "topk_ratio": 0.0}
    common |= {"update_interval": 1, "lookahead": 0}
    optimizers = [
        ZenFlowOptimizer(late, update_delay=1, **common),
        ZenFlowOptimizer(now, update_delay=0, **common),
        adamw.torch_adamw(theirs),
    ]
    before = [w.clone() for w in start]
    for step in range(40):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for parameters, optimizer in zip((late, now, theirs), optimizers, strict=True):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            optimizer.step()
        assert_all_same(late, before, f"after step {step + 1}")
        before = [p.detach().clone() for p in now]
    for p, q in zip(now, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# Moments and masters


@given(runs(actions=WITHOUT_EDITS))
def test_moments_of_any_schedule_are_those_of_adamw_at_every_step(run):
    _, _, deferred = play(run, deferred_rule="adamw")
    common = {"deferred_rule": "adamw", "full_warm_up_rounds": 0, "select_interval": None, "steps_per_epoch": None}
    _, _, immediate = play(run, **common, **EVERY_STEP)
    deferred, immediate = saved_state(deferred), saved_state(immediate)
    assert deferred.keys() == immediate.keys()
    for i in deferred:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert_same(deferred[i][key], immediate[i][key], f"{key} of parameter {i}")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@given(data=st.data())
def test_masters_of_16_bit_parameters_follow_the_fp32_run(dtype, data):
    run = data.draw(runs(kinds=ORDINARY, actions=WITHOUT_EDITS, dtypes=[dtype], gradient_dtypes=[dtype]))
    half, full = run.new_parameters(), run.new_parameters(FP32)
    optimizers = [run.new_optimizer(ZenFlowOptimizer, half), run.new_optimizer(ZenFlowOptimizer, full)]
    for i in range(len(run.steps)):
        run.set_gradients(i, half)
        for p, q in zip(half, full, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        for parameters, optimizer in zip((half, full), optimizers, strict=True):
            run.set_settings(i, optimizer)
            optimizer.step()
            run.act(i, parameters, optimizer)
    ours, theirs = map(saved_state, optimizers)
    assert ours.keys() == theirs.keys()
    for i in ours:
        for key in ("step", "exp_avg", "exp_avg_sq", "master"):
            assert_same(ours[i][key], theirs[i][key], f"{key} of parameter {i}")


# Threads, buffers, instruction sets


@given(runs(), st.sampled_from([("stream", 1), ("ring", 2), ("stream", 3), ("auto", None)]))
def test_buffer_and_threads_change_no_bit(run, other):
    _, history, optimizer = play(run, host_buffer="ring", num_threads=1)
    buffer, threads = other
    _, other_history, other_optimizer = play(run, host_buffer=buffer, num_threads=threads)
    for i, (a, b) in enumerate(zip(history, other_history, strict=True)):
        assert_all_same(b, a, f"{other} after step {i + 1}")
    assert_same_saved(other_optimizer, optimizer, f"{other}")


@given(runs(max_steps=8, kinds=ORDINARY))
def test_a_run_repeats_itself(run):
    (_, first, _), (_, second, _) = play(run), play(run)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert_all_same(a, b, f"after step {i + 1}")


@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_parameters_that_fill_several_threads_equal_the_reference(buffer, rule):
    """Shapes beyond one chunk of the thread pool, so that the partition matters."""
    specs = (
        ParameterSpec((300, 517), FP32, "contiguous", FP32, "contiguous", 0),
        ParameterSpec((129, 1031), BF16, "transposed", BF16, "transposed", 0),
        ParameterSpec((64, 9, 3, 65), FP16, "gaps", FP16, "channels_last", 0),
    )
    schedule = {"update_interval": 2, "select_interval": 2, "topk_ratio": 0.1, "min_offload_numel": 0}
    steps = tuple(StepSpec(("columns",) * 3) for _ in range(5))
    run = Run(specs, ({},), {**schedule, "deferred_rule": rule, "host_buffer": buffer}, steps, seed=3)
    assert_equals_reference(run, num_threads=3)


def digests(isa):
    command = [sys.executable, str(TESTS / "small_model.py")]
    done = subprocess.run(command, env=os.environ | {"ZENFLOW_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def scalar_digests():
    return digests("scalar")


def test_threads_and_buffers_give_equal_bits_over_50_steps_of_a_model(scalar_digests):
    by_run = {}
    for name, digest in scalar_digests.items():
        by_run.setdefault(" ".join(name.split()[:2]), set()).add(digest)
    assert {name: len(found) for name, found in by_run.items()} == dict.fromkeys(by_run, 1)
    assert len(by_run) == 4


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_instruction_sets_give_equal_bits_over_50_steps_of_a_model(isa, scalar_digests):
    capability = torch.backends.cpu.get_cpu_capability()
    if isa not in {"AVX2": ("avx2",), "AVX512": ("avx2", "avx512")}.get(capability, ()):
        pytest.skip(f"this CPU has no {isa} (torch finds {capability})")
    assert digests(isa) == scalar_digests
