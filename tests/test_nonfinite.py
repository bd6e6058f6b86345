# SPDX-License-Identifier: Apache-2.0
"""One Inf or NaN in a gradient damages the element that it belongs to, as with AdamW, and nothing else.

Each run has a twin whose gradient is zero there. The rest of the bad column is zero in both, so that both rank it last
where a selection falls on that step; and that step's gradients are small, so that clipping leaves the twin's alone, as
a norm that is not finite does.
"""

import math

import pytest
import torch

from backward import backward_of
from compare import assert_all_same, assert_same, assert_same_saved, parameters_of
from small_parameters import random_gradient, random_parameter, train, zenflow_of

ROWS, COLUMNS, SMALL = 6, 10, 7
BAD_ROW = 2
SETTINGS = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 6, "lr": 1e-2}
VALUES = [math.inf, -math.inf, math.nan]
# steps 1 and 7 select, 3 and 6 end a window, 5 is in the middle of one
BAD_STEPS = {"first step": 1, "in a window": 5, "end of a window": 6, "selection": 7}


def gradients(step, bad_step, value, place):
    """Of a matrix and a small parameter."""
    matrix, small = random_gradient(torch.empty(ROWS, COLUMNS), step), random_gradient(torch.empty(SMALL), step + 50)
    if step != bad_step:
        return matrix, small
    matrix, small = matrix / 100, small / 100
    if place == "small parameter":
        small[3] = value
    else:
        matrix[:, place] = 0.0
        matrix[BAD_ROW, place] = value
    return matrix, small


def run(bad_step, value, place, hooks=False, **settings):
    parameters = [random_parameter(ROWS, COLUMNS), random_parameter(SMALL, seed=1)]
    optimizer = zenflow_of(*parameters, **SETTINGS, offload_gradients=hooks, **settings)
    shown = []
    for step in range(1, 15):
        given = gradients(step, bad_step, value, place)
        if hooks:
            backward_of(zip(parameters, given, strict=True))
        else:
            for p, gradient in zip(parameters, given, strict=True):
                p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        shown.append([p.detach().clone() for p in parameters])
    optimizer.flush()
    shown.append([p.detach().clone() for p in parameters])
    return optimizer, shown


def states_of(optimizer):
    return list(optimizer.state_dict()["state"].values())


def column_on(side, bad_step):
    """One that is selected, or deferred, when the bad step comes; at the first step none is yet."""
    optimizer = zenflow_of(random_parameter(ROWS, COLUMNS), **SETTINGS)
    for step in range(1, max(bad_step, 2)):
        parameters_of(optimizer)[0].grad = gradients(step, 0, 0.0, 0)[0]
        optimizer.step()
    selected = optimizer.state_dict()["state"][0]["selected"]
    assert selected.sum() == 3
    return (selected if side == "selected" else ~selected).nonzero().flatten()[1].item()


@pytest.mark.parametrize("hooks", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("max_grad_norm", [None, 3.0])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
@pytest.mark.parametrize("at", BAD_STEPS)
@pytest.mark.parametrize("side", ["selected", "deferred", "small parameter"])
def test_one_bad_element_damages_itself_alone(side, at, rule, max_grad_norm, hooks):
    bad_step = BAD_STEPS[at]
    place = side if side == "small parameter" else column_on(side, bad_step)
    which, element = (1, (3,)) if side == "small parameter" else (0, (BAD_ROW, place))
    settings = {"deferred_rule": rule, "max_grad_norm": max_grad_norm, "hooks": hooks}
    twin, clean = run(bad_step, 0.0, place, **settings)
    if max_grad_norm:
        assert twin.stats().total.nonfinite_norms == 0
    for value in VALUES:
        optimizer, shown = run(bad_step, value, place, **settings)
        for step, (actual, expected) in enumerate(zip(shown, clean, strict=True), 1):
            damaged = ~torch.isfinite(actual[which])
            actual[which][element] = expected[which][element]
            assert_all_same(actual, expected, f"{value}, step {step}, all other elements")
            damaged[element] = False
            assert not damaged.any()
        assert not torch.isfinite(parameters_of(optimizer)[which][element]), "as with AdamW"
        if max_grad_norm:
            assert optimizer.stats().total.nonfinite_norms == 1
        for state, expected in zip(states_of(optimizer), states_of(twin), strict=True):
            assert torch.equal(state["selected"], expected["selected"])
            for key in ("exp_avg", "exp_avg_sq", "master", "last_written"):
                if state["exp_avg"].dim() == len(element):
                    state[key][element] = expected[key][element]
                assert_same(state[key], expected[key], key)


@pytest.mark.parametrize("at", BAD_STEPS)
@pytest.mark.parametrize("place", [4, "small parameter"])
def test_adamw_is_damaged_no_less(place, at):
    """What the tests above grant: the same elements are lost by torch's."""
    parameters = [random_parameter(ROWS, COLUMNS), random_parameter(SMALL, seed=1)]
    adamw = torch.optim.AdamW(parameters)
    for step in range(1, 15):
        for p, gradient in zip(parameters, gradients(step, BAD_STEPS[at], math.inf, place), strict=True):
            p.grad = gradient
        adamw.step()
    optimizer, _ = run(BAD_STEPS[at], math.inf, place)
    for p, q in zip(parameters_of(optimizer), parameters, strict=True):
        assert (torch.isfinite(p) == torch.isfinite(q)).all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("at", BAD_STEPS)
@pytest.mark.parametrize("place", [4, "small parameter"])
def test_skip_nonfinite_leaves_the_whole_step_out_wherever_the_bad_element_is(place, at, value):
    """The run is that without the step: its clock, its selection and its moments."""
    optimizer, twin = (
        zenflow_of(random_parameter(ROWS, COLUMNS), random_parameter(SMALL, seed=1), **SETTINGS, skip_nonfinite=skips)
        for skips in (True, False)
    )
    for step in range(1, 12):
        if step == BAD_STEPS[at]:
            for p, gradient in zip(parameters_of(optimizer), gradients(step, step, value, place), strict=True):
                p.grad = gradient
            optimizer.step()
            continue
        train(optimizer, 1, step)
        train(twin, 1, step)
        assert_all_same(parameters_of(optimizer), parameters_of(twin), f"step {step}")
    assert_same_saved(optimizer, twin, "state")
    assert (optimizer.stats().skipped_steps, optimizer.stats().total.steps) == (1, 10)


def test_skip_nonfinite_takes_finite_gradients_whose_squares_overflow():
    optimizer = zenflow_of(random_parameter(ROWS, COLUMNS), **SETTINGS, skip_nonfinite=True, max_grad_norm=1.0)
    p = parameters_of(optimizer)[0]
    before = p.detach().clone()
    p.grad = torch.full_like(p, 1e30)
    optimizer.step()
    assert optimizer.stats().skipped_steps == 0
    assert (p != before).any()
    assert torch.isfinite(p).all()
