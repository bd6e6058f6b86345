# SPDX-License-Identifier: Apache-2.0
"""torch.optim.swa_utils.AveragedModel beside the optimizer: it averages what it sees, and disturbs nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from compare import assert_all_same, assert_same_training
from zenflow import ZenFlowOptimizer

SETTINGS = {"lr": 0.01, "topk_ratio": 0.2, "update_interval": 4, "select_interval": 8, "min_offload_numel": 0}
STEPS, DECAY = 14, 0.9
MODES = pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])


def new_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 6))


def inputs(step):
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(step))


def new_training(**settings):
    model = new_model()
    return model, ZenFlowOptimizer(model.parameters(), **{**SETTINGS, **settings})


def step(model, optimizer, index):
    model(inputs(index)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_straight(**settings):
    model, optimizer = new_training(**settings)
    for index in range(STEPS):
        step(model, optimizer, index)
    return model, optimizer


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


@MODES
@pytest.mark.parametrize("settled", [False, True])
def test_an_average_is_that_of_the_weights_shown_and_training_goes_on_as_without(settled, hooks):
    model, optimizer = new_training(offload_gradients=hooks)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected = None
    for index in range(STEPS):
        step(model, optimizer, index)
        if settled:
            with optimizer.settled():
                averaged.update_parameters(model)
                shown = weights_of(model)
        else:
            averaged.update_parameters(model)
            shown = weights_of(model)
        if expected is None:
            expected = shown
        else:
            expected = [DECAY * a + (1 - DECAY) * b for a, b in zip(expected, shown, strict=True)]
    torch.testing.assert_close(weights_of(averaged.module), expected)
    assert_same_training(model, optimizer, *train_straight(offload_gradients=hooks))


@MODES
def test_weights_that_are_swapped_for_their_average_and_back_are_no_edit(hooks):
    """Evaluation as many trainers do it, at every offset of a window."""
    model, optimizer = new_training(offload_gradients=hooks)
    averaged = AveragedModel(model)
    for index in range(STEPS):
        step(model, optimizer, index)
        averaged.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(averaged.module.state_dict())
        with torch.no_grad():
            model.eval()(inputs(999))
        model.train().load_state_dict(kept)
    assert_same_training(model, optimizer, *train_straight(offload_gradients=hooks))


def test_training_goes_on_from_an_average_that_is_kept():
    model, optimizer = new_training()
    averaged = AveragedModel(model)
    for index in range(6):
        step(model, optimizer, index)
        averaged.update_parameters(model)
    update_bn([inputs(index) for index in range(3)], averaged)
    model.load_state_dict(averaged.module.state_dict())
    with optimizer.settled():
        assert_all_same(weights_of(model), weights_of(averaged.module), "masters")
