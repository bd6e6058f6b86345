# SPDX-License-Identifier: Apache-2.0
"""How tests compare: bit for bit, any NaN equal to any NaN, with the first difference in the message."""

import torch

from reference import same_bits


def assert_same(actual, expected, what):
    """Same shape, dtype and bits."""
    actual, expected = actual.detach(), expected.detach()
    found, wanted = (actual.shape, actual.dtype), (expected.shape, expected.dtype)
    assert found == wanted, f"{what}: {found}, expected {wanted}"
    wrong = (~same_bits(actual, expected)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        found, wanted = actual[at].item(), expected[at].item()
        count = f"{len(wrong)} of {actual.numel()} differ"
        raise AssertionError(f"{what}: {count}, first at {at}: {found!r}, expected {wanted!r}")


def assert_all_same(actual, expected, what):
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same(a, b, f"{what}, parameter {i}")


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def saved_state(optimizer):
    """{index: state} as state_dict() has it, empty tensors and empty states left out."""
    state = optimizer.state_dict()["state"]
    return {i: state[i] for i, p in enumerate(parameters_of(optimizer)) if p.numel() and state.get(i)}


def assert_same_state(optimizer, reference, what):
    """Masters, moments and step counts of a ZenFlowOptimizer against those of a ReferenceZenFlow."""
    saved, masters, moments = saved_state(optimizer), reference.masters(), reference.moments()
    for i, p in enumerate(parameters_of(reference)):
        if p not in masters:
            # without a gradient so far: no state, or a state that has seen no step
            assert i not in saved or saved[i]["step"] == 0, f"{what}: parameter {i} had no gradient, but steps"
            continue
        assert float(saved[i]["step"]) == reference.state[p].step, f"{what}: step of parameter {i}"
        for key, value in zip(("exp_avg", "exp_avg_sq", "master"), (*moments[p], masters[p]), strict=True):
            assert_same(saved[i][key], value, f"{what}: {key} of parameter {i}")


def assert_same_saved(actual, expected, what):
    """The state of two ZenFlowOptimizers, every tensor of it that both must share."""
    actual, expected = saved_state(actual), saved_state(expected)
    assert actual.keys() == expected.keys(), what
    for i in actual:
        for key in ("step", "exp_avg", "exp_avg_sq", "master", "last_written"):
            assert_same(actual[i][key], expected[i][key], f"{what}: {key} of parameter {i}")


def assert_same_training(model, optimizer, expected, expected_optimizer):
    """Weights and state of two trainings with a ZenFlowOptimizer."""
    assert_all_same(list(model.parameters()), list(expected.parameters()), "weights")
    assert_same_saved(optimizer, expected_optimizer, "state")


def copies(parameters, dtype=None):
    """Fresh parameters with the same values, contiguous."""
    kept = [p.detach().clone() if dtype is None else p.detach().to(dtype, copy=True) for p in parameters]
    return [torch.nn.Parameter(p) for p in kept]
