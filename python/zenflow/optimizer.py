# SPDX-License-Identifier: Apache-2.0
"""ZenFlowOptimizer: AdamW whose deferred columns are updated by the host in the background.

`step()` is the algorithm: validate, make room, plan, commit. The native engine (src/engine.h) does the work and owns
the clock; `settings.py` says what a step does, `state.py` what a checkpoint holds, `tensors.py` how tensors become
addresses.
"""

import collections
import contextlib
import copy
import functools
import inspect
import warnings
import weakref

import torch
from torch.optim import Optimizer

from zenflow import _C, deepspeed_config, devices, memory
from zenflow import state as canonical
from zenflow.fit import ScheduleFit
from zenflow.masters import named_weights, without_master
from zenflow.offload import GradientOffload
from zenflow.offloaded_gradient import OffloadedGradient
from zenflow.settings import UNSUPPORTED_OPTIONS, Settings, check_group, check_layout, numbers_of, reject_unsupported
from zenflow.stats import make_stats
from zenflow.store import Store, splits
from zenflow.templates import is_asked_for_template
from zenflow.tensors import (
    DTYPE_CODES,
    STAGED,
    address_of,
    all_finite,
    check_parameter,
    check_step,
    check_weight,
    engine_call,
    is_plain,
    mark_written,
    parameter_name,
    strides_of,
)

# What torch's own state_dict() works on.
_SWAPPED = ("state", "param_groups", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def _on_the_optimizer(method):
    """For methods that change attributes: Lightning's wrapper inherits them, but what it is given it keeps."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return method(self._itself(), *args, **kwargs)

    return call


class ZenFlowOptimizer(Optimizer):
    """AdamW that updates the gradient columns that matter at every step, and the rest on the host in the background.

    A drop-in for torch.optim.AdamW (arXiv 2505.12242). A parameter is a matrix [rows, columns]; the `topk_ratio` of
    its columns with the largest gradient norm are selected and updated at once, with fp32 masters and moments. The
    gradients of the others are collected for `update_interval` steps, applied by a multi-threaded AdamW on the host,
    and written back `update_delay` steps later.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; float32, bfloat16 or float16.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW; per group.
        topk_ratio: share of the columns that are selected, in [0, 1]; per group. A group with `split=False` is never
            split; that is read at a parameter's first gradient.
        update_interval: steps in a window, from one host update to the next. "auto": a window ends when the deferred
            gradients have added up to a selected column's; "fit": measured in some 40 steps, with update_delay, to be
            the smallest that hides the host update; then it stays, and is saved.
        select_interval: steps between selections, a multiple of update_interval; None means 16 windows. "epoch": once
            in `steps_per_epoch` steps.
        update_delay: steps from the end of a window until its update is visible, at most update_interval; 0 is
            synchronous. None means 1, "auto" is measured.
        auto_ratio: with update_interval="auto", the share of the parameters that must agree.
        max_update_interval: the longest window of "auto" and "fit".
        steps_per_epoch: calls of step() in an epoch, for select_interval="epoch".
        deferred_rule: "adamw" keeps exactly AdamW's moments; "mean" is the published rule, one update with the mean
            gradient.
        lookahead: deferred weights are written as they are expected to be this many steps later; "auto" is
            update_delay.
        full_warm_up_rounds: first steps that update every column at once.
        max_grad_norm: clips the global gradient norm inside step(), both halves alike; p.grad is left as it is.
        min_offload_numel: parameters with fewer elements, or fewer than two dimensions, are updated whole at every
            step.
        num_threads: threads of the host update; None: from the affinity mask, the cgroup quota and the other ranks of
            this host.
        pt_reserved_cores_perc: share of the cores that is left to torch when num_threads is None.
        host_buffer: "ring" keeps a window's gradients and updates in one pass; "stream" folds each in as it comes, in
            less memory; "auto" takes the first that fits. Equal bits.
        state_dtype: of the moments of deferred columns, in host memory. torch.bfloat16 takes 4 bytes less an element
            and a shorter update; each value is rounded up or down at random, so that small steps are not lost.
            Masters stay float32.
        skip_nonfinite: leave the whole step out if any gradient holds an Inf or NaN; counted in stats().
        offload_gradients: gradients of split parameters leave during backward and their memory is freed; same bits
            (docs/offload-gradients.md). To clip, use max_grad_norm; GradScaler is refused.
        gradient_accumulation_steps: with offload_gradients, how many backward passes make up a step: gradients leave in
            the last one. None: in each one, or as accumulate() says.

    Raises:
        ValueError: a value is out of its range, or an option of AdamW is not supported; the message says what to do.
        MemoryError: in the first step(), if the host does not have the memory; the message names the shortfall.

    After construction the weights change only inside step(), synchronize() and flush(), and in `with settled()` for
    its duration.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        *,
        topk_ratio=0.1,
        update_interval=4,
        select_interval=None,
        update_delay=None,
        auto_ratio=0.99,
        max_update_interval=16,
        steps_per_epoch=None,
        deferred_rule="adamw",
        lookahead="auto",
        full_warm_up_rounds=0,
        max_grad_norm=None,
        min_offload_numel=65536,
        num_threads=None,
        pt_reserved_cores_perc=0.5,
        host_buffer="auto",
        state_dtype="float32",
        skip_nonfinite=False,
        offload_gradients=False,
        gradient_accumulation_steps=None,
        maximize=False,
        **unsupported,
    ):
        reject_unsupported(unsupported, inspect.signature(ZenFlowOptimizer).parameters)
        if isinstance(params, torch.nn.Module):
            raise TypeError("params is a model: pass model.parameters()")
        settings = Settings(
            update_interval=update_interval,
            select_interval=select_interval,
            update_delay=update_delay,
            auto_ratio=auto_ratio,
            max_update_interval=max_update_interval,
            steps_per_epoch=steps_per_epoch,
            deferred_rule=deferred_rule,
            lookahead=lookahead,
            full_warm_up_rounds=full_warm_up_rounds,
            max_grad_norm=max_grad_norm,
            min_offload_numel=min_offload_numel,
            num_threads=num_threads,
            pt_reserved_cores_perc=pt_reserved_cores_perc,
            host_buffer=host_buffer,
            state_dtype=state_dtype,
            skip_nonfinite=skip_nonfinite,
            offload_gradients=offload_gradients,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "topk_ratio": topk_ratio,
            "split": True,
        }
        check_group(defaults)
        self._start(settings)
        super().__init__(params, defaults)

    @classmethod
    def from_deepspeed_config(cls, params, config, **overrides):
        """The optimizer that a DeepSpeed configuration describes, with the published rule (docs/from-deepspeed.md).

        Args:
            params: as for ZenFlowOptimizer.
            config: the configuration as a dict, or the path of a JSON file.
            overrides: settings of ZenFlowOptimizer that win over the configuration.

        Raises:
            ValueError: a key asks for what ZenFlow does not do, or is "auto" where only you know the number.

        One warning names what is not used.
        """
        settings, text = deepspeed_config.read(config, overrides)
        if text:
            warnings.warn(text, stacklevel=2)
        return cls(params, **settings)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            reject_unsupported({key: group[key] for key in UNSUPPORTED_OPTIONS if key in group})
            check_group(group)
            for p in group["params"]:
                check_parameter(p, self._name(p))
        except Exception:
            self.param_groups.pop()
            raise
        if self._offload:
            self._offload.follow()

    # Training

    @torch._disable_dynamo  # as torch does for its own: inside torch.compile a step runs as it is
    @torch.no_grad()
    def step(self, closure=None):
        """One step for every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient or parameter cannot be used (sparse, complex, meta, other dtype or device), or an
                earlier host update failed. Nothing has changed then.
            ValueError: a parameter's dtype is none of float32, bfloat16 and float16, or a group's topk_ratio is out of
                range. Nothing has changed then.
            MemoryError: the host does not have the memory for the state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_while_settled("step()")
        if devices.is_capturing():
            raise RuntimeError(
                "step() cannot be captured in a CUDA graph: part of it runs on the host. Capture forward and backward "
                "only, and call step() outside"
            )

        parameters = self._validated_gradients()
        if not self.state and is_asked_for_template():
            self._follow_changes()
            self._make_room(parameters)
            return loss
        if self._settings.skip_nonfinite and not self._all_finite(parameters):
            self._skipped_steps += 1
            if self._offload:
                self._offload.restart()
            return loss
        self._follow_changes()
        self._make_room(parameters)
        parameters += self._without_gradient(parameters)
        plan = self._plan()
        if self._offload:
            parameters = self._offload.fit(parameters, plan, self._store)
        self._lend_blocks(parameters, plan)
        self._commit(parameters, plan)
        if self._offload:
            self._offload.taken()
        if self._fit and plan.ends_window and not plan.warm_up:
            self._measure()
        return loss

    def _validated_gradients(self):
        """(p, index of its group, gradient) of all that have one, each once; raises before anything changes."""
        parameters = {}
        for index, group in enumerate(self.param_groups):
            check_layout(group)
            for p in group["params"]:
                gradient = self._offload.gradient_of(p) if self._offload else p.grad
                if gradient is None:
                    continue
                if not is_plain(p, gradient):
                    check_step(p, gradient, self._name(p))
                parameters[p] = index, gradient
        return [(p, index, gradient) for p, (index, gradient) in parameters.items()]

    def _without_gradient(self, parameters):
        """As _validated_gradients(), for all others that have state; also for those that no group holds at present:
        their windows end too."""
        if len(parameters) == len(self._store.records):
            return []
        with_gradient = {p for p, _, _ in parameters}
        return [(p, 0, None) for p in self._store.records if p not in with_gradient]

    def _all_finite(self, parameters):
        gradients = [gradient for _, _, gradient in parameters]
        return self._offload.all_finite(gradients, self._store) if self._offload else all_finite(gradients)

    def _make_room(self, parameters):
        """Gives state to parameters that have their first gradient; raises MemoryError before anything is allocated."""
        self._open_store()
        new = [p for p, _, _ in parameters if p not in self._store.records]
        if new:
            self._store.add(self._layout(new))

    def _open_store(self):
        if self._store is None:
            self._store = Store(self._settings, self._layout(), self.param_groups, self.state)

    def _store_in_backward(self):
        """The store, if gradients may go to it at once; None if only step() can bring it up to date."""
        if self._outdated or self._owes_training:
            return None
        self._open_store()
        return self._store

    def _plan(self):
        """What this step does. A window of automatic length ends by the norms of the steps before this one."""
        engine, settings = self._store.engine, self._settings
        if not settings.automatic:
            return settings.plan(engine.clock)
        self._store.use_current_streams()
        return settings.plan(engine.clock, engine.votes_to_end_window(settings.auto_ratio))

    def _lend_blocks(self, parameters, plan):
        """Memory for selected columns where this step selects: at its time, or at a parameter's first gradient."""
        if plan.warm_up:
            return
        records, engine = self._store.records, self._store.engine
        self._store.lend_blocks(
            (p, self.param_groups[group]["topk_ratio"])
            for p, group, gradient in parameters
            if records[p].split
            and gradient is not None
            and (plan.selects or not engine.has_selection(records[p].index))
        )

    def _commit(self, parameters, plan):
        """Everything that the step changes, in one native call: an interrupt falls before or after it."""
        records, rows, written, gradients = self._store.records, [], [], []
        for p, group, gradient in parameters:
            record = records[p]
            check_weight(p, record, self.param_groups)
            row = record.weight_row(p)
            if row[-1]:
                self._store.warn_of_another_optimizer(p)
            if gradient is None:
                rows.append((*row, 0, 0, None, group))
                if plan.publishes and record.split:
                    written.append(p)
                continue
            written.append(p)
            if isinstance(gradient, OffloadedGradient):
                rows.append((*row, 0, STAGED, None, group))
            else:
                gradient = record.gradient_of(gradient)
                gradients.append(gradient)  # until the call has queued what reads it
                rows.append((*row, address_of(gradient), DTYPE_CODES[gradient.dtype], strides_of(gradient), group))
        groups = [numbers_of(group) for group in self.param_groups]
        clip = self._settings.max_grad_norm or 0.0
        self._store.use_current_streams()
        seen = [p for p, _, _ in parameters]
        with engine_call(seen, records):
            self._store.engine.commit(rows, groups, plan.warm_up, plan.selects, plan.ends_window, clip)
            mark_written(written, seen, records)
        self._store.warn_of_pageable_memory()

    def _measure(self):
        """Where the schedule is measured: counts a window, and goes on under another one if that is due."""
        if self._fit.chosen:
            return
        store, stream = self._store, self._store.host_buffer == "stream"

        def fits(settings):
            return memory.growth_fits(self._layout(store.records), store.settings, settings, stream)

        if self._fit.observe(store.engine.report(), fits):
            self._follow_schedule()

    def zero_grad(self, set_to_none=True):
        """As in torch. With gradient_accumulation_steps, the next backward is the first of a step."""
        super().zero_grad(set_to_none)
        if self._offload:
            self._offload.restart()

    def accumulate(self):
        """With offload_gradients: a context for all of a step's backward passes but the last. Else it does nothing."""
        return self._offload.accumulating() if self._offload else contextlib.nullcontext()

    # Between steps

    @_on_the_optimizer
    @torch.no_grad()
    def synchronize(self):
        """Waits for the host update in flight and writes the settled masters into the parameters, without look-ahead.

        Idempotent. It changes the run: it counts as that update's publication.
        """
        self._refuse_while_settled("synchronize()")
        self._follow_changes()
        if self._store:
            self._store.write_weights(_C.Engine.synchronize)

    @_on_the_optimizer
    @torch.no_grad()
    def flush(self):
        """Closes the open window, so that no gradient is left out, then does as synchronize().

        Call it before a final save. Idempotent. It changes the run: the next step opens a new window.
        """
        self._refuse_while_settled("flush()")
        self._follow_changes()
        if self._store:
            self._store.write_weights(_C.Engine.flush)

    @_on_the_optimizer
    @contextlib.contextmanager
    def settled(self):
        """Shows the settled masters in the parameters; on leaving, puts the training weights back bit for bit.

        For evaluation, or for saving in mid-training. Only waits for the host: the run goes on as if it had not been
        called. What the caller changes inside stays changed.
        """
        self._follow_changes()
        if self._shows_settled or not self._store:
            yield self
            return
        self._shows_settled = self._owes_training = True
        try:
            self._store.write_weights(_C.Engine.show_settled)
            yield self
        finally:
            self._shows_settled = False
            self._follow_changes()

    def stats(self):
        """Times, volumes and memory so far, as a `zenflow.stats.Stats`."""
        return make_stats(self._settings, self._store, self._skipped_steps, self._fit)

    # Checkpoints

    @_on_the_optimizer
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

    @_on_the_optimizer
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
                "this is no optimizer's state dict (it lacks 'state' or 'param_groups'): is it the model's?"
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

    def _take_over(self, store, groups, outdated, fit):
        state = store.state if store else collections.defaultdict(dict)
        if self._offload:
            self._offload.bring_back()  # now, so that the old store can go
        # No call between these: an interrupt falls before all of them or after.
        self._store, self.state, self.param_groups = store, state, groups
        self._outdated, self._owes_training, self._fit = outdated, False, fit

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

    @staticmethod
    def _filled_store(settings, states, layout, clock, groups, *, keep_selection):
        store = Store(settings, layout, groups)
        imports = {p: (states[p], split) for p, split, _ in layout}
        store.import_states(imports, clock, keep_selection=keep_selection)
        return store

    # Small things

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

    @property
    def _settings(self):
        """Those in force."""
        return self._fit.settings if self._fit else self._requested

    def _new_fit(self, scalars):
        """The measuring of the schedule, if that is asked for: from its start, or as a checkpoint has chosen."""
        if not self._requested.measured:
            return None
        fit = ScheduleFit(self._requested)
        if scalars.get("fitted"):
            fit.keep(int(scalars["update_interval"]), int(scalars["update_delay"]))
        return fit

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

    def _name(self, p):
        return parameter_name(self.param_groups, p)
