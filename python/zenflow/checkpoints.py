# SPDX-License-Identifier: Apache-2.0
"""CheckpointedOptimizer: whole states out of an optimizer and into it, as checkpoints, pickle and export need them.

What a state looks like is in `state.py`. Not for: when a step does what (optimizer.py).
"""

import collections
import copy

import torch

from zenflow import state as canonical
from zenflow.following import FollowingOptimizer, on_the_optimizer
from zenflow.masters import named_weights, without_master

# What torch's own state_dict() works on.
_SWAPPED = ("state", "param_groups", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class CheckpointedOptimizer(FollowingOptimizer):
    """state_dict() and load_state_dict(), pickle and copy by way of the canonical state, and the weights for export."""

    @on_the_optimizer
    def state_dict(self):
        """The canonical state (see `zenflow.state`), under torch's names where torch has them.

        Loads into torch.optim.AdamW too; after flush() nothing is missing for it. Only waits for the host: nothing
        changes, and nothing in it aliases the live state. Saved at any step, training resumes with the same bits.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():  # first: it may flush()
            hook(self)
        states, groups = self._canonical_state()
        groups = canonical.without_live_tensors(groups)
        live = {name: self.__dict__[name] for name in _SWAPPED}
        self.__dict__.update(zip(_SWAPPED, (states, groups, {}, {}), strict=True))
        try:
            state_dict = super().state_dict()
        finally:
            self.__dict__.update(live)
        for hook in self._optimizer_state_dict_post_hooks.values():  # last: it sees the live state
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    @on_the_optimizer
    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Replaces all state, the schedule's included, with a checkpoint of ZenFlowOptimizer or torch.optim.AdamW.

        Constructor settings win over the checkpoint's. Where update_interval, deferred_rule, min_offload_numel,
        topk_ratio or split differ, the saved window closes as by flush() at the next call, and columns are selected
        anew.

        Raises:
            ValueError: the groups or shapes differ, or the state is of another optimizer. Nothing has
                changed then.
        """
        self._refuse_while_settled("load_state_dict()")
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        if "param_groups" not in state_dict or "state" not in state_dict:
            raise ValueError(
                "this is no optimizer's state dict (it lacks 'state' or 'param_groups'): is it the model's? Give "
                "what optimizer.state_dict() returned, or the optimizer's part of a checkpoint"
            )
        saved_groups = copy.deepcopy(state_dict["param_groups"])
        by_id = canonical.match_parameters(self.param_groups, saved_groups)
        states = {by_id[key]: state for key, state in state_dict["state"].items() if key in by_id}
        states, saved_groups = canonical.own_part(states, saved_groups)
        canonical.check_states(states, self._name)
        self._restore(states, saved_groups)
        self.state.update((key, value) for key, value in state_dict["state"].items() if key not in by_id)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def master_weights(self, model=None):
        """The fp32 weights for export: {"name": tensor}, ready for safetensors.torch.save_file.

        Full-shaped copies in host memory, settled: without look-ahead, with the update in flight. The gradients of an
        open window are not in it; call flush() first where none may be left out. Only waits for the host, as
        state_dict() does.

        Args:
            model: gives names to its parameters. Tied ones come once, as in model.named_parameters(); those that this
                optimizer does not have come as they are, in fp32. None: for an optimizer that was made with
                model.named_parameters().

        Raises:
            ValueError: there are no names, or the model is another one.
        """
        weights = named_weights(model, self.param_groups)
        self._follow_changes()
        masters = self._store.export_masters(weights.values()) if self._store else {}
        return {name: masters[p] if p in masters else without_master(p) for name, p in weights.items()}

    def __getstate__(self):
        states, groups = self._canonical_state()
        return {"defaults": self.defaults, "state": states, "param_groups": groups, "_settings": self._requested}

    @torch.no_grad()
    def __setstate__(self, state):
        self._start(state["_settings"])
        super().__setstate__({**state, "state": collections.defaultdict(dict)})
        if self._offload:
            self._offload.follow()
        states = {p: value for p, value in state["state"].items() if isinstance(p, torch.Tensor)}
        saved_groups = [dict(group) for group in self.param_groups]
        canonical.take_scalars(self.param_groups, {})
        self._restore(states, saved_groups)
        self.state.update((key, value) for key, value in state["state"].items() if key not in states)

    def _canonical_state(self):
        """(states by parameter, parameter groups with the schedule's scalars), as state_dict() and pickle need them."""
        self._follow_changes()
        users = {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}
        if self._store is None:
            return users, list(self.param_groups)
        held = {p for group in self.param_groups for p in group["params"]}
        states = {p: state for p, state in self._store.export_states().items() if p in held}
        fitted = self._fit is not None and self._fit.chosen
        scalars = canonical.schedule_scalars(self._store.settings, self._store.engine.clock, fitted)
        for state in states.values():
            state["schedule"] = canonical.schedule_tensor(scalars)
        return states | users, [{**group, **scalars} for group in self.param_groups]

    def _restore(self, states, saved_groups):
        """Takes over checked states and groups. On an error the old ones stay.

        If the schedule was another, the store runs under that one until its window has closed.
        """
        scalars = canonical.take_scalars(saved_groups, states)
        canonical.check_complete(states, scalars, self._name)
        groups = canonical.merge_groups(self.param_groups, saved_groups)
        store, outdated, fit = None, False, self._new_fit(scalars)
        if scalars or states:
            wanted = fit.settings if fit else self._requested
            settings = canonical.saved_settings(wanted, scalars)
            layout = self._layout(states, canonical.saved_layouts(groups, saved_groups), settings)
            layout = [(p, split or canonical.has_selection(states[p]), ratio) for p, split, ratio in layout]
            clock = canonical.saved_clock(states, scalars)
            store = self._filled_store(settings, states, layout, clock, groups, keep_selection=True)
            outdated = settings is not wanted or layout != self._layout(states, settings=wanted)
        self._take_over(store, groups, outdated, fit)
