# SPDX-License-Identifier: Apache-2.0
"""FollowingOptimizer: the optimizer's store, and how it follows what changed between two calls.

Not for: what a step does (optimizer.py), nor what a checkpoint holds (checkpoints.py).
"""

import collections
import functools
import weakref

import torch
from torch.optim import Optimizer

from zenflow import _C
from zenflow.fit import ScheduleFit
from zenflow.offload import GradientOffload
from zenflow.store import Store, splits
from zenflow.tensors import parameter_name


def on_the_optimizer(method):
    """For methods that change attributes: Lightning's wrapper inherits them, but what it is given it keeps."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return method(self._itself(), *args, **kwargs)

    return call


class FollowingOptimizer(Optimizer):
    """An optimizer whose state is in a Store that each public call brings up to date first: `_follow_changes()`.

    A subclass calls `_start(settings)` before Optimizer.__init__ and on unpickling.
    """

    def _start(self, settings):
        self._itself = weakref.ref(self)
        self._requested = settings
        self._fit = self._new_fit({})
        self._offload = GradientOffload(self) if settings.offload_gradients else None
        self._store = None  # until the first step
        self._outdated = False  # whether the store runs under a checkpoint's schedule
        self._shows_settled = False  # inside settled()
        self._owes_training = False  # the weights may still be the settled ones
        self._skipped_steps = 0

    @property
    def _settings(self):
        """Those in force."""
        return self._fit.settings if self._fit else self._requested

    def _new_fit(self, scalars):
        """The measuring of the schedule, if that is asked for: from its start, or as a checkpoint has chosen."""
        if not self._requested.measured:
            return None
        fit = ScheduleFit(self._requested)
        if scalars.get("fitted") and fit.may_choose(int(scalars["update_interval"])):
            fit.keep(int(scalars["update_interval"]), int(scalars["update_delay"]))
        return fit

    def _name(self, p):
        return parameter_name(self.param_groups, p)

    def _layout(self, parameters=None, groups=None, settings=None):
        """(p, whether it is split, topk_ratio) of the given parameters, or of all that are trained."""
        wanted = None if parameters is None else set(parameters)
        return [
            (p, splits(p, group["split"], settings or self._settings), group["topk_ratio"])
            for group in groups or self.param_groups
            for p in group["params"]
            if (p.requires_grad if wanted is None else p in wanted)
        ]

    def _refuse_while_settled(self, what):
        if self._shows_settled:
            raise RuntimeError(
                f"{what} cannot run inside `with optimizer.settled()`, which shows other weights than those that "
                "training goes on from: leave the block first"
            )

    # What changed between two calls

    @torch.no_grad()
    def _follow_changes(self):
        """Catches up with what changed between calls: state that the user deleted, a model moved to another device or
        dtype, a checkpoint's other schedule."""
        if self._store is None:
            return
        deleted = self._look_for_lost_state()
        if self._offload:
            self._offload.follow_changes()
        moved = self._store.follow_moves(self._owes_training)
        if self._shows_settled:
            if moved:
                self._store.write_weights(_C.Engine.show_settled)
        elif self._owes_training:
            self._store.write_weights(_C.Engine.show_training)
            self._owes_training = False
        if deleted and not self._shows_settled:
            self._begin_anew(deleted)
        if self._outdated:
            self._store.write_weights(_C.Engine.flush)
            states, clock = self._store.export_states(), (self._store.engine.clock[0], 0, 0, 0)
            layout = self._layout(states)
            store = self._filled_store(self._settings, states, layout, clock, self.param_groups, keep_selection=False)
            self._take_over(store, self.param_groups, outdated=False, fit=self._fit)
        if self._fit:
            self._follow_schedule()

    def _follow_schedule(self):
        if self._store.settings is not self._settings:
            if self._offload:
                self._offload.bring_back()
            self._store.follow_schedule(self._settings)

    def _look_for_lost_state(self):
        """Parameters whose state the user deleted from `state`. Drops the state of tensors that no group holds any more
        and that were freed."""
        store, state = self._store, self.state
        store.state = state  # the user may have put another in its place
        suspects = {
            p: record
            for p, record in store.records.items()
            if state.get(p, {}).get("step") is not record.step or p.shape != record.shape
        }
        if not suspects:
            return ()
        held = {p for group in self.param_groups for p in group["params"]}
        freed = {p for p, record in suspects.items() if p not in held and p.shape != record.shape}
        store.drop(freed)
        deleted = {p for p in suspects if p not in freed and not state.get(p)}
        for p in suspects.keys() - freed - deleted:
            state[p]["step"] = suspects[p].step  # the user moved it; the engine counts in ours
        return deleted

    def _begin_anew(self, deleted):
        """As AdamW does without state; first the open window closes as by flush(), so that no gradient is lost."""
        if self._offload:
            self._offload.bring_back(lambda p, _: p not in deleted)
        if any(p in deleted for group in self.param_groups for p in group["params"]):
            self._store.write_weights(_C.Engine.flush)
        self._store.drop(deleted)

    # Another store

    def _take_over(self, store, groups, outdated, fit):
        state = store.state if store else collections.defaultdict(dict)
        if self._offload:
            self._offload.bring_back()  # now, so that the old store can go
        # No call between these: an interrupt falls before all of them or after.
        self._store, self.state, self.param_groups = store, state, groups
        self._outdated, self._owes_training, self._fit = outdated, False, fit

    @staticmethod
    def _filled_store(settings, states, layout, clock, groups, *, keep_selection):
        store = Store(settings, layout, groups)
        imports = {p: (states[p], split) for p, split, _ in layout}
        store.import_states(imports, clock, keep_selection=keep_selection)
        return store
