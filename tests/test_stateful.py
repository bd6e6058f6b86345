# SPDX-License-Identifier: Apache-2.0
"""Whatever users do, in any order: after each thing that they do, an optimizer and the reference have the same bits.

A state machine of hypothesis drives both. The reference has no checkpoints: beside each saved state lies a copy of it.
"""

import copy
import functools
import io
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from backward import backward_of
from children import in_child
from compare import assert_all_same, assert_same_state
from reference import ReferenceZenFlow, as_matrix, same_bits
from strategies import (
    BETAS,
    DTYPES,
    EDITS,
    EXTREME,
    GROUP_SETTINGS,
    MIXED_GRADIENTS,
    RATES,
    Run,
    edit,
    gradient,
    parameter_specs,
    runs,
)
from zenflow import ZenFlowOptimizer

MOST_PARAMETERS = 6
KINDS = st.lists(st.sampled_from(EXTREME), min_size=MOST_PARAMETERS, max_size=MOST_PARAMETERS)


@dataclass
class Saved:
    """A checkpoint, and the reference and its parameters as they were."""

    state: dict
    theirs: list
    reference: ReferenceZenFlow
    run: Run


class Training(RuleBasedStateMachine):
    offload_gradients = False
    saved = Bundle("saved")

    @initialize(run=runs(max_steps=0), looks_often=st.booleans())
    def begin(self, run, looks_often):
        self.run, self.looks_often, self.count = run, looks_often, 0
        self.ours, self.theirs = run.new_parameters(), run.new_parameters()
        self.optimizer = self.new_optimizer(self.ours)
        self.reference = run.new_optimizer(ReferenceZenFlow, self.theirs)

    def new_optimizer(self, parameters):
        return self.run.new_optimizer(ZenFlowOptimizer, parameters, offload_gradients=self.offload_gradients)

    @property
    def both(self):
        return (self.ours, self.optimizer), (self.theirs, self.reference)

    def generators(self):
        """The same random numbers for both, other ones each time."""
        self.count += 1
        return [torch.Generator().manual_seed(self.run.seed * 1000 + self.count) for _ in self.both]

    # What is looked at

    @invariant()
    def weights_are_the_same(self):
        assert_all_same(self.ours, self.theirs, "weights")

    @invariant()
    def states_are_the_same(self):
        if self.looks_often:  # at others' in-flight work, too: looking waits for it
            assert_same_state(self.optimizer, self.reference, "state")

    def teardown(self):
        if not hasattr(self, "run"):
            return
        assert_same_state(self.optimizer, self.reference, "state at the end")
        self.call("flush")
        self.weights_are_the_same()

    # Steps

    def give(self, kinds):
        for (parameters, _), generator in zip(self.both, self.generators(), strict=True):
            self.give_to(parameters, kinds, generator)
        if self.offload_gradients:
            self.publish_early()

    def publish_early(self):
        """A due publication may ride in the backward before its step: the reference's does so where ours did."""
        self.reference.masters()  # looks for edits
        for ours, p in zip(self.ours, self.theirs, strict=True):
            state = self.reference.state.get(p)
            due = state and state.in_flight and self.reference.due == self.reference.steps + 1
            if due and not same_bits(ours, p).all():
                state.last_written = torch.where(state.deferred, state.pending, state.last_written)
                state.in_flight = False
                with torch.no_grad():
                    p.copy_(state.last_written.view(p.shape))

    def give_to(self, parameters, kinds, generator):
        """A backward pass. `parameters` may be more or fewer than the kinds."""
        pairs = [
            (p, gradient(spec, kind, generator))
            for p, spec, kind in zip(parameters, self.run.parameters, kinds, strict=False)
        ]
        backward_of([(p, g) for p, g in pairs if p.requires_grad])

    def zero(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)
        torch.optim.SGD(self.theirs).zero_grad(set_to_none)

    def play(self, kinds):
        self.zero()
        self.give(kinds)
        for _, player in self.both:
            player.step()

    @rule(steps=st.lists(KINDS, min_size=1, max_size=3))
    def train(self, steps):
        for kinds in steps:
            self.play(kinds)
            self.weights_are_the_same()
        if self.offload_gradients:
            self.zero()  # what has left and been applied is no gradient any more

    @rule(kinds=KINDS)
    def backward(self, kinds):
        self.give(kinds)

    @rule(in_closure=st.none() | KINDS)
    def step(self, in_closure):
        """On what is in p.grad, be it of an earlier step, and what a closure adds to it."""
        for (parameters, player), generator in zip(self.both, self.generators(), strict=True):
            player.step(in_closure and functools.partial(self.give_to, parameters, in_closure, generator))
        if self.offload_gradients:
            self.zero()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.zero(set_to_none)

    @rule(
        error=st.sampled_from([RuntimeError, KeyboardInterrupt, SystemExit]), after_backward=st.booleans(), kinds=KINDS
    )
    def closure_fails(self, error, after_backward, kinds):
        def closure():
            if after_backward:
                self.give(kinds)
            raise error("on purpose")

        with pytest.raises(error, match="on purpose"):
            self.optimizer.step(closure)

    # Settings

    @rule(at=st.integers(0, 7), lr=RATES, how=st.sampled_from(["number", "tensor", "in place"]))
    def change_lr(self, at, lr, how):
        for _, player in self.both:
            group = player.param_groups[at % len(player.param_groups)]
            if how == "in place" and isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr if how == "number" else torch.tensor(lr)

    @rule(at=st.integers(0, 7), betas=BETAS)
    def change_betas(self, at, betas):
        for _, player in self.both:
            player.param_groups[at % len(player.param_groups)]["betas"] = betas

    @precondition(lambda self: len(self.ours) < MOST_PARAMETERS)
    @rule(spec=parameter_specs(), group=st.fixed_dictionaries({}, optional=GROUP_SETTINGS))
    def add_param_group(self, spec, group):
        spec = replace(spec, group=len(self.run.groups))
        self.run = replace(self.run, parameters=(*self.run.parameters, spec), groups=(*self.run.groups, group))
        for parameters, player in self.both:
            parameters.append(self.run.new_parameters()[-1])
            player.add_param_group({**group, "params": parameters[-1:]})

    @rule(at=st.integers(0, 7))
    def freeze_or_unfreeze(self, at):
        for parameters, _ in self.both:
            p = parameters[at % len(parameters)]
            p.requires_grad_(not p.requires_grad)

    # Weights

    @rule(kind=st.sampled_from(EDITS))
    def edit(self, kind):
        for (parameters, _), generator in zip(self.both, self.generators(), strict=True):
            for p in parameters:
                edit(p, kind, generator)

    @rule(dtype=st.sampled_from(DTYPES))
    def change_dtype(self, dtype):
        for parameters, _ in self.both:
            for p in parameters:
                p.data = p.data.to(dtype)
        self.imported({p for p, state in self.reference.state.items() if p.dtype != state.last_written.dtype})

    def imported(self, parameters):
        """Parameters got their state from a checkpoint, or one for another dtype; the next call looks at their weights.

        What masters round to is no edit, as of a model that was saved in settled(). In a new dtype, what is not
        deferred holds what masters round to.
        """
        self.optimizer.state_dict()
        before = {p: self.reference.state[p].last_written.dtype for p in parameters}
        for p in parameters:
            state = self.reference.state[p]
            rounded, last = state.master.to(p.dtype), state.last_written.to(p.dtype)
            state.last_written = torch.where(same_bits(as_matrix(p), rounded), rounded, last)
        self.reference.masters()  # looks for edits
        for p in parameters:
            state = self.reference.state[p]
            if p.dtype != before[p]:
                state.last_written = torch.where(state.deferred, state.last_written, state.master.to(p.dtype))
                with torch.no_grad():
                    p.copy_(state.last_written.view(p.shape))

    @rule(method=st.sampled_from(["synchronize", "flush"]))
    def call(self, method):
        for _, player in self.both:
            getattr(player, method)()

    @rule(inside=st.sampled_from(["nothing", "exception", "state_dict", *EDITS]))
    def settled(self, inside):
        error = ValueError if inside == "exception" else ()
        try:
            with self.optimizer.settled(), self.reference.settled():
                self.weights_are_the_same()
                if inside.startswith("edit"):
                    self.edit(inside)
                elif inside == "state_dict":
                    self.optimizer.state_dict()
                elif inside == "exception":
                    raise ValueError("on purpose")
        except error:
            pass
        self.reference.masters()  # looks for edits, as ours does on leaving

    # Checkpoints and copies

    @rule(target=saved, in_file=st.booleans())
    def save(self, in_file):
        state = self.optimizer.state_dict()
        if in_file:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        self.reference.masters()  # looks for edits, as state_dict() does
        theirs, reference = copied(self.theirs, self.reference)
        return Saved(state, theirs, reference, self.run)

    @rule(saved=saved, with_weights=st.booleans())
    def load(self, saved, with_weights):
        if len(saved.state["param_groups"]) != len(self.optimizer.param_groups):
            with pytest.raises(ValueError, match="different number of parameter groups"):
                self.optimizer.load_state_dict(saved.state)
            return
        self.optimizer.load_state_dict(saved.state)
        before = self.theirs
        self.theirs, self.reference = copied(saved.theirs, saved.reference)
        for ours, p, old in zip(self.ours, self.theirs, before, strict=True):
            p.requires_grad_(ours.requires_grad)
            if with_weights:
                ours.data.copy_(p)
            p.data = old.data
            if with_weights:
                p.data.copy_(ours.detach())
            p.grad = old.grad
        self.imported(set(self.reference.state))

    @rule(saved=saved, weights_first=st.booleans())
    def load_anew(self, saved, weights_first):
        """As a new process does, which loads the weights before the optimizer's state or after it."""
        self.run = saved.run
        self.ours = self.run.new_parameters()
        self.optimizer = self.new_optimizer(self.ours)
        self.theirs, self.reference = copied(saved.theirs, saved.reference)
        if not weights_first:
            self.optimizer.load_state_dict(saved.state)
        for ours, p in zip(self.ours, self.theirs, strict=True):
            ours.requires_grad_(p.requires_grad)
            ours.data = p.detach().clone()
        if weights_first:
            self.optimizer.load_state_dict(saved.state)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]), goes_on=st.sampled_from(["copy", "original"]), kinds=KINDS)
    def copy(self, how, goes_on, kinds):
        self.reference.masters()  # looks for edits, as copying does
        whole = self.ours, self.optimizer
        ours, optimizer = copied(*whole) if how == "deepcopy" else of_any_dtype(*pickle.loads(pickle.dumps(whole)))
        if goes_on == "copy":
            self.zero()  # the copied parameters have no gradient
            self.ours, self.optimizer = ours, optimizer
        else:
            for p, g in zip(ours, self.ours, strict=False):
                p.grad = torch.ones_like(g)
            optimizer.step()

    @rule(steps=st.lists(KINDS, min_size=1, max_size=3))
    def fork(self, steps):
        """The child trains on, and so does the parent."""

        def child():
            for kinds in steps:
                self.play(kinds)
                self.weights_are_the_same()
            assert_same_state(self.optimizer, self.reference, "state in a child")

        assert in_child(child) == 0, "see the child's traceback in stderr"


def copied(parameters, player):
    return of_any_dtype(*copy.deepcopy((parameters, player)))


def of_any_dtype(parameters, player):
    """torch's copies of parameters forget that their gradients may be of any dtype."""
    for p in parameters:
        if MIXED_GRADIENTS:
            p.grad_dtype = None
    return parameters, player


class OffloadingTraining(Training):
    offload_gradients = True


TestTraining = Training.TestCase
TestOffloadingTraining = OffloadingTraining.TestCase
TestTraining.settings = TestOffloadingTraining.settings = settings(
    max_examples=max(1, settings.default.max_examples * 2 // 3), stateful_step_count=25
)
