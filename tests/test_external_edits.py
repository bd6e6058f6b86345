# SPDX-License-Identifier: Apache-2.0
"""Weights that users change, and when we do: orders of loading, surgery, and the version counter.

(That training goes on from an edit of any kind at any offset of a window: test_semantics.py; averages:
test_averaged_model.py; moves to a device: gpu/test_moves.py.)
"""

import copy

import pytest
import torch
from torch import nn

from backward import backward_of
from compare import assert_all_same, assert_same, assert_same_saved, assert_same_state, copies, saved_state
from reference import ReferenceZenFlow
from small_parameters import random_gradient, random_parameter, train, zenflow_of
from zenflow import ZenFlowOptimizer

FP32, BF16 = torch.float32, torch.bfloat16
# after 3 steps a window is open, after 4 and 5 its update is in flight, after 5 a new one is open too, 6 publishes
SCHEDULE = {"update_interval": 4, "update_delay": 2, "select_interval": 8, "topk_ratio": 0.3, "lr": 0.01}
MODES = pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
OPTIMIZERS = (ZenFlowOptimizer, ReferenceZenFlow)


class Net(nn.Module):
    """Two matrices and a vector."""

    def __init__(self, dtype=BF16, seed=0):
        super().__init__()
        self.embedding = random_parameter(9, 14, dtype=dtype, seed=seed)
        self.head = random_parameter(9, 14, dtype=dtype, seed=seed + 1)
        self.bias = random_parameter(9, dtype=dtype, seed=seed + 2)


def all_of(net, optimizer_class=ZenFlowOptimizer, **changed):
    return zenflow_of(*net.parameters(), optimizer_class=optimizer_class, **{**SCHEDULE, **changed})


def weights_of(net):
    return [p.detach() for p in net.parameters()]


# Orders of loading


def test_constructing_before_and_after_the_models_load_gives_the_same_training():
    pretrained = Net(seed=7).state_dict()
    before, after = Net(), Net()
    optimizers = [all_of(before)]
    for net in (before, after):
        net.load_state_dict(pretrained)
    optimizers.append(all_of(after))
    for step in range(12):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        assert_all_same(weights_of(before), weights_of(after), f"step {step + 1}")
    assert_same_saved(*optimizers, "state")


@pytest.mark.parametrize("steps", [0, 3, 5, 8])
def test_model_optimizer_and_its_state_may_be_loaded_and_made_in_any_order(steps):
    net = Net()
    optimizer = all_of(net)
    train(optimizer, steps)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))

    def load_then_construct(net):
        net.load_state_dict(saved[0])
        optimizer = all_of(net)
        optimizer.load_state_dict(saved[1])
        return optimizer

    def construct_then_load(net):
        optimizer = all_of(net)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return optimizer

    def load_the_model_last(net):
        optimizer = all_of(net)
        optimizer.load_state_dict(saved[1])
        net.load_state_dict(saved[0])
        return optimizer

    def load_in_mid_training(net):
        optimizer = all_of(net)
        train(optimizer, 6, start=90)
        optimizer.load_state_dict(saved[1])
        net.load_state_dict(saved[0])
        return optimizer

    train(optimizer, 9, start=steps)
    for order in (load_then_construct, construct_then_load, load_the_model_last, load_in_mid_training):
        other = Net(seed=3)
        again = order(other)
        train(again, 9, start=steps)
        assert_all_same(weights_of(other), weights_of(net), order.__name__)
        assert_same_saved(again, optimizer, order.__name__)


# Edits


def beside_the_reference(steps, edit, after=10, **changed):
    """Steps, an edit, more steps; on both sides, compared after each. `edit(net, optimizer)`."""
    nets = Net(), Net()
    players = [all_of(net, player, **changed) for net, player in zip(nets, OPTIMIZERS, strict=True)]
    for step in range(steps + after):
        if step == steps:
            for net, player in zip(nets, players, strict=True):
                edit(net, player)
        for player in players:
            train(player, 1, step)
        assert_all_same(weights_of(nets[0]), weights_of(nets[1]), f"step {step + 1}")
    assert_same_state(*players, "state")


INITIALISERS = [nn.init.zeros_, nn.init.normal_, nn.init.xavier_uniform_, nn.init.trunc_normal_, nn.init.eye_]


@pytest.mark.parametrize("initialise", INITIALISERS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("steps", [3, 5])
def test_training_goes_on_from_a_new_initialisation(steps, initialise):
    def edit(net, _):
        torch.manual_seed(1)
        initialise(net.head)

    beside_the_reference(steps, edit)


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_an_edit_of_one_parameter_leaves_the_others_as_they_were(steps):
    net, undisturbed = Net(), Net()
    optimizers = all_of(net), all_of(undisturbed)
    for optimizer in optimizers:
        train(optimizer, steps)
    net.head.data.mul_(-2)
    for step in range(steps, steps + 9):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        for name in ("embedding", "bias"):
            assert_same(getattr(net, name), getattr(undisturbed, name), f"{name} after step {step + 1}")
    states = [saved_state(optimizer) for optimizer in optimizers]
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same(states[0][1][key], states[1][1][key], f"{key} of the edited one")


def step_with_loss(net, optimizer, step):
    """Gradients come from uses in the model: a weight that is used twice gets both."""
    pairs = []
    for i, p in enumerate((net.embedding, net.head, net.bias)):
        pairs.append((p, random_gradient(p, 10 * step + i)))
    backward_of(pairs)
    optimizer.step()
    optimizer.zero_grad()


@MODES
@pytest.mark.parametrize("steps", [3, 4, 5, 6, 8])
def test_weights_may_be_tied_in_mid_training(steps, hooks):
    """The one that is left over gets no gradient any more; what its window owes still appears in it."""
    nets, left_over = (Net(), Net()), []
    players = [all_of(nets[0], offload_gradients=hooks), all_of(nets[1], ReferenceZenFlow)]
    for step in range(steps + 9):
        for net, player in zip(nets, players, strict=True):
            if step == steps:
                left_over.append(net.head)
                net.head = net.embedding
            step_with_loss(net, player, step)
        assert_all_same(weights_of(nets[0]), weights_of(nets[1]), f"step {step + 1}")
    assert_same(*left_over, "the one that is left over")
    assert_same_state(*players, "state")


@MODES
@pytest.mark.parametrize("steps", [3, 4, 5, 6, 8])
def test_tied_weights_may_be_taken_apart_in_mid_training(steps, hooks):
    nets = Net(), Net()
    for net in nets:
        net.head = net.embedding
    players = [all_of(nets[0], offload_gradients=hooks), all_of(nets[1], ReferenceZenFlow)]
    for step in range(steps + 9):
        for net, player in zip(nets, players, strict=True):
            if step == steps:
                net.head = nn.Parameter(net.embedding.detach().clone())
                player.add_param_group({"params": [net.head]})
            step_with_loss(net, player, step)
        assert_all_same(weights_of(nets[0]), weights_of(nets[1]), f"step {step + 1}")
    assert_same_state(*players, "state")


@pytest.fixture
def swapping():
    """torch swaps a parameter's content for a new tensor's, instead of setting its data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@MODES
@pytest.mark.parametrize("steps", [3, 5])
def test_training_goes_on_where_torch_swaps_parameters(swapping, steps, hooks):
    nets = Net(FP32), Net(FP32)
    players = [all_of(nets[0], offload_gradients=hooks), all_of(nets[1], ReferenceZenFlow)]
    for step in range(steps + 9):
        for net, player in zip(nets, players, strict=True):
            if step == steps:
                net.load_state_dict(Net(FP32, seed=5).state_dict())
            step_with_loss(net, player, step)
        assert_all_same(weights_of(nets[0]), weights_of(nets[1]), f"step {step + 1}")
    assert_same_state(*players, "state")


@MODES
def test_a_dtype_changed_by_swapping_keeps_the_masters(swapping, hooks):
    net = Net(FP32)
    optimizer = all_of(net, offload_gradients=hooks)
    for step in range(5):
        step_with_loss(net, optimizer, step)
    masters = [state["master"] for state in saved_state(optimizer).values()]
    net.to(BF16)
    assert_all_same([state["master"] for state in saved_state(optimizer).values()], masters, "masters")
    for step in range(5, 12):
        step_with_loss(net, optimizer, step)
    assert all(p.dtype == BF16 for p in net.parameters())


@pytest.mark.parametrize("call", ["step", "synchronize", "flush", "state_dict", "master_weights"])
def test_a_dtype_that_is_not_updated_is_refused_and_moved_back_the_run_goes_on(call):
    net, undisturbed = Net(FP32), Net(FP32)
    optimizers = all_of(net), all_of(undisturbed)
    for optimizer in optimizers:
        train(optimizer, 5)
    net.double()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has dtype torch.float64: .* use torch.optim.AdamW"):
        getattr(optimizers[0], call)(*([net] if call == "master_weights" else []))
    net.float()
    for optimizer in optimizers:
        train(optimizer, 8, start=5)
    assert_all_same(weights_of(net), weights_of(undisturbed), "weights")
    assert_same_saved(*optimizers, "state")


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_model_that_changes_its_dtype_inside_settled_gets_its_training_weights_back(steps):
    net = Net(FP32)
    optimizer = all_of(net, topk_ratio=0.0)  # a selected column's weight is what its master rounds to
    train(optimizer, steps)
    training, masters = copies(net.parameters()), [s["master"] for s in saved_state(optimizer).values()]
    with optimizer.settled():
        net.to(BF16)
        assert_all_same(weights_of(net), [m.to(BF16) for m in masters], "inside")
    assert_all_same(weights_of(net), [p.to(BF16) for p in training], "after it")
    assert_all_same([s["master"] for s in saved_state(optimizer).values()], masters, "masters")


# Our own writes

WRITERS = ["step", "synchronize", "flush", "settled"]
READERS = ["state_dict", "master_weights", "stats", "repr", "zero_grad"]


def call(name, net, optimizer):
    if name == "settled":
        with optimizer.settled():
            pass
    elif name == "master_weights":
        optimizer.master_weights(net)
    elif name == "repr":
        repr(optimizer)
    else:
        getattr(optimizer, name)()


def seen(net):
    return copies(net.parameters()), [p._version for p in net.parameters()]


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_the_version_counter_tells_of_every_write_and_readers_write_nothing(name):
    net = Net()
    optimizer = all_of(net)
    for step in range(12):
        train(optimizer, 1, step)
        weights, versions = seen(net)
        call(name, net, optimizer)
        for p, before, version in zip(net.parameters(), weights, versions, strict=True):
            changed = not torch.equal(p, before)
            assert p._version > version or not changed, f"{name} after step {step + 1}"
            assert name in WRITERS or (not changed and p._version == version), f"{name} after step {step + 1}"


def test_nothing_is_written_between_two_calls_while_the_host_works():
    """Whoever reads then sees what the last call left, whole; here a reader looks until the update is done."""
    net = Net()
    net.embedding = random_parameter(700, 900)
    optimizer = all_of(net)
    for step in range(9):
        train(optimizer, 1, step)
        weights, versions = seen(net)
        for _ in range(3):
            assert_all_same(weights_of(net), weights, f"after step {step + 1}")
        optimizer.state_dict()  # waits
        assert_all_same(weights_of(net), weights, f"after step {step + 1}, with the host idle")
        assert [p._version for p in net.parameters()] == versions


def test_in_hook_mode_a_backward_that_publishes_bumps_the_version():
    net = Net()
    optimizer, bumped = all_of(net, offload_gradients=True), []
    for step in range(15):
        weights, versions = seen(net)
        backward_of([(p, random_gradient(p, step)) for p in net.parameters()])
        changed = [not torch.equal(p, before) for p, before in zip(net.parameters(), weights, strict=True)]
        assert [p._version > version for p, version in zip(net.parameters(), versions, strict=True)] == changed
        bumped.append(any(changed))
        optimizer.step()
        optimizer.zero_grad()
    assert [step + 1 for step, early in enumerate(bumped) if early] == [6, 14]  # 9 selects, and publishes in step()


def test_autograd_notices_a_step_between_forward_and_backward():
    net = Net(FP32)
    optimizer = all_of(net)
    loss = (net.head * torch.ones(9, 14, requires_grad=True)).square().sum()
    train(optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
