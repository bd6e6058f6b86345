# SPDX-License-Identifier: Apache-2.0
"""ZenFlowOptimizer: AdamW whose deferred columns are updated by the host in the background.

`step()` is the algorithm: validate, make room, plan, commit. The native engine (src/engine.h) does the work and owns
the clock; `settings.py` says what a step does, `tensors.py` how tensors become addresses. What else an optimizer has to
do it inherits: `following.py` keeps up with what users change between two calls, `checkpoints.py` saves and loads.
"""

import contextlib
import inspect
import warnings

import torch

from zenflow import _C, deepspeed_config, devices, memory
from zenflow.checkpoints import CheckpointedOptimizer
from zenflow.following import on_the_optimizer
from zenflow.offloaded_gradient import OffloadedGradient, in_memory
from zenflow.settings import (
    UNSUPPORTED_OPTIONS,
    Settings,
    check_group,
    check_layout,
    likely_typos,
    numbers_of,
    reject_unsupported,
)
from zenflow.stats import make_stats
from zenflow.store import Store
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
    strides_of,
)


class ZenFlowOptimizer(CheckpointedOptimizer):
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
            less memory; "auto" takes the first that fits. Equal bits, but with bfloat16 moments.
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
        for key, meant in likely_typos(group).items():
            warnings.warn(f"nothing reads {key!r} of a parameter group: did you mean {meant!r}?", stacklevel=2)
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
                gradient = self._offload.gradient_of(p) if self._offload else in_memory(p.grad)
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

    @on_the_optimizer
    @torch.no_grad()
    def synchronize(self):
        """Waits for the host update in flight and writes the settled masters into the parameters, without look-ahead.

        Idempotent. It changes the run: it counts as that update's publication.
        """
        self._refuse_while_settled("synchronize()")
        self._follow_changes()
        if self._store:
            self._store.write_weights(_C.Engine.synchronize)

    @on_the_optimizer
    @torch.no_grad()
    def flush(self):
        """Closes the open window, so that no gradient is left out, then does as synchronize().

        Call it before a final save. Idempotent. It changes the run: the next step opens a new window.
        """
        self._refuse_while_settled("flush()")
        self._follow_changes()
        if self._store:
            self._store.write_weights(_C.Engine.flush)

    @on_the_optimizer
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
