# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint on one process: states go to a folder and back, also into a new optimizer."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from compare import assert_all_same, assert_same_saved
from small_model import LENGTH, WORDS, small_model
from zenflow import ZenFlowOptimizer

# after 3 steps a window is open, after 4 and 5 its update is in flight, after 5 a new one is open too, 6 publishes
SCHEDULE = {"update_interval": 4, "update_delay": 2, "select_interval": 8, "topk_ratio": 0.2, "min_offload_numel": 1000}
OPTIONS = [{}, {"flatten_optimizer_state_dict": True}]
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
)


class Training:
    """A bf16 model with tied, frozen and undecayed parameters; what a step does depends on its number alone."""

    def __init__(self, optimizer_class=ZenFlowOptimizer, **settings):
        self.model = small_model(torch.bfloat16)
        self.model[3].weight = self.model[0].weight
        self.model[1].out.weight.requires_grad_(False)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
        self.optimizer = optimizer_class(groups, lr=1e-3, **settings)
        self.done = 0

    def step(self, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.done)
            batch = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
            logits = self.model(batch[:, :-1]).float()
            nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
        return self

    def save(self, folder, options):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder, options):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)


def started(steps=0, **changed):
    return Training(**{**SCHEDULE, **changed}).step(steps)


def assert_go_on_alike(ours, theirs, steps=9):
    ours.done = theirs.done
    for _ in range(steps):
        ours.step(1)
        theirs.step(1)
        assert_all_same(list(ours.model.parameters()), list(theirs.model.parameters()), f"after step {ours.done}")
    assert_same_saved(ours.optimizer, theirs.optimizer, "at the end")
    assert ours.optimizer.stats().selection_overlap == theirs.optimizer.stats().selection_overlap


@pytest.mark.parametrize("changed", OPTIONS, ids=["", "flattened"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"deferred_rule": "mean"}, {"update_interval": "auto", "update_delay": 1, "select_interval": 16}],
    ids=["adamw", "mean", "auto"],
)
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 8])
def test_a_folder_loads_into_a_new_optimizer_which_goes_on_with_the_same_bits(tmp_path, steps, settings, changed):
    options = StateDictOptions(**changed)
    training, resumed = started(steps, **settings), started(**settings)
    training.save(tmp_path, options)
    resumed.load(tmp_path, options)
    assert_go_on_alike(resumed, training)


@pytest.mark.parametrize("changed", OPTIONS, ids=["", "flattened"])
@pytest.mark.parametrize("offset", [1, 6, 8, 9])
def test_a_folder_loads_into_a_template_of_another_place_in_a_window(tmp_path, offset, changed):
    options = StateDictOptions(**changed)
    training, other = started(5), started(offset)
    training.save(tmp_path, options)
    other.load(tmp_path, options)
    assert_go_on_alike(other, training)


@pytest.mark.parametrize("changed", OPTIONS, ids=["", "flattened"])
@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"deferred_rule": "mean"}, r'deferred_rule="mean" and has lost its .window_sum.'),
        ({"update_interval": "auto", "update_delay": 1, "select_interval": 16}, 'update_interval="auto" and has lost'),
    ],
    ids=["mean", "auto"],
)
def test_what_a_template_of_another_schedule_would_lose_is_refused(tmp_path, settings, lost, changed):
    """torch reads from a folder what the template has names for, and nothing else."""
    options = StateDictOptions(**changed)
    started(6, **settings).save(tmp_path, options)
    other = started(5)
    before = copy.deepcopy(other.optimizer.state_dict())
    with pytest.raises(ValueError, match=lost):
        other.load(tmp_path, options)
    assert before["param_groups"] == other.optimizer.state_dict()["param_groups"]
    other.step(1)


@pytest.mark.parametrize("changed", OPTIONS, ids=["", "flattened"])
@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
def test_asking_a_new_optimizer_for_its_state_is_no_step(hooks, changed):
    """torch calls step() with zero gradients at learning rate 0 to see what the state looks like."""
    asked, plain = started(offload_gradients=hooks), started(offload_gradients=hooks)
    weights = copy.deepcopy(list(asked.model.parameters()))
    state = get_optimizer_state_dict(asked.model, asked.optimizer, options=StateDictOptions(**changed))
    assert any(key.startswith("state") for key in state)
    assert asked.optimizer.stats().total.steps == 0
    assert [group["lr"] for group in asked.optimizer.param_groups] == [1e-3, 2e-3]
    assert_all_same(list(asked.model.parameters()), weights, "weights")
    assert_go_on_alike(asked, plain)


def test_a_users_own_first_step_with_zero_gradients_at_learning_rate_0_counts():
    training = started()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    training.optimizer.step(closure=None)
    assert training.optimizer.stats().total.steps == 1


def test_a_template_has_the_keys_and_shapes_of_every_later_state():
    def layout(state):
        return {key: (value.shape, value.dtype) if torch.is_tensor(value) else 0 for key, value in state.items()}

    training, options = started(), StateDictOptions(flatten_optimizer_state_dict=True)
    template = layout(get_optimizer_state_dict(training.model, training.optimizer, options=options))
    for _ in range(10):
        training.step(1)
        assert layout(get_optimizer_state_dict(training.model, training.optimizer, options=options)) == template


@pytest.fixture
def process_group(tmp_path):
    """Of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_full_state_goes_from_one_process_group_to_another(tmp_path, process_group):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    training, resumed = started(5), started()
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    file = tmp_path / "state.pt"
    torch.save([model, optimizer], file)
    model, optimizer = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(model)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, optimizer, options=options)
    assert_go_on_alike(resumed, training)


def test_a_folder_that_is_written_while_training_goes_on_holds_the_step_it_was_begun_at(tmp_path, process_group):
    options = StateDictOptions()
    training, undisturbed, resumed = started(5), started(5), started()
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    folder = tmp_path / "checkpoint"
    saving = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    training.step(4)
    saving.result()
    resumed.load(folder, options)
    assert_go_on_alike(resumed, undisturbed)


def test_states_are_exchanged_with_adamw_by_parameter_name():
    adamw, ours = Training(torch.optim.AdamW).step(5), started()
    state = get_optimizer_state_dict(adamw.model, adamw.optimizer)
    set_optimizer_state_dict(ours.model, ours.optimizer, state)
    for saved, loaded in zip(
        adamw.optimizer.state.values(), ours.optimizer.state_dict()["state"].values(), strict=True
    ):
        for key in ("exp_avg", "exp_avg_sq"):
            assert_all_same([loaded[key]], [saved[key].float()], key)
        assert loaded["step"] == saved["step"] == 5

    ours.step(8).optimizer.flush()
    state = get_optimizer_state_dict(ours.model, ours.optimizer)
    set_optimizer_state_dict(adamw.model, adamw.optimizer, state)
    assert all(state["step"] == 13 for state in adamw.optimizer.state.values())
    adamw.step(1)
