# SPDX-License-Identifier: Apache-2.0
"""Parameter groups as people change them: what torch.optim.AdamW allows, ZenFlowOptimizer follows.

Most tests train beside the reference and compare after every step.
"""

import collections
import copy
import warnings

import pytest
import torch
from torch import nn

from compare import assert_all_same, assert_same, parameters_of, saved_state
from small_parameters import Beside, random_gradient, random_parameter, train, zenflow_of
from zenflow import _C, ZenFlowOptimizer

SHORT = {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 6, "lr": 1e-2}
SHAPES = [(6, 10), (5, 8), (7,)]


# Different settings


@pytest.mark.parametrize("rule", ["adamw", "mean"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_each_group_trains_by_its_own_settings(rule, delay):
    groups = [
        {"params": [(6, 10), (7,)], "lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"params": [(5, 8)], "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "maximize": True},
        {"params": [(4, 12)], "topk_ratio": 0.5},
        {"params": [(3, 9)], "split": False},
    ]
    beside = Beside(*groups, **SHORT, deferred_rule=rule, update_delay=delay)
    beside.train(14)
    beside.finish()


def test_settings_changed_between_steps_count_from_the_next_gradient():
    beside = Beside(SHAPES[:2], SHAPES[2:], **SHORT)
    for change in ({"lr": 0.1}, {"betas": (0.5, 0.7)}, {"weight_decay": 0.5}, {"eps": 1e-2}, {"maximize": True}):
        beside.each(lambda optimizer, change=change: optimizer.param_groups[0].update(change))
        beside.train(2)
    beside.finish()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": None}, r"Invalid learning rate: None \(lr must be a number >= 0\)"),
        ({"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element, got 2 elements"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"eps": "small"}, "Invalid epsilon value: small"),
        ({"weight_decay": None}, "Invalid weight_decay value: None"),
    ],
)
def test_what_is_no_number_is_refused_between_steps_too_before_anything_changes(change, words):
    optimizer = zenflow_of(*[random_parameter(*s) for s in SHAPES], **SHORT)
    train(optimizer, 4)
    before = copy.deepcopy(parameters_of(optimizer))
    kept = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=words):
        train(optimizer, 1, 4)
    assert_all_same(parameters_of(optimizer), before, "weights")
    assert optimizer.stats().total.steps == 4
    optimizer.param_groups[0].update(kept)
    train(optimizer, 4, 4)


# Which parameters have gradients


def test_empty_groups_and_groups_without_any_gradient_change_nothing():
    beside = Beside([], SHAPES[:1], [], SHAPES[1:], **SHORT)
    beside.train(10, without=(1, 2))
    beside.train(7)
    beside.finish()


def test_gradients_that_come_late_or_stay_away_for_whole_windows_count_by_their_own_counters():
    beside = Beside(SHAPES, **SHORT)
    beside.train(2, without=(1,))
    beside.train(3)
    beside.train(7, without=(0, 2))
    beside.train(6)
    beside.finish()
    counts = [float(state["step"]) for state in saved_state(beside.optimizers[0]).values()]
    assert counts == [11, 16, 11]


def test_a_frozen_parameter_takes_no_host_memory_and_is_never_written():
    frozen, trained = random_parameter(300, 400), random_parameter(6, 10)
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    alone = zenflow_of(random_parameter(6, 10), **SHORT)
    train(alone, 7)
    optimizer = zenflow_of(frozen, trained, **SHORT)
    for step in range(7):
        trained.grad = random_gradient(trained, step)
        optimizer.step()
    assert optimizer.stats().host_bytes == alone.stats().host_bytes
    assert optimizer.stats().parameters == 1
    assert frozen not in optimizer.state
    assert_same(trained, parameters_of(alone)[0], "the trained parameter")
    assert_same(frozen, before, "the frozen parameter")
    assert (frozen._version, trained._version > 0) == (0, True)


def test_a_frozen_parameter_counts_for_no_memory_when_the_host_buffer_is_chosen():
    """Its state would take 2**44 bytes."""
    frozen = nn.Parameter(torch.empty(2**20, 2**20, device="meta"), requires_grad=False)
    trained = random_parameter(6, 10)
    optimizer = zenflow_of(frozen, trained, **SHORT)
    trained.grad = random_gradient(trained, 0)
    optimizer.step()
    assert optimizer.stats().host_buffer == "ring"


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_parameter_that_is_unfrozen_later_trains_from_there(steps):
    beside = Beside(SHAPES, **SHORT)
    beside.each(lambda optimizer: parameters_of(optimizer)[0].requires_grad_(False))
    beside.train(steps, without=(0,))
    beside.each(lambda optimizer: parameters_of(optimizer)[0].requires_grad_(True))
    beside.train(10)
    beside.finish()


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_group_added_late_is_as_if_its_first_gradient_came_late(steps):
    """torch's way of unfreezing: the group may be added at any step of a window."""
    late, known = Beside(SHAPES[:1], **SHORT), Beside(SHAPES[:1], SHAPES[1:2], **SHORT)
    late.train(steps)
    known.train(steps, without=(1,))
    late.each(lambda optimizer: optimizer.add_param_group({"params": [random_parameter(*SHAPES[1], seed=1)]}))
    late.train(10)
    known.train(10)
    assert_all_same(parameters_of(late.optimizers[0]), parameters_of(known.optimizers[0]), "weights")
    late.finish()


# The same parameter twice


def test_a_parameter_twice_in_one_group_is_warned_of_as_by_torch_and_updated_once_a_step():
    p, twin = random_parameter(6, 10), random_parameter(6, 10)
    with pytest.warns(UserWarning, match="parameter group with duplicate parameters"):
        optimizer = zenflow_of(p, p, **SHORT)
    reference = zenflow_of(twin, **SHORT)
    train(optimizer, 8)
    train(reference, 8)
    assert_same(p, twin, "weight")
    assert float(optimizer.state[p]["step"]) == 8
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 4, 8)
    train(reference, 4, 8)
    assert_same(p, twin, "weight, after its state was loaded")


def test_a_parameter_in_two_groups_is_refused_as_by_torch():
    p = random_parameter(6, 10)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ZenFlowOptimizer([{"params": [p]}, {"params": [p]}])
    optimizer = zenflow_of(p, **SHORT)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


class Tied(nn.Module):
    """A language model's usual tie: the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(19, 12), nn.Linear(12, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(torch.tanh(self.embedding(words)))


@pytest.mark.parametrize("hooks", [False, True])
def test_tied_weights_are_one_parameter_with_the_sum_of_both_gradients(hooks):
    weights = []
    for make in (Tied, lambda: copy.deepcopy(Tied())):
        net = make()
        optimizer = zenflow_of(*net.parameters(), **SHORT, offload_gradients=hooks)
        assert len(parameters_of(optimizer)) == 1
        for step in range(8):
            words = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(net(words).flatten(0, 1), words.flatten()).backward()
            if not hooks:
                assert (net.head.weight.grad != 0).all()
            optimizer.step()
            optimizer.zero_grad()
        assert net.head.weight is net.embedding.weight
        weights.append(net.head.weight)
    assert_same(*weights, "beside a copy of the model, tied too")


# Parameters that come and go


def replace(optimizer, place, p):
    old = parameters_of(optimizer)[place]
    for group in optimizer.param_groups:
        group["params"] = [p if q is old else q for q in group["params"]]
    return old


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_a_parameter_replaced_by_one_of_another_shape_begins_anew_and_leaves_the_others_alone(steps, delay):
    beside = Beside(SHAPES, **SHORT, update_delay=delay)
    beside.train(steps)
    beside.each(lambda optimizer: replace(optimizer, 1, random_parameter(9, 4, seed=5)))
    beside.train(10)
    beside.finish()


def test_a_replaced_parameter_that_was_freed_is_not_asked_for_again():
    optimizer = zenflow_of(*[random_parameter(*s) for s in SHAPES], **SHORT)
    train(optimizer, 4)
    old = replace(optimizer, 1, random_parameter(9, 4))
    old.data = torch.empty(0)
    train(optimizer, 5, 4)
    optimizer.state_dict()
    optimizer.synchronize()
    with optimizer.settled():
        pass
    copy.deepcopy(optimizer)
    assert old.numel() == 0
    assert len(optimizer.state_dict()["state"]) == 3


@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_groups_taken_away_for_a_while_lose_no_gradient(delay, buffer):
    """As people do who train parts of a model in turns: a window that such a group had open ends with the others'."""
    for away, back in ((2, 5), (4, 5), (4, 9), (5, 12), (6, 7)):
        beside = Beside([SHAPES[0]], SHAPES[1:], **SHORT, update_delay=delay, host_buffer=buffer)
        beside.train(away)
        groups = [optimizer.param_groups for optimizer in beside.optimizers]
        beside.each(lambda optimizer: setattr(optimizer, "param_groups", optimizer.param_groups[:1]))
        beside.train(back - away)
        for optimizer, all_groups in zip(beside.optimizers, groups, strict=True):
            optimizer.param_groups = all_groups
        beside.compare()
        beside.train(8)
        beside.finish()


# State that the user deletes


def delete(optimizer):
    del optimizer.state[parameters_of(optimizer)[0]]


def empty_one(optimizer):
    optimizer.state[parameters_of(optimizer)[0]] = {}


def test_state_of_a_replaced_parameter_is_freed_when_it_is_deleted():
    held = _C.host_bytes_held()
    optimizer = zenflow_of(random_parameter(6, 10), random_parameter(30, 40), **SHORT)
    train(optimizer, 4)
    before = _C.host_bytes_held()
    old = replace(optimizer, 1, random_parameter(3, 4))
    del optimizer.state[old]
    weight = old.detach().clone()
    train(optimizer, 4, 4)
    assert _C.host_bytes_held() - held < (before - held) / 4
    assert old not in optimizer.state
    assert_same(old, weight, "the replaced parameter")


@pytest.mark.parametrize("forget", [delete, empty_one])
@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_a_parameter_whose_state_the_user_deletes_begins_anew(forget, steps):
    """As AdamW does; first its window closes as by flush(), so that no gradient is lost."""
    beside = Beside(SHAPES, **SHORT)
    beside.train(steps)
    ours, reference = beside.optimizers
    forget(ours)
    reference.flush()
    delete(reference)
    beside.train(10)
    beside.finish()
    assert float(ours.state[parameters_of(ours)[0]]["step"]) == 10
    assert float(ours.state[parameters_of(ours)[1]]["step"]) == steps + 10


def clear(optimizer):
    optimizer.state.clear()


def put_another(optimizer):
    optimizer.state = collections.defaultdict(dict)


@pytest.mark.parametrize("reset", [clear, put_another])
def test_an_optimizer_whose_state_is_cleared_begins_anew(reset):
    beside = Beside(SHAPES, **SHORT)
    beside.train(5)
    ours, reference = beside.optimizers
    reset(ours)
    reference.flush()
    clear(reference)
    beside.train(7)
    beside.finish()
    assert [float(state["step"]) for state in ours.state.values()] == [7, 7, 7]


def test_deleted_state_is_forgotten_with_gradients_that_left_in_backward():
    weights = []
    for hooks in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(10, 6)
        optimizer = zenflow_of(*net.parameters(), **SHORT, offload_gradients=hooks)
        for step in range(9):
            net(torch.randn(4, 10, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            if step == 4:
                optimizer.state.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a gradient was brought back
                optimizer.step()
            optimizer.zero_grad()
        weights.append(list(net.parameters()))
    assert_all_same(*weights, "beside the default mode")


# With gradients that leave in backward


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.third = nn.Linear(10, 12), nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def take_away(net, optimizer, step):
    """The second layer's group, from step 4 to step 8."""
    if step == 4:
        optimizer.away = optimizer.param_groups.pop(1)
    if step == 8:
        optimizer.param_groups.insert(1, optimizer.away)


def put_another_layer(net, optimizer, step):
    if step == 5:
        with torch.random.fork_rng():
            torch.manual_seed(9)
            net.first, net.second = nn.Linear(10, 9), nn.Linear(9, 8)
        for group, layer in zip(optimizer.param_groups, (net.first, net.second), strict=False):
            group["params"] = list(layer.parameters())


def freeze_for_a_while(net, optimizer, step):
    if step in (4, 8):
        net.second.requires_grad_(step == 8)


def add_late(net, optimizer, step):
    if step == 0:
        optimizer.away = optimizer.param_groups.pop(2)
    if step == 5:
        optimizer.add_param_group({"params": optimizer.away["params"], "lr": 0.1})


def delete_one(net, optimizer, step):
    if step == 5:
        del optimizer.state[net.first.weight]


CHANGES = [take_away, put_another_layer, freeze_for_a_while, add_late, delete_one]


@pytest.mark.parametrize("when", ["before backward", "before step"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_groups_gives_the_same_bits_where_gradients_leave_in_backward(change, when):
    weights = []
    for hooks in (False, True):
        net = Parts()
        groups = [{"params": layer.parameters()} for layer in net.children()]
        optimizer = zenflow_of(*groups, **SHORT, offload_gradients=hooks)
        for step in range(13):
            if when == "before backward":
                change(net, optimizer, step)
            net(torch.randn(4, 10, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            if when == "before step":
                change(net, optimizer, step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a gradient was brought back
                optimizer.step()
            net.zero_grad()
        optimizer.flush()
        weights.append(list(net.parameters()))
    assert_all_same(*weights, "beside the default mode")
