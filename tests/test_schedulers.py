# SPDX-License-Identifier: Apache-2.0
"""Learning rates: every scheduler of torch drives selected and deferred columns, whatever kind of number it writes.

Beside the reference, which gets the same numbers at each step, bit for bit.
"""

import copy
import io
import warnings

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from compare import assert_all_same, assert_same, assert_same_state, parameters_of
from small_parameters import Beside, random_parameter, train, zenflow_of

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: step / 5]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.1, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=14, cycle_momentum=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=3), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=8)], [4]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=5),
}
KINDS = {
    "float": lambda lr: lr,
    "0-d tensor": lambda lr: torch.tensor(lr),
    "1-element tensor": lambda lr: torch.tensor([lr]),
    "float64 tensor": lambda lr: torch.tensor(lr, dtype=torch.float64),
}
SHAPES = [(6, 10), (5, 8)]
SETTINGS = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 6}


def test_no_scheduler_of_torch_is_left_out():
    names = {name for name in lr_scheduler.__all__ if not name.startswith("_")} - {"LRScheduler"}
    assert names <= SCHEDULERS.keys()


def groups(kind):
    """Two with learning rates of their own, which are no power of two."""
    return [{"params": SHAPES[:1], "lr": KINDS[kind](0.05)}, {"params": SHAPES[1:], "lr": KINDS[kind](0.013)}]


def follow(reference, optimizer):
    """Gives the reference what the scheduler wrote, by value."""
    for group, scheduled in zip(reference.param_groups, optimizer.param_groups, strict=True):
        group["lr"], group["betas"] = float(scheduled["lr"]), tuple(scheduled["betas"])


def written(optimizer):
    return [(float(group["lr"]), *group["betas"]) for group in optimizer.param_groups]


def advance(scheduler, step):
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(1.0 + step) if plateau else scheduler.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_drives_both_halves_as_it_drives_adamw(name, kind):
    beside = Beside(*groups(kind), **SETTINGS)
    ours, reference = beside.optimizers
    adamw = torch.optim.AdamW(copy.deepcopy(ours.param_groups), foreach=False)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, adamw)]
    seen = set()
    for step in range(14):
        assert written(ours) == written(adamw)
        seen.add(tuple(written(ours)))
        follow(reference, ours)
        beside.train(1)
        adamw.step()
        if step < 13:  # OneCycleLR counts
            for scheduler in schedulers:
                advance(scheduler, step)
    assert len(seen) > 1
    beside.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_learning_rate_may_be_changed_in_place_or_replaced_by_another_kind(kind, steps):
    """At every offset of a window; what a window holds counts at the value that it came with."""
    beside = Beside(SHAPES, **SETTINGS, lr=KINDS[kind](0.05))
    beside.each(lambda o: o.param_groups[0].update(lr=copy.deepcopy(o.param_groups[0]["lr"])))
    for lr in (0.01, torch.tensor(0.1), 0.02, torch.tensor([0.3]), torch.tensor(0.07, dtype=torch.bfloat16)):
        beside.train(steps)
        beside.each(lambda o, lr=lr: o.param_groups[0].update(lr=copy.deepcopy(lr)))
        if isinstance(lr, torch.Tensor):
            beside.train(steps)
            beside.each(lambda o: o.param_groups[0]["lr"].mul_(0.5))
    beside.train(steps)
    beside.finish()


def test_one_learning_rate_tensor_may_serve_several_groups():
    lr = torch.tensor(0.05)
    beside = Beside(*[{"params": [shape], "lr": lr} for shape in SHAPES], **SETTINGS)
    beside.train(4)
    lr.fill_(0.001)
    beside.train(8)
    beside.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_a_warm_up_from_zero_keeps_every_bit_while_moments_advance(kind, delay, rule):
    beside = Beside(SHAPES, **SETTINGS, lr=KINDS[kind](0.05), update_delay=delay, deferred_rule=rule)
    ours, reference = beside.optimizers
    before = copy.deepcopy(parameters_of(ours))
    scheduler = lr_scheduler.LambdaLR(ours, lambda step: max(0, step - 6))
    for step in range(12):
        follow(reference, ours)
        beside.train(1)
        scheduler.step()
        if step < 6:
            assert_all_same(parameters_of(ours), before, f"at learning rate 0, step {step + 1}")
            assert_same_state(ours, reference, f"step {step + 1}")
            assert all(state["exp_avg"].any(0).any() for state in ours.state_dict()["state"].values())
    assert any((p != q).any() for p, q in zip(parameters_of(ours), before, strict=True))
    beside.finish()


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("kind", ["float", "0-d tensor"])
def test_a_scheduler_resumes_with_the_optimizer(name, kind):
    made = Beside(*groups(kind), **SETTINGS).optimizers[0]
    scheduler = SCHEDULERS[name](made)
    for step in range(5):
        train(made, 1, step)
        advance(scheduler, step)
    file = io.BytesIO()
    torch.save([made.state_dict(), scheduler.state_dict(), [p.detach() for p in parameters_of(made)]], file)
    file.seek(0)
    saved, scheduled, weights = torch.load(file, weights_only=False)

    other = Beside(*groups(kind), **SETTINGS).optimizers[0]
    resumed = SCHEDULERS[name](other)
    with torch.no_grad():
        for p, weight in zip(parameters_of(other), weights, strict=True):
            p.copy_(weight)
    resumed.load_state_dict(scheduled)
    other.load_state_dict(saved)
    for step in range(5, 12):
        assert written(other) == written(made)
        for optimizer, its in ((made, scheduler), (other, resumed)):
            train(optimizer, 1, step)
            advance(its, step)
        assert_all_same(parameters_of(other), parameters_of(made), f"step {step + 1}")


def test_torch_sees_that_the_optimizer_stepped_before_the_scheduler():
    p = random_parameter(*SHAPES[0])
    optimizer = zenflow_of(p, **SETTINGS)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, 1)
    before = p.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert_same(p, before, "a scheduler writes no weight")
    with pytest.warns(UserWarning, match=r"before `optimizer.step"):
        lr_scheduler.StepLR(zenflow_of(p, **SETTINGS), 1).step()
