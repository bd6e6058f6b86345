# SPDX-License-Identifier: Apache-2.0
"""A training's surroundings: profilers, compilers, checkpointing, torch's modes, code that looks into optimizers."""

import collections
import contextlib
import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from compare import assert_all_same, assert_same_saved, parameters_of
from small_model import LENGTH, WORDS, small_model
from small_parameters import random_gradient, random_parameter, train, zenflow_of
from zenflow import ZenFlowOptimizer

SCHEDULE = {"update_interval": 3, "select_interval": 6, "topk_ratio": 0.2, "min_offload_numel": 0, "num_threads": 1}
both_modes = pytest.mark.parametrize("hooks", [False, True], ids=["step", "backward"])


def batches(steps):
    return torch.randint(WORDS, (steps, 2, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def trained(model, hooks=False, steps=8, around=contextlib.nullcontext, forward=None):
    """The optimizer of `model` after some steps; all but its construction runs inside `around()`."""
    optimizer = ZenFlowOptimizer(model.parameters(), lr=1e-3, offload_gradients=hooks, **SCHEDULE)
    with around():
        for batch in batches(steps):
            loss_of(forward or model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def assert_trained_alike(optimizer, other):
    assert_all_same(parameters_of(optimizer), parameters_of(other), "weights")
    assert_same_saved(optimizer, other, "state")


# An optimizer of torch


def test_it_is_an_optimizer_with_adamws_defaults_groups_and_signature():
    p = random_parameter(4, 6)
    optimizer, adamw = ZenFlowOptimizer([p]), torch.optim.AdamW([p])
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert optimizer.defaults[name] == adamw.defaults[name]
        assert optimizer.param_groups[0][name] == adamw.param_groups[0][name]
    assert optimizer.param_groups[0]["params"][0] is p
    assert isinstance(optimizer.state, collections.defaultdict)
    (ours, theirs) = (list(inspect.signature(made).parameters) for made in (ZenFlowOptimizer, torch.optim.AdamW))
    assert ours[:5] == theirs[:5]


# Code that looks into the state


def move(optimizer, change):
    """The usual loop after loading, to bring state to another device."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value):
                state[key] = change(value)


MOVES = {
    "to the device where it is": lambda tensor: tensor.to("cpu"),
    "a copy": lambda tensor: tensor.clone(),
    "another dtype": lambda tensor: tensor.to(torch.float64),
    "a device without data": lambda tensor: tensor.to("meta"),
}


@both_modes
@pytest.mark.parametrize("how", MOVES)
def test_state_that_is_moved_about_does_no_harm(how, hooks):
    """Before the first step, in a window, and after loading; the step count goes on."""
    undisturbed = trained(small_model(), hooks, 9)
    model = small_model()
    optimizer = ZenFlowOptimizer(model.parameters(), lr=1e-3, offload_gradients=hooks, **SCHEDULE)
    move(optimizer, MOVES[how])
    for i, batch in enumerate(batches(9)):
        loss_of(model, batch).backward()
        if i == 4:
            move(optimizer, MOVES[how])
        optimizer.step()
        optimizer.zero_grad()
        if i == 6:
            optimizer.load_state_dict(optimizer.state_dict())
            move(optimizer, MOVES[how])
    assert_trained_alike(optimizer, undisturbed)
    assert {float(state["step"]) for state in optimizer.state.values()} == {9}


def look(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert not optimizer.state[p]  # a defaultdict: this makes an entry
            assert optimizer.state.get(p) == {}


@both_modes
def test_looking_for_state_before_the_first_step_changes_nothing(hooks):
    model = small_model()
    optimizer = ZenFlowOptimizer(model.parameters(), lr=1e-3, offload_gradients=hooks, **SCHEDULE)
    look(optimizer)
    assert optimizer.state_dict()["state"] == {}
    copy.deepcopy(optimizer)
    for batch in batches(8):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(optimizer, trained(small_model(), hooks))
    assert all(state["step"] == 8 for state in optimizer.state.values())


# Profilers


@both_modes
def test_a_profile_names_step_and_zero_grad_as_torchs_optimizers_do(hooks):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(small_model(), hooks, 3)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#ZenFlowOptimizer.step"] == 3
    assert counts["Optimizer.zero_grad#ZenFlowOptimizer.zero_grad"] == 3


def test_a_profiler_that_looks_at_parameters_and_state_changes_no_bit():
    """With stacks and memory the profiler reads what the optimizer holds, in C++."""

    def profiler():
        return torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            with_stack=True,
            profile_memory=True,
            record_shapes=True,
            with_modules=True,
        )

    assert_trained_alike(trained(small_model(), around=profiler), trained(small_model()))


# Compilers and checkpointing


@both_modes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_without_being_compiled_again(backend, hooks):
    torch._dynamo.reset()
    compiled = small_model()
    forward = torch.compile(compiled, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it traces
        optimizer = trained(compiled, hooks, 1, forward=forward)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(8)[1:]:
            loss_of(forward, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    eager = trained(small_model(), hooks)
    for p, q in zip(parameters_of(optimizer), parameters_of(eager), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


class Checkpointed(nn.Module):
    def __init__(self, model, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, words):
        embedding, *blocks = self.model
        x = embedding(words)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@both_modes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_model_trains_as_one_that_keeps_its_activations(use_reentrant, hooks):
    model = small_model()
    optimizer = trained(model, hooks, 10, forward=Checkpointed(model, use_reentrant))
    assert_trained_alike(optimizer, trained(small_model(), steps=10))


# torch's modes


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@both_modes
def test_deterministic_algorithms_are_all_that_is_used(hooks):
    """The mode also fills new memory with NaN: what we read before it was written would show."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert_trained_alike(trained(small_model(), hooks, around=deterministic), trained(small_model(), hooks))


MODES = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_the_same_in_every_mode(mode):
    optimizer, twin = (zenflow_of(random_parameter(6, 10), random_parameter(7), **SCHEDULE) for _ in range(2))
    for step in range(10):
        train(twin, 1, step)
        for p in parameters_of(optimizer):
            p.grad = random_gradient(p, step)
        with MODES[mode]():
            optimizer.step()
            if step % 4 == 3:
                optimizer.load_state_dict(optimizer.state_dict())
    assert_trained_alike(optimizer, twin)
    assert all(p.requires_grad and not p.is_inference() for p in parameters_of(optimizer))
    parameters_of(optimizer)[0].square().sum().backward()


# Warnings


@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_use_gives_no_warning(hooks, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small_model(dtype)
        groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[1:].parameters()}]
        optimizer = ZenFlowOptimizer(groups, lr=1e-3, offload_gradients=hooks, max_grad_norm=1.0, **SCHEDULE)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for i, batch in enumerate(batches(8)):
            with optimizer.accumulate():
                loss_of(model, batch).backward()
            loss_of(model, batch).backward()
            if not hooks:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if i == 4:
                with optimizer.settled():
                    loss_of(model.eval(), batch)
                model.train()
                optimizer.load_state_dict(optimizer.state_dict())
                copy.deepcopy(optimizer)
                model.load_state_dict(model.state_dict())
        optimizer.synchronize()
        optimizer.flush()
        optimizer.stats()
        repr(optimizer)
        del optimizer, scheduler
