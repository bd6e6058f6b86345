# SPDX-License-Identifier: Apache-2.0
"""ZenFlowOptimizer: AdamW whose deferred columns are updated by the host in the background.

`step()` is the algorithm: validate, make room, plan, commit. The native engine (src/engine.h) does the work and owns
the clock; `settings.py` says what a step does, `state.py` what a checkpoint holds, `tensors.py` how tensors become
addresses.
"""

import collections
import contextlib
import copy

import torch
from torch.optim import Optimizer

from zenflow import _C, memory
from zenflow import state as canonical
from zenflow.settings import UNSUPPORTED_OPTIONS, Settings, check_group, reject_unsupported, selected_count
from zenflow.stats import Counters, Stats, none_if_nan
from zenflow.tensors import (
    DTYPE_CODES,
    Record,
    all_finite,
    check_parameter,
    check_step,
    check_weight,
    is_plain,
    mark_written,
    strides_of,
)


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
            split.
        update_interval: steps in a window, from one host update to the next.
        select_interval: steps between selections, a multiple of update_interval; None means 16 windows.
        update_delay: steps from the end of a window until its update is visible, at most update_interval; 0 is
            synchronous.
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
        skip_nonfinite: leave the whole step out if any gradient holds an Inf or NaN; counted in stats().

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
        update_delay=1,
        deferred_rule="adamw",
        lookahead="auto",
        full_warm_up_rounds=0,
        max_grad_norm=None,
        min_offload_numel=65536,
        num_threads=None,
        pt_reserved_cores_perc=0.5,
        host_buffer="auto",
        skip_nonfinite=False,
        maximize=False,
        **unsupported,
    ):
        reject_unsupported(unsupported)
        self._settings = Settings(
            update_interval=update_interval,
            select_interval=select_interval,
            update_delay=update_delay,
            deferred_rule=deferred_rule,
            lookahead=lookahead,
            full_warm_up_rounds=full_warm_up_rounds,
            max_grad_norm=max_grad_norm,
            min_offload_numel=min_offload_numel,
            num_threads=num_threads,
            pt_reserved_cores_perc=pt_reserved_cores_perc,
            host_buffer=host_buffer,
            skip_nonfinite=skip_nonfinite,
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
        self._reset()
        super().__init__(params, defaults)

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

    # -- training
    # ---------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """One step for every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient or parameter cannot be used (sparse, complex, meta, other dtype or device), or an
            earlier host
                update failed. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_while_settled("step()")

        parameters = self._validated_parameters()
        if self._settings.skip_nonfinite and not all_finite(p.grad for p, _ in parameters if p.grad is not None):
            self._skipped_steps += 1
            return loss
        self._follow_changes()
        self._adopt([(p, group) for p, group in parameters if p not in self._records])
        plan = self._settings.plan(self._engine.clock)
        self._lend_blocks(parameters, plan)
        self._commit(parameters, plan)
        return loss

    def _validated_parameters(self):
        """(parameter, group index) of all that have state or a gradient, each once; raises before anything changes."""
        parameters = {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                gradient = p.grad
                if gradient is None:
                    if p in self._records:
                        parameters[p] = index
                    continue
                if not is_plain(p, gradient):
                    check_step(p, gradient, self._name(p))
                parameters[p] = index
        return list(parameters.items())

    def _commit(self, parameters, plan):
        """Everything that the step changes, in one native call: an interrupt falls before or after it."""
        groups = [
            (
                float(group["lr"]),
                float(group["betas"][0]),
                float(group["betas"][1]),
                float(group["eps"]),
                float(group["weight_decay"]),
                group["maximize"],
            )
            for group in self.param_groups
        ]
        rows, written = [], []
        for p, group in parameters:
            record, gradient = self._records[p], p.grad
            check_weight(p, record, self._name)
            row = record.weight_row(p)
            if gradient is None:
                rows.append((*row, 0, 0, None, group))
                if plan.publishes:
                    written.append(p)
            else:
                rows.append((*row, gradient.data_ptr(), DTYPE_CODES[gradient.dtype], strides_of(gradient), group))
                written.append(p)
        clip = self._settings.max_grad_norm or 0.0
        self._engine.commit(rows, groups, plan.warm_up, plan.selects, plan.ends_window, clip)
        mark_written(written, self._records)

    # -- what users call between steps
    # ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self):
        """Waits for the host update in flight and writes the settled masters into the parameters, without look-ahead.

        Idempotent. It changes the run: it counts as that update's publication.
        """
        self._refuse_while_settled("synchronize()")
        self._follow_changes()
        self._write_weights(_C.Engine.synchronize)

    @torch.no_grad()
    def flush(self):
        """Closes the open window, so that no gradient is left out, then does as synchronize(). Call it before a final
        save.

        Idempotent. It changes the run: the next step opens a new window.
        """
        self._refuse_while_settled("flush()")
        self._follow_changes()
        self._write_weights(_C.Engine.flush)

    @contextlib.contextmanager
    def settled(self):
        """Shows the settled masters in the parameters, for evaluation or saving, and puts the training weights back
        bit for bit.

        Only waits for the host: the run goes on as if it had not been called. What the caller changes inside stays
        changed.
        """
        if self._shows_settled:
            yield self
            return
        self._follow_changes()
        self._shows_settled = True
        try:
            self._write_weights(_C.Engine.show_settled)
            yield self
        finally:
            self._write_weights(_C.Engine.show_training)
            self._shows_settled = False

    def stats(self):
        """Times, volumes and memory so far, as a `zenflow.stats.Stats`."""
        report = None if self._engine is None else self._engine.report()
        records = self._records.values()
        return Stats(
            total=Counters(**report["total"]) if report else Counters(),
            last_window=Counters(**report["last_window"]) if report else Counters(),
            global_grad_norm=none_if_nan(report["gradient_norm"]) if report else None,
            selection_overlap=none_if_nan(report["selection_overlap"]) if report else None,
            skipped_steps=self._skipped_steps,
            update_interval=self._settings.update_interval,
            update_delay=self._settings.update_delay,
            host_buffer=self._host_buffer,
            host_bytes=self._engine.host_bytes if self._engine else 0,
            device_bytes=sum(t.nbytes for record in records for t in record.block or ()),
            parameters=len(self._records),
            split_parameters=sum(record.split for record in records),
        )

    def _write_weights(self, method):
        """Calls the engine with all weights, and takes what it wrote as ours."""
        if self._engine is None:
            return
        with torch.no_grad():
            method(self._engine, self._weight_rows())
            mark_written(self._records, self._records)

    def _weight_rows(self):
        for p, record in self._records.items():
            check_weight(p, record, self._name)
        return [(*record.weight_row(p), 0, 0, None, 0) for p, record in self._records.items()]

    def _refuse_while_settled(self, what):
        if self._shows_settled:
            raise RuntimeError(f"{what} inside `with optimizer.settled()`: leave the block first")

    # -- checkpoints
    # ------------------------------------------------------------------------------------------------------------

    def state_dict(self):
        """The canonical state (see `zenflow.state`), under torch's names where torch has them: loads into
        torch.optim.AdamW too.

        Only waits for the host: nothing changes, and nothing in it aliases the live state. Saved at any step,
        training resumes with the same bits. For AdamW nothing is missing after flush().
        """
        live = self.state, self.param_groups
        self.state, self.param_groups = self._canonical_state()
        try:
            return super().state_dict()
        finally:
            self.state, self.param_groups = live

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Replaces all state, the schedule's included, with a checkpoint of ZenFlowOptimizer or torch.optim.AdamW.

        Constructor settings win over the checkpoint's. Where update_interval, deferred_rule, min_offload_numel,
        topk_ratio or split differ, the saved window closes as by flush() at the next step, and columns are selected
        anew.

        Raises:
            ValueError, KeyError: the groups or shapes differ, or the state is of another optimizer. Nothing has
            changed then.
        """
        self._refuse_while_settled("load_state_dict()")
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_groups = copy.deepcopy(state_dict["param_groups"])
        canonical.check_groups(self.param_groups, saved_groups)
        by_id = {
            key: p
            for group, saved in zip(self.param_groups, saved_groups, strict=True)
            for p, key in zip(group["params"], saved["params"], strict=True)
        }
        states = {by_id[key]: state for key, state in state_dict["state"].items() if key in by_id}
        canonical.check_states(states, self._name)
        self._restore(states, saved_groups)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self):
        states, groups = self._canonical_state()
        return {"defaults": self.defaults, "state": states, "param_groups": groups, "_settings": self._settings}

    @torch.no_grad()
    def __setstate__(self, state):
        states, groups = state["state"], state["param_groups"]
        self._settings = state["_settings"]
        self._reset()
        super().__setstate__({**state, "state": collections.defaultdict(dict)})
        if states:
            self._restore(states, [dict(group) for group in groups])
        else:
            canonical.take_scalars(self.param_groups)

    def _canonical_state(self):
        """(states by parameter, parameter groups with the schedule's scalars), as state_dict() and pickle need them."""
        states, clock = {}, (0, 0, 0, 0)
        if self._engine is not None:
            self._follow_changes()
            self._engine.adopt_edits(self._weight_rows())
            states, clock = self._export_states(), self._engine.clock
        scalars = canonical.schedule_scalars(self._engine_settings, clock)
        return states, [{**group, **scalars} for group in self.param_groups]

    def _export_states(self):
        mean = self._engine_settings.deferred_rule == "mean"
        parameters = (p for group in self.param_groups for p in group["params"] if p in self._records)
        return {p: canonical.export_parameter(self._engine, self._records[p], mean) for p in parameters}

    def _restore(self, states, saved_groups):
        """Takes over checked states and groups. The engine runs under the checkpoint's schedule until its window has
        closed.
        """
        scalars = canonical.take_scalars(saved_groups)
        settings = canonical.saved_settings(self._settings, scalars)
        groups = canonical.merge_groups(self.param_groups, saved_groups)
        layout = {
            p: (saved.get("topk_ratio", group["topk_ratio"]), saved.get("split", group["split"]))
            for group, saved in zip(groups, saved_groups, strict=True)
            for p in group["params"]
        }
        outdated = settings != self._settings or any(
            layout[p] != (group["topk_ratio"], group["split"]) for group in groups for p in group["params"]
        )
        clock = canonical.saved_clock(states, scalars)
        imports = {p: (state, self._splits(p, layout[p][1], settings), layout[p][0]) for p, state in states.items()}
        self._replace_engine(settings, imports, clock, keep_selection=True)
        self._outdated = outdated
        self.param_groups = groups

    def _replace_engine(self, settings, imports, clock, keep_selection):
        """A fresh engine holding `imports`: (canonical state, split, topk_ratio) by parameter. On any error the old
        one stays.
        """
        host_buffer = memory.choose_host_buffer(
            self._settings.host_buffer, [(p, split, ratio) for p, (_, split, ratio) in imports.items()], settings
        )
        engine = self._make_engine(settings, host_buffer)
        records = {}
        for p, (state, split, ratio) in imports.items():
            records[p] = self._import(engine, settings, p, state, split, ratio, clock, keep_selection)
        engine.set_clock(*clock)
        self._engine, self._engine_settings, self._host_buffer = engine, settings, host_buffer
        self._records = records
        self.state.clear()
        self.state.update({p: {"step": record.step} for p, record in records.items()})

    def _import(self, engine, settings, p, state, split, ratio, clock, keep_selection):
        record = self._make_record(engine, p, split)
        record.version = None  # the weight may be another than the state's: look for edits at the next call
        selected = int(canonical.selected_mask(state, record).sum()) if keep_selection else 0
        nothing_to_select = selected_count(ratio, record.columns) == 0 and clock[2] > 0
        has_selection = split and keep_selection and (selected > 0 or nothing_to_select)
        if has_selection:
            self._lend(engine, record, p.device, selected)
        canonical.import_parameter(
            engine,
            record,
            p,
            state,
            mean=settings.deferred_rule == "mean",
            in_flight=clock[3] > 0,
            has_selection=has_selection,
        )
        return record

    @torch.no_grad()
    def _follow_changes(self):
        """Catches up with what changed between calls: a checkpoint of another schedule, a model moved to another
        dtype.
        """
        if self._engine is None:
            return
        for p, record in self._records.items():
            if record.dtype is not p.dtype and record.shape == p.shape:
                self._follow_dtype(p, record)
        if self._outdated:
            self._write_weights(_C.Engine.flush)
            states, groups = self._export_states(), {p: group for group in self.param_groups for p in group["params"]}
            imports = {
                p: (state, self._splits(p, groups[p]["split"], self._settings), groups[p]["topk_ratio"])
                for p, state in states.items()
            }
            self._outdated = False
            self._replace_engine(self._settings, imports, (self._engine.clock[0], 0, 0, 0), keep_selection=False)

    def _follow_dtype(self, p, record):
        check_parameter(p, self._name(p))
        engine, mean = self._engine, self._engine_settings.deferred_rule == "mean"
        state = canonical.follow_dtype(canonical.export_parameter(engine, record, mean), p)
        has_selection, in_flight = engine.has_selection(record.index), engine.in_flight(record.index)
        new = self._make_record(engine, p, record.split)
        new.version = None
        if has_selection:
            self._lend(engine, new, p.device, int(state["selected"].sum()))
        canonical.import_parameter(engine, new, p, state, mean=mean, in_flight=in_flight, has_selection=has_selection)
        engine.discard(record.index)
        self._records[p] = new

    # -- memory
    # -----------------------------------------------------------------------------------------------------------------

    def _adopt(self, new):
        """Gives state to parameters that have their first gradient; raises MemoryError before anything is allocated."""
        if not new and self._engine is not None:
            return
        trainable = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"] if p.requires_grad]
        entries = [
            (p, self._splits(p, self.param_groups[i]["split"], self._settings), self.param_groups[i]["topk_ratio"])
            for p, i in (new if self._engine is not None else trainable)
        ]
        wanted = self._host_buffer or self._settings.host_buffer
        host_buffer = memory.choose_host_buffer(wanted, entries, self._settings)
        if self._engine is None:
            self._engine = self._make_engine(self._settings, host_buffer)
            self._host_buffer = host_buffer
        for p, index in new:
            split = self._splits(p, self.param_groups[index]["split"], self._settings)
            self._records[p] = self._make_record(self._engine, p, split)

    def _make_record(self, engine, p, split):
        step = torch.tensor(0.0)  # the engine counts in it
        record = Record(engine.add(list(p.shape), DTYPE_CODES[p.dtype], split, step.data_ptr()), p, split, step)
        self.state[p] = {"step": step}
        record.remember(p)
        if not split:
            self._lend(engine, record, p.device, record.columns)
        return record

    @staticmethod
    def _splits(p, split, settings):
        return split and p.dim() >= 2 and p.numel() >= max(1, settings.min_offload_numel)

    def _lend_blocks(self, parameters, plan):
        """Memory for the columns that this step's selection will choose, where it takes another number than the
        last.
        """
        if plan.warm_up:
            return
        for p, index in parameters:
            record = self._records[p]
            if not record.split or p.grad is None or not (plan.selects or record.block is None):
                continue
            width = selected_count(self.param_groups[index]["topk_ratio"], record.columns)
            if record.block is None or record.block[0].shape[1] != width:
                self._lend(self._engine, record, p.device, width)

    def _lend(self, engine, record, device, width):
        """Brings memory for the selected columns; what the engine still uses is kept until it has taken the new block
        over.
        """
        block = tuple(torch.empty(record.rows, width, dtype=torch.float32, device=device) for _ in range(3))
        if not engine.has_lent_block(record.index):
            record.retiring = record.block
        record.block = block
        engine.lend(record.index, *(tensor.data_ptr() for tensor in block), width)

    @staticmethod
    def _make_engine(settings, host_buffer):
        return _C.Engine(
            mean=settings.deferred_rule == "mean",
            stream=host_buffer == "stream",
            update_interval=settings.update_interval,
            update_delay=settings.update_delay,
            lookahead=float(settings.lookahead),
            num_threads=settings.num_threads or 0,
            reserved_share=float(settings.pt_reserved_cores_perc),
            pin_threads=True,
        )

    # -- small things
    # -----------------------------------------------------------------------------------------------------------

    def _reset(self):
        self._engine = None
        self._engine_settings = self.__dict__.get("_settings")  # the engine's, until a loaded window has closed
        self._records = {}  # by parameter
        self._host_buffer = None
        self._outdated = False
        self._shows_settled = False
        self._skipped_steps = 0

    def _name(self, parameter):
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p is parameter:
                    return group["param_names"][j] if "param_names" in group else f"parameter {j} of group {i}"
        return "a parameter"
