# SPDX-License-Identifier: Apache-2.0
"""One behaviour per test, by example: what a user of ZenFlowOptimizer can rely on."""

import copy
import io
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from compare import assert_all_same, assert_same, assert_same_saved, assert_same_state, saved_state
from reference import ReferenceZenFlow
from small_parameters import random_gradient, random_parameter, train, zenflow_of
from strategies import BF16, FP16, FP32, MIXED_GRADIENTS, ParameterSpec, Run, StepSpec
from zenflow import ZenFlowOptimizer

# every update moves by lr * sign(gradient), exactly
SIGN = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}


def step_with(optimizer, p, gradient):
    """One step; returns the columns that changed and the weights before."""
    before = p.detach().clone()
    p.grad = gradient
    optimizer.step()
    return moved(p, before), before


def moved(p, before):
    changed = (p.detach() != before) & ~(p.detach().isnan() & before.isnan())
    return changed.any(0).nonzero().flatten().tolist()


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_of_norms(rows, norms):
    return torch.tensor(norms).expand(rows, -1).clone()


# Selection


@pytest.mark.parametrize(
    ("ratio", "columns", "count"),
    [(0, 10, 0), (0.001, 10, 1), (0.14, 10, 1), (0.15, 10, 2), (0.25, 10, 3), (0.5, 5, 3), (1.0, 7, 7)],
)
def test_the_ratio_selects_half_up_and_at_least_one_column(ratio, columns, count):
    p = random_parameter(6, columns)
    changed, _ = step_with(zenflow_of(p, topk_ratio=ratio), p, torch.randn(6, columns))
    assert len(changed) == count


def test_columns_with_the_largest_norms_are_selected():
    p = random_parameter(3, 6)
    optimizer = zenflow_of(p, topk_ratio=0.5)
    assert step_with(optimizer, p, gradient_of_norms(3, [1.0, -5.0, 2.0, 4.0, -3.0, 0.5]))[0] == [1, 3, 4]


def test_ties_go_to_the_lower_index():
    p = random_parameter(3, 40)
    gradient = torch.ones(3, 40)
    gradient[:, 37] = 2
    assert step_with(zenflow_of(p, topk_ratio=0.25), p, gradient)[0] == [*range(9), 37]


def test_non_finite_norms_rank_below_finite_ones_and_exactly_k_are_selected():
    norms = [math.nan, 1.0, math.inf, 1e30, 3.0, 0.0]  # 1e30 squared overflows
    for ratio, expected in ((0.5, [1, 4, 5]), (0.8, [0, 1, 2, 4, 5])):
        p = random_parameter(3, 6)
        optimizer = zenflow_of(p, topk_ratio=ratio, weight_decay=0.1)  # column 5 moves by its decay
        assert step_with(optimizer, p, gradient_of_norms(3, norms))[0] == expected


def test_a_column_of_a_4d_parameter_is_one_weight_of_every_filter():
    p = random_parameter(4, 3, 2, 2)
    gradient = torch.zeros(4, 3, 2, 2)
    gradient[:, 2, 0, 1] = 1
    before = p.detach().clone()
    p.grad = gradient.to(memory_format=torch.channels_last)
    zenflow_of(p, topk_ratio=0.01, weight_decay=0.0).step()
    assert ((p != before) == (gradient != 0)).all()


def test_a_column_of_a_3d_parameter_spans_both_leading_dimensions():
    p = random_parameter(2, 3, 5)
    gradient = torch.zeros(2, 3, 5)
    gradient[..., 3] = 1
    before = p.detach().clone()
    p.grad = gradient
    zenflow_of(p, topk_ratio=0.01, weight_decay=0.0).step()
    assert ((p != before) == (gradient != 0)).all()


def test_selection_is_made_anew_after_select_interval_steps_and_not_before():
    p = nn.Parameter(torch.zeros(2, 4))
    optimizer = zenflow_of(p, topk_ratio=0.25, update_interval=2, select_interval=4, update_delay=0)
    assert step_with(optimizer, p, gradient_of_norms(2, [9.0, 1.0, 1.0, 1.0]))[0] == [0]
    other = gradient_of_norms(2, [1.0, 1.0, 9.0, 1.0])
    changes = [step_with(optimizer, p, other)[0] for _ in range(5)]
    everything = [0, 1, 2, 3]
    assert changes == [everything, [0], everything, [2], everything]


def test_the_selection_interval_must_be_a_multiple_of_the_update_interval():
    with pytest.raises(ValueError, match=r"(?s)select_interval.*update_interval|update_interval.*select_interval"):
        zenflow_of(random_parameter(2, 2), update_interval=4, select_interval=6)


def test_a_delay_beyond_the_interval_is_refused():
    with pytest.raises(ValueError, match="update_delay"):
        zenflow_of(random_parameter(2, 2), update_interval=4, update_delay=5)


def test_a_late_first_gradient_selects_at_that_gradient():
    early, late = random_parameter(3, 8), random_parameter(3, 8, seed=1)
    optimizer = zenflow_of(early, late, topk_ratio=0.25, update_interval=4)
    step_with(optimizer, early, torch.ones(3, 8))
    before = late.detach().clone()
    late.grad = gradient_of_norms(3, [0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0])
    optimizer.step()
    assert moved(late, before) == [3, 5]


def test_a_parameter_without_a_gradient_at_a_selection_step_keeps_its_selection():
    p = random_parameter(3, 4)
    optimizer = zenflow_of(p, topk_ratio=0.25, update_interval=3, select_interval=3, update_delay=0)
    first, second = gradient_of_norms(3, [9.0, 1.0, 1.0, 1.0]), gradient_of_norms(3, [1.0, 1.0, 9.0, 1.0])
    gradients = [first, first, first, None, second, second, second]  # steps 1, 4 and 7 select
    changes = [step_with(optimizer, p, gradient)[0] for gradient in gradients]
    everything = [0, 1, 2, 3]
    assert changes == [[0], [0], everything, [], [0], everything, [2]]


# Windows and visibility


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_a_windows_result_appears_exactly_delay_steps_after_its_end(delay):
    p = random_parameter(4, 5)
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=3, update_delay=delay)
    changes = [bool(step_with(optimizer, p, random_gradient(p, s))[0]) for s in range(12)]
    expected = [end + delay for end in (3, 6, 9, 12) if end + delay <= 12]
    assert [s + 1 for s, changed in enumerate(changes) if changed] == expected


def test_windows_end_and_updates_appear_whether_or_not_there_is_a_gradient():
    p, other = random_parameter(4, 5), random_parameter(4, 5, seed=1)
    optimizer = zenflow_of(p, other, topk_ratio=0.0, update_interval=2)
    other.grad = torch.ones(4, 5)
    assert step_with(optimizer, p, torch.ones(4, 5))[0] == []
    assert step_with(optimizer, p, None)[0] == []  # the window ends
    assert step_with(optimizer, p, None)[0] == [0, 1, 2, 3, 4]  # and appears
    assert step_with(optimizer, p, None)[0] == []  # a window without a gradient
    assert step_with(optimizer, p, None)[0] == []
    assert float(saved_state(optimizer)[0]["step"]) == 1


def test_a_step_without_any_gradient_still_counts():
    p = random_parameter(4, 5)
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=3, update_delay=0)
    changes = [bool(step_with(optimizer, p, g)[0]) for g in (torch.ones(4, 5), None, None, None)]
    assert changes == [False, False, True, False]


def test_the_window_moves_once_by_the_sum_of_its_learning_rates():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, lookahead=0, **SIGN)
    seen = []
    for lr in (1.0, 2.0, 4.0, 8.0, 16.0):
        set_lr(optimizer, lr)
        step_with(optimizer, p, torch.ones(2, 3))
        seen.append(p[0, 0].item())
    assert seen == [0, 0, -3, -3, -15]
    optimizer.flush()
    assert (p == -31).all()


def test_a_learning_rate_tensor_counts_by_its_value_at_each_step():
    p = nn.Parameter(torch.zeros(2, 3))
    lr = torch.tensor(1.0)
    optimizer = zenflow_of(p, lr=lr, topk_ratio=0.0, update_interval=2, update_delay=0, **SIGN)
    step_with(optimizer, p, torch.ones(2, 3))
    lr.fill_(2.0)
    optimizer.param_groups[0]["lr"].fill_(2.0)
    step_with(optimizer, p, torch.ones(2, 3))
    lr.fill_(100.0)
    assert (p == -3).all()


def test_decay_of_a_window_is_the_product_of_its_steps():
    p = nn.Parameter(torch.full((2, 3), 64.0))
    settings = {**SIGN, "weight_decay": 0.5, "eps": 1.0}  # a zero gradient moves by decay alone
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, update_delay=0, lr=1.0, **settings)
    step_with(optimizer, p, torch.zeros(2, 3))
    optimizer.param_groups[0]["weight_decay"] = 0.25
    step_with(optimizer, p, torch.zeros(2, 3))
    assert (p == 64 * 0.5 * 0.75).all()


def test_the_mean_rule_moves_once_by_the_mean_with_the_last_learning_rate():
    p = nn.Parameter(torch.zeros(2, 3))
    settings = {**SIGN, "deferred_rule": "mean", "update_delay": 0}
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, **settings)
    for lr, g in ((4.0, -1.0), (0.5, 7.0), (4.0, 3.0), (0.5, -7.0)):
        set_lr(optimizer, lr)
        step_with(optimizer, p, torch.full((2, 3), g))
        if g == 7.0:
            assert (p == -0.5).all()
            assert (saved_state(optimizer)[0]["exp_avg"] == 3).all()
    assert (p == 0).all()


def test_in_warm_up_every_column_moves_at_every_step_without_look_ahead():
    ours, theirs = random_parameter(4, 10), random_parameter(4, 10)
    warm = zenflow_of(ours, topk_ratio=0.0, update_interval=3, full_warm_up_rounds=4, lookahead=7)
    synchronous = zenflow_of(theirs, topk_ratio=0.0, update_interval=1, update_delay=0, lookahead=0)
    for step in range(4):
        train(warm, 1, step)
        train(synchronous, 1, step)
        assert_same(ours, theirs, f"warm-up step {step + 1}")
    changes = [bool(step_with(warm, ours, random_gradient(ours, s))[0]) for s in range(4, 9)]
    assert changes == [False, False, False, True, False]  # windows begin after warm-up


def test_warm_up_keeps_the_sign_of_a_zero_gradient_under_either_rule():
    for rule in ("adamw", "mean"):
        p = nn.Parameter(torch.ones(1, 2))
        settings = {"betas": (0.0, 0.9), "deferred_rule": rule, "topk_ratio": 0, "full_warm_up_rounds": 9}
        optimizer = zenflow_of(p, **settings)
        for gradient in ([[1.0, -1.0]], [[1.0, -0.0]]):
            step_with(optimizer, p, torch.tensor(gradient))
        assert_same(saved_state(optimizer)[0]["exp_avg"], torch.tensor([[1.0, -0.0]]), rule)


def test_small_and_unsplit_parameters_are_updated_in_full_at_every_step():
    tensors = [random_parameter(), random_parameter(7), random_parameter(3, 5), random_parameter(20, 30)]
    split_off = random_parameter(20, 30, seed=1)
    groups = [{"params": tensors[:3]}, {"params": [split_off], "split": False}, {"params": [tensors[3]]}]
    optimizer = ZenFlowOptimizer(groups, topk_ratio=0.0, min_offload_numel=16)
    everything = [*tensors[:3], split_off, tensors[3]]
    before = [p.detach().clone() for p in everything]
    train(optimizer, 1)
    assert [bool((p != b).all()) for p, b in zip(everything, before, strict=True)] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_the_default_splits_nothing_below_65536_elements():
    small, large = random_parameter(255, 257), random_parameter(256, 256)
    before = small.detach().clone(), large.detach().clone()
    optimizer = ZenFlowOptimizer([small, large], topk_ratio=0.0)
    train(optimizer, 1)
    assert (small != before[0]).all() and (large == before[1]).all()


# Look-ahead


def test_look_ahead_is_written_but_not_kept():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, update_delay=1, lookahead=3, **SIGN)
    for lr in (8.0, 2.0, 0.0):
        set_lr(optimizer, lr)
        step_with(optimizer, p, torch.ones(2, 3))
    assert (p == -10 - 3 * 2).all()
    assert (saved_state(optimizer)[0]["master"] == -10).all()


def test_automatic_look_ahead_is_the_delay():
    for delay in (0, 1, 2):
        p = nn.Parameter(torch.zeros(2, 3))
        optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, update_delay=delay, lr=1.0, **SIGN)
        for _ in range(2 + delay):
            step_with(optimizer, p, torch.ones(2, 3))
        assert p[0, 0].item() == (-2 - delay if delay < 2 else -4)


def test_synchronize_withdraws_the_look_ahead_and_counts_as_publication():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=2, update_delay=2, lookahead=5, lr=1.0, **SIGN)
    for _ in range(2):
        step_with(optimizer, p, torch.ones(2, 3))
    optimizer.synchronize()
    assert (p == -2).all()
    assert step_with(optimizer, p, torch.ones(2, 3))[0] == []
    assert step_with(optimizer, p, torch.ones(2, 3))[0] == []  # would have been its step


def test_selected_columns_get_no_look_ahead():
    p = nn.Parameter(torch.zeros(2, 4))
    optimizer = zenflow_of(p, topk_ratio=0.25, update_interval=2, lookahead=9, lr=1.0, **SIGN)
    for step in range(1, 6):
        step_with(optimizer, p, gradient_of_norms(2, [2.0, 1.0, 1.0, 1.0]))
        assert (p[:, 0] == -step).all()


# Learning rate 0


def test_learning_rate_zero_moves_no_bit_even_with_nan_gradients():
    for dtype in (FP32, BF16, FP16):
        p = random_parameter(4, 6, dtype=dtype)
        with torch.no_grad():
            p[0, 0], p[1, 1], p[2, 2], p[3, 5] = (
                -0.0,
                torch.finfo(dtype).smallest_normal / 4,
                math.inf,
                math.nan,
            )
        before = p.detach().clone()
        optimizer = zenflow_of(p, lr=0.0, weight_decay=0.5, topk_ratio=0.3, update_interval=2, select_interval=2)
        for _ in range(3):
            train(optimizer, 2)
            step_with(optimizer, p, torch.full_like(p, math.nan))
            assert_same(p, before, "weights")
        optimizer.flush()
        assert_same(p, before, "weights after flush()")


def test_what_earlier_windows_owe_still_appears_at_learning_rate_zero():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, lr=1.0, topk_ratio=0.0, update_interval=1, update_delay=1, lookahead=1, **SIGN)
    seen = []
    for lr in (1.0, 0.0, 0.0):
        set_lr(optimizer, lr)
        step_with(optimizer, p, torch.ones(2, 3))
        seen.append(p[0, 0].item())
    assert seen == [0, -2, -1]


# Hand-over


def test_a_selection_step_first_publishes_what_is_in_flight():
    p = nn.Parameter(torch.zeros(2, 4))
    settings = {"update_interval": 2, "select_interval": 2, "update_delay": 2, "lookahead": 3}
    optimizer = zenflow_of(p, lr=1.0, topk_ratio=0.25, **settings, **SIGN)
    step_with(optimizer, p, gradient_of_norms(2, [9.0, 1.0, 1.0, 1.0]))
    step_with(optimizer, p, gradient_of_norms(2, [9.0, 1.0, 1.0, 1.0]))
    assert p[0].tolist() == [-2, 0, 0, 0]
    set_lr(optimizer, 0.0)
    step_with(optimizer, p, gradient_of_norms(2, [1.0, 9.0, 1.0, 1.0]))
    # 0 keeps its weight, 1 gets its settled master, the others their look-ahead: due at step 4, but 3 selects
    assert p[0].tolist() == [-2, -2, -5, -5]


def test_newly_deferred_columns_keep_their_weight_until_the_next_publication():
    p = nn.Parameter(torch.zeros(2, 4))
    settings = {"update_interval": 2, "select_interval": 2, "update_delay": 1, "lookahead": 0}
    optimizer = zenflow_of(p, lr=1.0, topk_ratio=0.25, **settings, **SIGN)
    norms = [[9.0, 1.0, 1.0, 1.0]] * 2 + [[1.0, 9.0, 1.0, 1.0]] * 2 + [[1.0, 1.0, 9.0, 1.0]]
    first = []
    for row in norms:
        step_with(optimizer, p, gradient_of_norms(2, row))
        first.append(p[0, 0].item())
    assert first == [-1, -2, -2, -2, -4]


@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_masters_moments_and_counts_move_with_a_column(rule):
    """The selection goes around; every column sees both sides several times."""
    settings = {
        "topk_ratio": 0.34,
        "update_interval": 2,
        "select_interval": 2,
        "deferred_rule": rule,
        "lr": 0.01,
    }
    ours, theirs = random_parameter(5, 9, dtype=BF16), random_parameter(5, 9, dtype=BF16)
    optimizer = zenflow_of(ours, **settings)
    reference = zenflow_of(theirs, **settings, optimizer_class=ReferenceZenFlow)
    seen = set()
    for step in range(18):
        weights = torch.tensor([10.0 if (j - step // 2) % 3 == 0 else 1.0 for j in range(9)])
        for p, player in ((ours, optimizer), (theirs, reference)):
            p.grad = random_gradient(p, step) * weights.to(BF16)
            player.step()
        seen |= set(reference.selection(theirs))
        assert_same(ours, theirs, f"step {step + 1}")
        assert_same_state(optimizer, reference, f"step {step + 1}")
    assert seen == set(range(9))


# Missing gradients


def test_a_parameter_advances_only_with_its_gradients():
    ours, theirs = random_parameter(4, 6), random_parameter(4, 6)
    other = random_parameter(2, 3)
    settings = {"topk_ratio": 0.3, "update_interval": 1, "update_delay": 0}
    with_gaps, without = zenflow_of(ours, other, **settings), zenflow_of(theirs, **settings)
    for step in range(5):
        other.grad = random_gradient(other, step)
        step_with(with_gaps, ours, random_gradient(ours, step))
        step_with(with_gaps, ours, None)
        step_with(without, theirs, random_gradient(theirs, step))
        assert_same(ours, theirs, f"gradient {step + 1}")
    steps = {i: float(state["step"]) for i, state in saved_state(with_gaps).items()}
    assert steps == {0: 5, 1: 10}


def test_a_parameter_that_never_has_a_gradient_is_never_touched():
    p, idle = random_parameter(3, 4), random_parameter(3, 4)
    before = idle.detach().clone()
    optimizer = zenflow_of(p, idle)
    for step in range(10):
        step_with(optimizer, p, random_gradient(p, step))
    optimizer.flush()
    assert_same(idle, before, "weights")
    assert 1 not in saved_state(optimizer) or saved_state(optimizer)[1]["step"] == 0


# Clipping


def test_clipping_scales_both_halves_by_the_global_norm_and_leaves_the_gradients():
    parameters = [random_parameter(6, 10), random_parameter(5), random_parameter(2, 3, 4)]
    optimizer = zenflow_of(*parameters, max_grad_norm=0.5, topk_ratio=0.3, betas=(0.9, 0.99))
    gradients = [random_gradient(p, 0) for p in parameters]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    for (_, state), p, g in zip(saved_state(optimizer).items(), parameters, gradients, strict=True):
        torch.testing.assert_close(state["exp_avg"], 0.1 * 0.5 / norm * g, rtol=1e-4, atol=0)
        assert_same(p.grad, g, "p.grad")


def test_a_norm_below_the_limit_changes_no_bit():
    p, q = random_parameter(6, 10), random_parameter(6, 10)
    train(zenflow_of(p, max_grad_norm=1e6), 6)
    train(zenflow_of(q), 6)
    assert_same(p, q, "weights")


def test_a_non_finite_norm_clips_nothing_and_is_counted():
    p, q, unclipped = random_parameter(6, 10), random_parameter(4), random_parameter(6, 10)
    optimizer = zenflow_of(p, q, max_grad_norm=1e-3)
    q.grad = torch.tensor([1.0, math.inf, 1.0, 1.0])
    step_with(optimizer, p, random_gradient(p, 0))
    step_with(zenflow_of(unclipped), unclipped, random_gradient(p, 0))
    assert_same(p, unclipped, "weights")
    assert optimizer.stats().total.nonfinite_norms == 1


# User methods


@pytest.mark.parametrize("method", ["synchronize", "flush"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5])
def test_synchronize_and_flush_are_idempotent(method, steps):
    p = random_parameter(4, 9, dtype=BF16)
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=3, update_delay=2, lr=0.1)
    train(optimizer, steps)
    getattr(optimizer, method)()
    once, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    getattr(optimizer, method)()
    assert_same(p, once, "weights")
    for key, value in optimizer.state_dict()["state"].get(0, {}).items():
        if torch.is_tensor(value) and value.dtype in (FP32, BF16):
            assert_same(value, state["state"][0][key], key)


def test_flush_closes_the_open_window_and_opens_a_new_one():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=3, update_delay=0, lr=1.0, **SIGN)
    seen = []
    for step in range(5):
        step_with(optimizer, p, torch.ones(2, 3))
        if step == 1:
            optimizer.flush()
            seen.append("flush")
        seen.append(p[0, 0].item())
    assert seen == [0, "flush", -2, -2, -2, -5]


def test_settled_shows_masters_and_restores_the_training_weights_bit_for_bit():
    p = random_parameter(4, 9, dtype=BF16)
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=3, update_delay=2, lookahead=4, lr=0.1)
    differs = 0
    for step in range(12):
        train(optimizer, 1, step)
        training = p.detach().clone()
        master = saved_state(optimizer)[0]["master"].clone()
        with optimizer.settled():
            assert_same(p, master.to(BF16), f"settled after step {step + 1}")
        assert_same(p, training, f"restored after step {step + 1}")
        differs += bool((training != master.to(BF16)).any())
    assert differs > 5


def test_settled_restores_after_an_exception():
    p = random_parameter(4, 9)
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=2, lookahead=4, lr=0.1)
    train(optimizer, 5)
    training = p.detach().clone()
    with pytest.raises(RuntimeError, match="evaluation"), optimizer.settled():
        raise RuntimeError("evaluation failed")
    assert_same(p, training, "weights")


def test_settled_changes_nothing_about_the_run():
    plain, looked_at = random_parameter(4, 9, dtype=FP16), random_parameter(4, 9, dtype=FP16)
    settings = {"topk_ratio": 0.3, "update_interval": 3, "update_delay": 2, "lr": 0.1}
    optimizers = [zenflow_of(plain, **settings), zenflow_of(looked_at, **settings)]
    for step in range(12):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        with optimizers[1].settled():
            pass
        assert_same(looked_at, plain, f"step {step + 1}")


def test_an_edit_inside_settled_survives():
    p = random_parameter(4, 9)
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=2, lookahead=4, lr=0.1)
    train(optimizer, 5)
    training = p.detach().clone()
    with optimizer.settled(), torch.no_grad():
        p[1] = 42.0
    assert (p[1] == 42).all()
    training[1] = 42.0
    assert_same(p, training, "weights")
    set_lr(optimizer, 0.0)
    train(optimizer, 4)
    optimizer.flush()
    assert (saved_state(optimizer)[0]["master"][1, :] - 42).abs().max() < 0.2  # less than one earlier step's move


def test_a_closure_runs_once_with_gradients_enabled_and_its_value_is_returned():
    p = random_parameter(3, 4)
    optimizer = zenflow_of(p)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = p.square().sum()
    assert optimizer.step(closure).item() == expected.item()
    assert len(calls) == 1


def test_an_exception_in_the_closure_is_no_step():
    p, undisturbed = random_parameter(4, 9), random_parameter(4, 9)
    optimizer, other = zenflow_of(p, lr=0.1), zenflow_of(undisturbed, lr=0.1)

    def closure():
        raise RuntimeError("no batch")

    for step in range(12):
        with pytest.raises(RuntimeError, match="no batch"):
            optimizer.step(closure)
        train(optimizer, 1, step)
        train(other, 1, step)
        assert_same(p, undisturbed, f"step {step + 1}")


def test_state_dict_changes_nothing():
    parameters = [random_parameter(4, 9, dtype=dtype) for dtype in (FP32, FP32)]
    optimizers = [zenflow_of(p, topk_ratio=0.3, update_interval=3, update_delay=3, lr=0.1) for p in parameters]
    for step in range(14):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        optimizers[1].state_dict()
        assert_all_same(parameters[1:], parameters[:1], f"step {step + 1}")
    assert_same_saved(*optimizers, "state")


# Edits


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = random_parameter(6, 10, dtype=dtype)


def load_into_the_model(net, values):
    net.load_state_dict({"weight": values})


def initialise(net, values):
    nn.init.ones_(net.weight)


def copy_into_data(net, values):
    net.weight.data.copy_(values)


def replace_data(net, values):
    net.weight.data = values.clone()


def write_through_numpy(net, values):
    integer = torch.int16 if values.element_size() == 2 else torch.int32
    net.weight.detach().view(integer).numpy()[...] = values.view(integer).numpy()


def edit_without_grad(net, values):
    with torch.no_grad():
        net.weight[:, 1:5] = values[:, 1:5]


def edit_data_of_one_element(net, values):
    net.weight.data[2, 3] = values[2, 3]


EDITS = [
    load_into_the_model,
    initialise,
    copy_into_data,
    replace_data,
    write_through_numpy,
    edit_without_grad,
    edit_data_of_one_element,
]
# after 3 steps a window is open, after 4 its update is in flight, after 5 a new one is open too, 6 publishes
EDIT_SETTINGS = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 8, "update_delay": 2, "lr": 0.05}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("steps", [0, 3, 4, 5, 6, 7, 8])
def test_training_goes_on_from_edited_weights(edit, steps):
    for dtype in (FP32, BF16):
        nets = Net(dtype), Net(dtype)
        optimizer = zenflow_of(nets[0].weight, **EDIT_SETTINGS)
        reference = zenflow_of(nets[1].weight, **EDIT_SETTINGS, optimizer_class=ReferenceZenFlow)
        values = random_gradient(nets[0].weight, 999)
        for net, player in zip(nets, (optimizer, reference), strict=True):
            train(player, steps)
            edit(net, values)
        for step in range(steps, steps + 12):
            for player in (optimizer, reference):
                train(player, 1, step)
            assert_same(nets[0].weight, nets[1].weight, f"step {step + 1}")
        assert_same_state(optimizer, reference, "state")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("steps", [4, 5, 8])
def test_no_old_master_ever_overwrites_an_edit(edit, steps):
    """With learning rate 0 and no open window, edited elements keep their bits for good."""
    for interval_settings in ({}, {"host_buffer": "stream"}, {"deferred_rule": "mean"}):
        net = Net(BF16)
        optimizer = zenflow_of(net.weight, **{**EDIT_SETTINGS, **interval_settings})
        train(optimizer, 4)
        set_lr(optimizer, 0.0)
        train(optimizer, steps - 4, start=4)
        before = net.weight.detach().clone()
        edit(net, random_gradient(net.weight, 999))
        edited = net.weight.detach().clone()
        changed = edited != before
        assert changed.any()
        train(optimizer, 13, start=steps)
        assert_same(net.weight[changed], edited[changed], "edited elements")
        optimizer.flush()
        assert_same(net.weight[changed], edited[changed], "edited elements after flush()")
        assert_same(saved_state(optimizer)[0]["master"][changed], edited[changed].float(), "masters")


@pytest.mark.parametrize("method", ["synchronize", "flush", "state_dict"])
@pytest.mark.parametrize("edit", EDITS)
def test_synchronize_flush_and_state_dict_look_for_edits(edit, method):
    net = Net(BF16)
    optimizer = zenflow_of(net.weight, **EDIT_SETTINGS)
    train(optimizer, 4)
    before = net.weight.detach().clone()
    edit(net, random_gradient(net.weight, 999))
    edited = net.weight.detach().clone()
    changed = edited != before
    getattr(optimizer, method)()
    assert_same(net.weight[changed], edited[changed], "edited elements")
    assert_same(saved_state(optimizer)[0]["master"][changed], edited[changed].float(), "masters")


def test_loading_a_models_own_16_bit_weights_costs_no_bits():
    nets = Net(BF16), Net(BF16)
    optimizers = [zenflow_of(net.weight, **EDIT_SETTINGS) for net in nets]
    for step in range(14):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        nets[1].load_state_dict(copy.deepcopy(nets[1].state_dict()))
        nets[1].weight.data = nets[1].weight.data.clone()
        assert_same(nets[1].weight, nets[0].weight, f"step {step + 1}")
    assert_same_saved(*optimizers, "state")


@pytest.mark.parametrize("steps", [7, 8, 9])
def test_a_model_saved_under_settled_resumes_with_all_bits_of_its_masters(steps):
    p = random_parameter(6, 10, dtype=BF16)
    optimizer = zenflow_of(p, lr=0.01)
    train(optimizer, steps)
    with optimizer.settled():
        model = p.detach().clone()
    state = optimizer.state_dict()
    resumed = nn.Parameter(model)
    again = zenflow_of(resumed, lr=0.01)
    again.load_state_dict(state)
    in_flight = ("pending_output",) if steps == 8 else ()
    for key in ("master", "exp_avg", "exp_avg_sq", *in_flight):
        assert_same(saved_state(again)[0][key], state["state"][0][key], key)
    assert_same(resumed, model, "looking for edits writes nothing")
    with torch.no_grad():
        resumed[0, 0] += 1
    again.synchronize()
    assert saved_state(again)[0]["master"][0, 0] == resumed[0, 0], "a real edit still wins"


def test_an_edit_before_the_first_gradient_is_where_training_starts():
    net = Net(FP32)
    optimizer = zenflow_of(net.weight, topk_ratio=0.3)
    net.weight.data.fill_(3.0)
    set_lr(optimizer, 0.0)
    train(optimizer, 9)
    assert (net.weight == 3).all()


def test_the_open_windows_gradients_move_from_the_edited_weight():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = zenflow_of(p, topk_ratio=0.0, update_interval=3, update_delay=0, lr=1.0, **SIGN)
    step_with(optimizer, p, torch.ones(2, 3))
    step_with(optimizer, p, torch.ones(2, 3))
    p.data.fill_(10.0)
    step_with(optimizer, p, torch.ones(2, 3))
    assert (p == 7).all()


def test_training_goes_on_in_a_new_dtype():
    net = Net(FP32)
    optimizer = zenflow_of(net.weight, **EDIT_SETTINGS)
    train(optimizer, 5)
    net.to(BF16)
    weights = net.weight.detach().clone()
    set_lr(optimizer, 0.0)
    for step in range(5, 14):
        train(optimizer, 1, step)
        assert net.weight.dtype == BF16
    # nothing but the window that was open, and 2 steps of look-ahead, may have moved it
    assert (net.weight.float() - weights.float()).abs().max() < 0.5
    assert saved_state(optimizer)[0]["master"].dtype == FP32


@pytest.mark.parametrize("then", [FP32, FP16])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_checkpoint_of_another_dtype_keeps_its_masters(ratio, then):
    settings = {**EDIT_SETTINGS, "topk_ratio": ratio, "lr": 1e-3}
    net, twin = Net(BF16), Net(then)
    optimizer, resumed_one = zenflow_of(net.weight, **settings), zenflow_of(twin.weight, **settings)
    train(optimizer, 6)
    resumed_one.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(net.state_dict())
    assert_same(saved_state(resumed_one)[0]["master"], saved_state(optimizer)[0]["master"], "masters")
    train(resumed_one, 9, start=6)
    assert twin.weight.dtype == then


@pytest.mark.parametrize("back", [False, True])
def test_a_model_may_change_its_dtype_inside_settled(back):
    net = Net(FP32)
    optimizer = zenflow_of(net.weight, **EDIT_SETTINGS)
    train(optimizer, 5)
    with optimizer.settled():
        net.to(BF16)
        if back:
            net.to(FP32)
        shown = net.weight.detach().clone()
    set_lr(optimizer, 0.0)
    optimizer.synchronize()
    torch.testing.assert_close(net.weight.detach(), shown, rtol=0, atol=2 * 0.05)
    train(optimizer, 9, start=5)
    assert net.weight.dtype == shown.dtype


# Edges


@pytest.mark.skipif(not MIXED_GRADIENTS, reason="in this torch a gradient has its parameter's dtype")
@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_the_gradients_of_one_window_may_differ_in_dtype(rule, buffer):
    settings = {"topk_ratio": 0.3, "update_interval": 3, "update_delay": 2, "deferred_rule": rule}
    ours, theirs = random_parameter(6, 10, dtype=BF16), random_parameter(6, 10, dtype=BF16)
    optimizer = zenflow_of(ours, **settings, host_buffer=buffer)
    reference = zenflow_of(theirs, **settings, optimizer_class=ReferenceZenFlow)
    for step in range(12):
        for p, player in ((ours, optimizer), (theirs, reference)):
            p.grad_dtype = None
            p.grad = random_gradient(p, step).float().to((FP32, BF16, FP16, BF16, FP32)[step % 5])
            player.step()
        assert_same(ours, theirs, f"step {step + 1}")
    assert_same_state(optimizer, reference, "state")


def test_a_group_added_in_the_middle_of_a_window_joins_it():
    settings = {"topk_ratio": 0.3, "update_interval": 3, "update_delay": 1}
    parameters, copied = ([random_parameter(6, 10), random_parameter(5, 8, seed=1)] for _ in range(2))
    optimizer = zenflow_of(parameters[0], **settings)
    reference = zenflow_of(copied[0], **settings, optimizer_class=ReferenceZenFlow)
    for step in range(12):
        if step == 4:
            optimizer.add_param_group({"params": [parameters[1]], "lr": 0.1, "topk_ratio": 0.5})
            reference.add_param_group({"params": [copied[1]], "lr": 0.1, "topk_ratio": 0.5})
        train(optimizer, 1, step)
        train(reference, 1, step)
        assert_all_same(parameters, copied, f"step {step + 1}")
    assert_same_state(optimizer, reference, "state")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (0, 2, 3, 3)])
def test_empty_tensors_are_left_alone(shape):
    empty, p = nn.Parameter(torch.zeros(shape)), random_parameter(3, 4)
    optimizer = zenflow_of(empty, p, max_grad_norm=1.0, update_interval=2, select_interval=2)
    train(optimizer, 7)
    optimizer.synchronize()
    optimizer.flush()
    with optimizer.settled():
        pass
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 3)
    assert empty.shape == shape


def test_memory_between_the_elements_of_a_strided_parameter_is_not_touched():
    base = torch.full((6, 21), 7.0)
    p = nn.Parameter(base[:, 1::2])
    p.data.normal_()
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=2, select_interval=2)
    train(optimizer, 9)
    optimizer.flush()
    assert p.data_ptr() == base[:, 1::2].data_ptr()
    assert (base[:, ::2] == 7).all()


def test_maximize_is_the_negated_gradient():
    p, q = random_parameter(4, 9), random_parameter(4, 9)
    up, down = zenflow_of(p, maximize=True, lr=0.1), zenflow_of(q, lr=0.1)
    for step in range(9):
        step_with(up, p, random_gradient(p, step))
        step_with(down, q, -random_gradient(q, step))
        assert_same(p, q, f"step {step + 1}")


# State: keys, resuming, copies


def run_of(rule="adamw", delay=3, buffer="ring", steps=24):
    """Parameters of all kinds, windows of 3, selection every second window, some gradients missing."""
    specs = (
        ParameterSpec((7, 12), FP32, "contiguous", FP32, "contiguous", 0),
        ParameterSpec((3, 4, 10), BF16, "transposed", BF16, "contiguous", 0),
        ParameterSpec((11,), FP32, "contiguous", FP32, "contiguous", 0),
        ParameterSpec((5, 3, 2, 2), FP16, "channels_last", FP16, "channels_last", 1),
    )
    settings = {
        "topk_ratio": 0.25,
        "update_interval": 3,
        "select_interval": 6,
        "update_delay": delay,
        "lr": 0.02,
    }
    settings |= {"deferred_rule": rule, "host_buffer": buffer, "min_offload_numel": 0, "num_threads": 1}
    kinds = [
        ("columns", "none" if i % 5 == 2 else "normal", "normal", "columns" if i % 4 else "none") for i in range(steps)
    ]
    plan = tuple(StepSpec(kind, lr=0.03 if i % 7 == 4 else None) for i, kind in enumerate(kinds))
    return Run(specs, ({}, {"weight_decay": 0.1, "topk_ratio": 0.5}), settings, plan, seed=11)


def started(run, steps):
    parameters = run.new_parameters()
    optimizer = run.new_optimizer(ZenFlowOptimizer, parameters)
    for i in range(steps):
        run.play(i, parameters, optimizer)
    return parameters, optimizer


def weights_of(parameters):
    return [p.detach().clone() for p in parameters]


def assert_goes_on_alike(run, steps, pair, other):
    """Both continue from step `steps` to the end of the run, with the same bits throughout."""
    (ours, optimizer), (theirs, undisturbed) = pair, other
    assert_all_same(ours, theirs, "at the start")
    for i in range(steps, len(run.steps)):
        run.play(i, ours, optimizer)
        run.play(i, theirs, undisturbed)
        assert_all_same(ours, theirs, f"after step {i + 1}")
    assert_same_saved(optimizer, undisturbed, "at the end")
    optimizer.flush()
    undisturbed.flush()
    assert_all_same(ours, theirs, "after flush()")


def through_a_file(value):
    """As torch.save and torch.load(weights_only=True) leave it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(run, weights, state, **changed):
    parameters = run.new_parameters()
    for p, w in zip(parameters, weights, strict=True):
        p.data.copy_(w)
    optimizer = run.new_optimizer(ZenFlowOptimizer, parameters, **changed)
    optimizer.load_state_dict(state)
    return parameters, optimizer


@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
@pytest.mark.parametrize("steps", range(10))
def test_resuming_at_any_step_gives_the_bits_of_never_having_stopped(steps, rule, buffer):
    for delay in (1, 3):
        run = run_of(rule, delay, buffer)
        parameters, optimizer = started(run, steps)
        saved = through_a_file({"weights": weights_of(parameters), "state": optimizer.state_dict()})
        assert_goes_on_alike(run, steps, resumed(run, saved["weights"], saved["state"]), started(run, steps))


@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_a_checkpoint_of_one_host_buffer_resumes_with_the_other(rule):
    for buffer, other in (("ring", "stream"), ("stream", "ring")):
        run = run_of(rule, 3, buffer)
        parameters, optimizer = started(run, 8)
        saved = through_a_file({"weights": weights_of(parameters), "state": optimizer.state_dict()})
        pair = resumed(run, saved["weights"], saved["state"], host_buffer=other)
        assert_goes_on_alike(run, 8, pair, started(run, 8))


RESUME = """
import sys, torch
from test_semantics import resumed, run_of, weights_of
saved = torch.load(sys.argv[1], weights_only=True)
run = run_of("mean")
parameters, optimizer = resumed(run, saved["weights"], saved["state"])
for i in range(8, len(run.steps)):
    run.play(i, parameters, optimizer)
torch.save(weights_of(parameters), sys.argv[2])
"""


def test_resuming_in_a_new_process_gives_the_bits_of_never_having_stopped(tmp_path):
    run = run_of("mean")
    parameters, optimizer = started(run, 8)
    saved, result = tmp_path / "saved.pt", tmp_path / "result.pt"
    torch.save({"weights": weights_of(parameters), "state": optimizer.state_dict()}, saved)
    command = [sys.executable, "-c", RESUME, str(saved), str(result)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_all_same(torch.load(result, weights_only=True), started(run, len(run.steps))[0], "weights")


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_a_parameter_without_gradients_since_warm_up_resumes_in_mid_flight(ratio):
    settings = {"topk_ratio": ratio, "update_interval": 3, "update_delay": 3, "full_warm_up_rounds": 1}

    def play(pair, optimizer, steps):
        for step in steps:
            for p in pair:
                p.grad = random_gradient(p, step)
            if 1 <= step < 5:
                pair[0].grad = None
            optimizer.step()

    pair = [random_parameter(4, 6), random_parameter(5, 8, seed=1)]
    optimizer = zenflow_of(*pair, **settings)
    play(pair, optimizer, range(5))
    resumed_pair, resumed_optimizer = copy.deepcopy((pair, optimizer))
    for step in range(5, 12):
        play(pair, optimizer, [step])
        play(resumed_pair, resumed_optimizer, [step])
        assert_all_same(resumed_pair, pair, f"step {step + 1}")


@pytest.mark.parametrize("ratios", [(0.0, 0.5), (0.5, 0.0), (1.0, 0.2), (0.2, 1.0)])
def test_a_ratio_that_was_changed_in_place_waits_for_a_selection_in_a_copy_too(ratios):
    p = random_parameter(4, 6)
    optimizer = zenflow_of(p, topk_ratio=ratios[0], update_interval=3, update_delay=3, select_interval=6)
    train(optimizer, 4)
    optimizer.param_groups[0]["topk_ratio"] = ratios[1]
    q, copied = copy.deepcopy((p, optimizer))
    for step in range(4, 16):
        train(optimizer, 1, step)
        train(copied, 1, step)
        assert_same(q, p, f"step {step + 1}")


def test_a_group_that_is_no_longer_split_loses_no_gradient_in_a_copy():
    p = random_parameter(4, 6)
    optimizer = zenflow_of(p, topk_ratio=0.3, update_interval=3, update_delay=3)
    train(optimizer, 5)
    optimizer.param_groups[0]["split"] = False
    q, copied = copy.deepcopy((p, optimizer))
    optimizer.flush()
    copied.synchronize()
    assert_same(q, p, "after the window has closed")
    assert copied.stats().split_parameters == 0


def test_loading_does_not_tie_two_optimizers_together():
    run = run_of()
    pair = started(run, 8)
    state = pair[1].state_dict()
    first, second = (resumed(run, weights_of(pair[0]), state) for _ in range(2))
    for i in range(8, 14):
        run.play(i, *first)
    assert_goes_on_alike(run, 8, second, started(run, 8))


def layout_of(state):
    """Keys, shapes and dtypes of a parameter's saved state."""
    kinds = {}
    for key, value in state.items():
        kinds[key] = (tuple(value.shape), value.dtype) if torch.is_tensor(value) else type(value)
    return kinds


@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_the_state_dict_has_the_same_keys_and_shapes_at_every_step_for_every_buffer(rule):
    layouts = {}
    for buffer in ("ring", "stream"):
        run = run_of(rule, 3, buffer)
        parameters, optimizer = started(run, 0)
        for i in range(len(run.steps)):
            run.play(i, parameters, optimizer)
            if i == 17:
                optimizer.flush()
            for index, state in saved_state(optimizer).items():
                assert layouts.setdefault(index, layout_of(state)) == layout_of(state), f"step {i + 1}, {buffer}"
    for index, p in enumerate(parameters):
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert layouts[index][key] == (tuple(p.shape), FP32)
        assert layouts[index]["last_written"] == (tuple(p.shape), p.dtype)
        assert layouts[index]["step"] == ((), FP32)


@pytest.mark.parametrize("steps", [0, 2, 3, 5, 8])
def test_a_deep_copy_goes_on_alike_and_apart(steps):
    run = run_of()
    pair = started(run, steps)
    copied = copy.deepcopy(pair)
    assert copied[1].param_groups[0]["params"][0] is copied[0][0]
    assert_goes_on_alike(run, steps, copied, pair)
    assert_goes_on_alike(run, steps, started(run, steps), started(run, steps))


@pytest.mark.parametrize("steps", [0, 2, 3, 5, 8])
def test_a_pickled_optimizer_goes_on_alike(steps):
    run = run_of()
    pair = started(run, steps)
    assert_goes_on_alike(run, steps, pickle.loads(pickle.dumps(pair)), pair)
