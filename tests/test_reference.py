# SPDX-License-Identifier: Apache-2.0
"""The reference itself: fma against fractions, AdamW against torch's, the schedule against sums by hand."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adamw
from compare import assert_all_same, assert_same, copies
from reference import ReferenceZenFlow, column_norms, fma, largest, matrix_shape
from strategies import runs

# Fma


def exact_fma(a, b, c):
    """a * b + c of three Python floats that hold fp32 values, rounded to fp32 by integer arithmetic alone."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of a zero: fp64 has it right
    # the spacing of fp32 at |exact|, not below that of denormals
    exponent = math.floor(math.log2(abs(exact.numerator)) - math.log2(exact.denominator))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (abs(exact) < Fraction(2) ** exponent)
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / quantum) * quantum  # round() of a Fraction: half to even
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, rounded)
    return float(rounded) if rounded else math.copysign(0.0, exact)


def assert_fma_exact(a, b, c):
    found = fma(a, b, c)
    expected = [exact_fma(*triple) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert_same(found, torch.tensor(expected, dtype=torch.float64).float(), "fma")


SCALES = [
    (0, 0, 0),
    (0, 0, 24),
    (0, 0, -24),
    (-70, -70, -140),
    (-60, -66, -126),
    (60, 64, 124),
    (-100, 50, -50),
]


@pytest.mark.parametrize("scales", SCALES)
def test_fma_rounds_once(scales):
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(2000, generator=generator) * 2.0**scale for scale in scales)
    assert_fma_exact(a, b, c)
    # few significant bits: ties, and products that cancel
    short_a, short_b = (t.view(torch.int32).bitwise_and(~0xFFF).view(torch.float32) for t in (a, b))
    assert_fma_exact(short_a, short_b, c.view(torch.int32).bitwise_and(~0x3F).view(torch.float32))
    assert_fma_exact(a, b, -(a * b))


@given(st.lists(st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3), min_size=1))
def test_fma_of_any_finite_values_is_exact(triples):
    assert_fma_exact(*torch.tensor(triples, dtype=torch.float64).float().T)


def test_fma_breaks_a_tie_that_double_rounding_would_miss():
    # 1 + 2^-24 + 2^-80: fp64 drops the last term, and the tie would then go to even, down to 1
    a, b, c = torch.tensor([2.0**-40]), torch.tensor([2.0**-40]), torch.tensor([1.0])
    assert fma(a, b, c).item() == 1.0
    a, b, c = torch.tensor([1 + 2.0**-12]), torch.tensor([1 + 2.0**-12]), torch.tensor([2.0**-60])
    assert fma(a, b, c).item() == 1 + 2.0**-11 + 2.0**-23  # exact: ... + 2^-24 + 2^-60, above the tie


def test_fma_passes_on_infinities_and_nan():
    inf, nan = math.inf, math.nan
    a = torch.tensor([inf, inf, 0.0, nan, 1.0])
    b = torch.tensor([1.0, 0.0, inf, 1.0, -inf])
    c = torch.tensor([-1.0, 1.0, 1.0, 1.0, inf])
    assert_same(fma(a, b, c), torch.tensor([inf, nan, nan, nan, nan]), "fma")


# Pieces


def test_matrix_views():
    shapes = [(), (7,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)]
    assert [matrix_shape(s) for s in shapes] == [(1, 1), (1, 7), (2, 3), (6, 4), (2, 60), (2, 360)]


def test_selection_order():
    nan, inf = math.nan, math.inf
    assert largest(torch.tensor([nan, 1.0, 2.0, inf, 2.0]), 0.4).nonzero().flatten().tolist() == [2, 4]
    assert largest(torch.tensor([nan, 1.0, 2.0, inf, 2.0]), 0.8).nonzero().flatten().tolist() == [0, 1, 2, 4]
    ratios = (0, 0.01, 0.149, 0.15, 0.25, 1)
    assert [int(largest(torch.ones(10), ratio).sum()) for ratio in ratios] == [0, 1, 1, 2, 3, 10]


def test_column_norms_close_to_exact_ones():
    g = torch.randn(300, 7, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(column_norms(g).double(), g.double().square().sum(0), rtol=1e-5, atol=0)


# AdamW


def reference_moments(optimizer):
    return list(optimizer.moments().values())


SYNCHRONOUS = [
    {"update_interval": 1, "update_delay": 0, "topk_ratio": 0.3, "select_interval": 2},
    {"update_interval": 1, "update_delay": 0, "topk_ratio": 0.0},
    {"update_interval": 4, "update_delay": 3, "topk_ratio": 1.0},
]


@pytest.mark.parametrize("settings", SYNCHRONOUS)
def test_each_synchronous_step_is_adamws(settings):
    adamw.assert_each_step_is_adamws(ReferenceZenFlow, reference_moments, **settings)


@pytest.mark.parametrize("settings", SYNCHRONOUS[:1])
def test_200_synchronous_steps_stay_adamws(settings):
    adamw.assert_200_steps_stay_adamws(ReferenceZenFlow, **settings)


# Schedule

# each update moves by lr * sign(g)
EXACT = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "min_offload_numel": 0}


def test_a_window_moves_once_by_the_sum_of_its_learning_rates_and_shows_late():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    reference = ReferenceZenFlow([p], lr=1.0, topk_ratio=0.0, update_interval=2, lookahead=0, **EXACT)
    seen = []
    for lr in (1.0, 2.0, 4.0, 8.0, 16.0):
        reference.param_groups[0]["lr"] = lr
        p.grad = torch.ones(2, 3)
        reference.step()
        seen.append(p[0, 0].item())
    assert seen == [0, 0, -3, -3, -15]
    reference.flush()
    assert p[0, 0].item() == -31


def test_look_ahead_is_shown_and_withdrawn():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    reference = ReferenceZenFlow([p], lr=1.0, topk_ratio=0.0, update_interval=2, update_delay=2, **EXACT)
    for _ in range(4):
        p.grad = torch.ones(2, 3)
        reference.step()
    assert p[0, 0].item() == -2 - 2 * 1  # first window's move, and two steps ahead
    with reference.settled():
        assert p[0, 0].item() == -4  # second window's move as well
    assert p[0, 0].item() == -4
    reference.synchronize()
    assert p[0, 0].item() == -4
    assert next(iter(reference.masters().values()))[0, 0].item() == -4


def test_the_mean_rule_moves_once_by_the_mean():
    p = torch.nn.Parameter(torch.zeros(1, 2))
    settings = {
        **EXACT,
        "betas": (0.5, 0.0),
        "update_interval": 2,
        "update_delay": 0,
        "deferred_rule": "mean",
    }
    reference = ReferenceZenFlow([p], lr=1.0, topk_ratio=0.0, **settings)
    for g in (1.0, 3.0, 3.0, 5.0):
        p.grad = torch.full((1, 2), g)
        reference.step()
    # means 2 and 4: m = 1, then 2.5; corrected by 1 - 0.5^1 and 1 - 0.5^2: moves 2/2 and (10/3)/4
    torch.testing.assert_close(p.detach(), torch.full((1, 2), -1 - 10 / 12))


def test_selected_columns_move_at_each_step():
    p = torch.nn.Parameter(torch.zeros(1, 4))
    settings = {**EXACT, "update_interval": 2, "select_interval": 2, "lookahead": 0}
    reference = ReferenceZenFlow([p], lr=1.0, topk_ratio=0.25, **settings)
    p.grad = torch.tensor([[1.0, 1.0, 2.0, 1.0]])
    reference.step()
    assert p.tolist() == [[0, 0, -1, 0]] and reference.selection(p) == [2]
    reference.step()
    assert p.tolist() == [[0, 0, -2, 0]]
    p.grad = torch.tensor([[3.0, 1.0, 2.0, 1.0]])
    reference.step()  # selects anew: the update in flight appears first, then column 0 moves at once
    assert p.tolist() == [[-3, -2, -2, -2]] and reference.selection(p) == [0]


def test_edits_win():
    p = torch.nn.Parameter(torch.zeros(1, 4, dtype=torch.bfloat16))
    reference = ReferenceZenFlow([p], lr=2.0**-10, topk_ratio=0.0, update_interval=2, lookahead=0, **EXACT)
    p.grad = torch.ones(1, 4, dtype=torch.bfloat16)
    reference.step()
    reference.step()
    p.data[0, 0] = 1.0  # with the update in flight
    reference.step()
    assert p.tolist() == [[1.0, -(2.0**-9), -(2.0**-9), -(2.0**-9)]]
    reference.flush()
    assert next(iter(reference.masters().values()))[0, :2].tolist() == [1 - 2.0**-10, -3 * 2.0**-10]


@given(runs(max_steps=8))
def test_looking_changes_nothing_and_runs_repeat(run):
    """A run gives the same bits again, looked at after each step or not."""
    weights = []
    for look in (False, True):
        parameters = run.new_parameters()
        reference = run.new_optimizer(ReferenceZenFlow, parameters)
        for i in range(len(run.steps)):
            run.play(i, parameters, reference)
            if look:
                reference.moments()
                with reference.settled():
                    pass
            run.act(i, parameters, reference)
        reference.flush()
        weights.append(copies(parameters))
    assert_all_same(*weights, "weights")
