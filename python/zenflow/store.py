# SPDX-License-Identifier: Apache-2.0
"""Store: the native engine together with what Python knows of each parameter in it.

Makes room for parameters, lends memory to the engine, and moves whole states in and out.
Not for: when a step does what (optimizer.py), nor what a state looks like (state.py).
"""

import collections
import warnings
import weakref

import torch

from zenflow import _C, devices, memory
from zenflow import state as canonical
from zenflow.sizes import is_split, selected_count
from zenflow.tensors import (
    DTYPE_CODES,
    Record,
    check_parameter,
    check_weight,
    engine_call,
    mark_written,
    parameter_name,
    parameter_position,
)

_stores = weakref.WeakSet()  # of all optimizers


def splits(p, split, settings):
    """Whether p, in a group with this `split`, has deferred columns."""
    return split and is_split(p.shape, settings)


class Store:
    """An engine that runs under `settings`, and its parameters.

    Args:
        settings: fixed for the engine's life.
        expected: (p, split, topk_ratio) of the parameters that are to be held, for the choice of the host buffer.
        groups: the optimizer's parameter groups, for names in messages.
        state: becomes the optimizer's `state`, for those who look: the step counts; everything else is in state_dict().

    Raises:
        MemoryError: the host does not have the memory; nothing was allocated.
    """

    def __init__(self, settings, expected, groups, state=None):
        self.settings = settings
        self.mean = settings.deferred_rule == "mean"
        self.host_buffer = memory.choose_host_buffer(settings.host_buffer, expected, settings)
        self.records = {}  # by parameter
        self._prepared = {}  # records of parameters that no step has seen yet
        self._device_memory = {}  # of each GPU
        self._warned = False
        self._warned_of_another = False
        self._engine_devices = {None: 0}  # the engine's number of each device
        self.state = collections.defaultdict(dict) if state is None else state
        self._groups = groups
        _stores.add(self)
        self.engine = _C.Engine(
            mean=self.mean,
            stream=self.host_buffer == "stream",
            update_interval=settings.longest_interval,
            update_delay=settings.update_delay,
            lookahead=float(settings.lookahead),
            automatic=settings.automatic,
            moments=DTYPE_CODES[getattr(torch, settings.state_dtype)],
            num_threads=settings.num_threads or 0,
            reserved_share=float(settings.pt_reserved_cores_perc),
            pin_threads=True,
        )

    def add(self, parameters):
        """Makes records for (p, split, topk_ratio) triples; the engine reads their weights in its next call."""
        memory.choose_host_buffer(self.host_buffer, parameters, self.settings)
        for p, split, _ in parameters:
            record = self._prepared.get(p)
            self._keep(p, record if record and record.is_for(p) else self._make_record(p, split))
            self._prepared.pop(p, None)  # last: until then what is staged for p is found under it

    def drop(self, parameters):
        """Frees the state of these parameters; what they owe is lost."""
        for p in parameters:
            record = self.records.pop(p)
            self.state.pop(p, None)
            self.engine.discard(record.index)

    def prepare(self, p, split, topk_ratio):
        """p's record; a new one, for a gradient that no step has taken yet, is none of the optimizer's state."""
        record = self.record_of(p)
        if record is None:
            memory.choose_host_buffer(self.host_buffer, [(p, split, topk_ratio)], self.settings)
            record = self._prepared[p] = self._make_record(p, split)
        return record

    def record_of(self, p):
        return self.records.get(p) or self._prepared.get(p)

    def lend_blocks(self, parameters):
        """Memory for the columns that the next step selects, for (p, topk_ratio) pairs whose number of them is new."""
        for p, ratio in parameters:
            record = self.record_of(p)
            width = selected_count(ratio, record.columns)
            if self.engine.next_width(record.index) != width:
                self._lend(record, width)

    def use_current_streams(self):
        """Orders the engine's next call with torch's work on each GPU."""
        for device in self._device_memory:
            self.engine.use_stream(self._engine_devices[device], devices.current_stream(device))

    def warn_of_pageable_memory(self):
        """Says once that page-locking was refused."""
        if self._warned or not self.engine.refuses_page_locks():
            return
        self._warned = True
        warnings.warn(
            "zenflow: the system refused to page-lock host memory, so copies to and from the GPU are slower (results "
            "are the same). Raise the limit: ulimit -l unlimited, or LimitMEMLOCK / --ulimit memlock=-1",
            stacklevel=8,
        )

    def device_bytes(self):
        """Memory held on parameters' devices: for selected and unsplit columns, and for what is on its way."""
        blocks = sum(tensor.nbytes for r in self.records.values() for block in r.blocks for tensor in block)
        return blocks + sum(memory.held() for memory in self._device_memory.values())

    def weight_rows(self):
        """A row for each weight, as the engine's calls between steps take them."""
        self.use_current_streams()
        for p, record in self.records.items():
            check_weight(p, record, self._groups)
        return [(*record.weight_row(p), 0, 0, None, 0) for p, record in self.records.items()]

    @torch.no_grad()
    def write_weights(self, method):
        """Calls one of the engine's methods that write all weights, and takes what it wrote as ours."""
        rows = self.weight_rows()
        with engine_call(self.records, self.records):
            method(self.engine, rows)
            mark_written([p for p, record in self.records.items() if record.split], self.records, self.records)

    def follow_schedule(self, settings):
        """Goes on under another interval and delay, between two windows. It counts as a publication."""
        self.write_weights(_C.Engine.synchronize)
        self.engine.set_schedule(settings.longest_interval, settings.update_delay, float(settings.lookahead))
        self.settings = settings  # an interrupt before this: the next call does it again

    def export_states(self):
        """Canonical states by parameter, edits of the user taken over; waits for the host and changes nothing else."""
        self._adopt_edits()
        return {p: canonical.export_parameter(self.engine, record, self.settings) for p, record in self.records.items()}

    def export_masters(self, parameters):
        """{p: settled master} of those that have state; for the rest as export_states()."""
        self._adopt_edits()
        known = (p for p in parameters if p in self.records)
        return {p: canonical.export_parameter(self.engine, self.records[p], self.settings)["master"] for p in known}

    def _adopt_edits(self):
        rows = self.weight_rows()
        with engine_call(self.records, self.records):
            self.engine.adopt_edits(rows)

    def import_states(self, states, clock, *, keep_selection):
        """Takes over (canonical state, split) by parameter, and the clock. The store must be empty."""
        for p, (state, split) in states.items():
            record = self._make_record(p, split, canonical.saved_dtype(state, p))
            has_selection = split and keep_selection and canonical.has_selection(state)
            selected = int(canonical.selected_mask(state, record).sum()) if has_selection else 0
            in_flight = has_selection and clock[3] > 0  # what has no selection yet was published at once
            self._import(p, record, state, selected, has_selection=has_selection, in_flight=in_flight)
            self._keep(p, record)
        self.engine.set_clock(*clock)

    @torch.no_grad()
    def follow_moves(self, shows_settled):
        """Gives parameters that the user moved to another device or dtype a state for it.

        If the weights may be the settled ones, moved ones get their training weights back, but for edits. Returns
        whether there were any.
        """
        moved = [p for p, r in self.records.items() if not r.is_for(p) and p.shape == r.shape and not p.is_meta]
        for p in moved:
            check_parameter(p, parameter_name(self._groups, p))
        if moved:
            self.use_current_streams()
        for p in moved:
            old = self.records[p]
            state = canonical.export_parameter(self.engine, old, self.settings)
            state = canonical.follow_move(state, p, shows_settled)
            kept = {
                "has_selection": self.engine.has_selection(old.index),
                "in_flight": self.engine.in_flight(old.index),
            }
            record = self._make_record(p, old.split)
            self._import(p, record, state, int(state["selected"].sum()), **kept)
            self._keep(p, record)
            self.engine.discard(old.index)
        return bool(moved)

    def shares(self, p):
        """Whether another optimizer has state for p too."""
        return any(p in store.records for store in list(_stores) if store is not self)

    def warn_of_another_optimizer(self, p):
        """Says once that another optimizer was the last to write p, if that loses updates: its writes are edits."""
        if self._warned_of_another or self.settings.update_delay == 0 or self.records[p].version is None:
            return
        others = [store.records.get(p) for store in list(_stores) if store is not self]
        if not any(record and record.version == p._version for record in others):
            return
        self._warned_of_another = True
        warnings.warn(
            f"zenflow: another ZenFlowOptimizer also updates {parameter_name(self._groups, p)}. Each takes the other's "
            "writes for edits of yours, which win over host updates in flight. Give each parameter to one optimizer, "
            "or set update_delay=0 in both",
            stacklevel=8,
        )

    def _keep(self, p, record):
        self.state[p] = canonical.live_state(record.step, self.settings)
        self.records[p] = record  # last: what an interrupt leaves without a record gets a new one

    def _make_record(self, p, split, dtype=None):
        """For p, or for a state of it from when it had another dtype: follow_moves() brings that up to date."""
        dtype = dtype or p.dtype
        step = torch.tensor(0.0, dtype=torch.float32, device="cpu")  # the engine counts in it
        device = self._engine_device(devices.device_of(p))
        seed = parameter_position(self._groups, p)
        index = self.engine.add(list(p.shape), DTYPE_CODES[dtype], split, step.data_ptr(), device, seed)
        record = Record(index, p, split, step, dtype)
        record.remember(p)
        if not split:
            self._lend(record, record.columns)
        return record

    def _engine_device(self, device):
        if device not in self._engine_devices:
            memory = devices.DeviceMemory(device)
            self._engine_devices[device] = self.engine.add_cuda_device(device, memory)
            self._device_memory[device] = memory
            self.use_current_streams()
        return self._engine_devices[device]

    def _lend(self, record, width):
        """The block in use is kept: the engine leaves it when its next call takes the new one over."""
        block = tuple(devices.empty((record.rows, width), record.device) for _ in range(3))
        in_use = self.engine.block_in_use(record.index)
        record.blocks = [b for b in record.blocks if b[0].data_ptr() == in_use] + [block]
        self.engine.lend(record.index, *(tensor.data_ptr() for tensor in block), width)

    def _import(self, p, record, state, selected, *, has_selection, in_flight):
        if has_selection:
            self._lend(record, selected)
        record.forget()  # the weight may be another than the state's: edits are looked for at the next call
        canonical.import_parameter(
            self.engine, record, p, state, mean=self.mean, in_flight=in_flight, has_selection=has_selection
        )
