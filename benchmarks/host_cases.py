# SPDX-License-Identifier: Apache-2.0
"""The host's work piece by piece, each with the ceiling of its bytes: a window's update, and the calling thread's work.

The memory, the threads and the jobs are those that the engine would use (zenflow._C.host). A ceiling is a STREAM-like
loop over the same arrays with the same threads. Stores are ordinary or go past the caches, and some number of elements
is taken from one stream after the other: of all such loops the one that is fastest here counts.
"""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import reference
from host_peers import fill
from timing import measure_once
from zenflow import _C
from zenflow.tensors import DTYPE_CODES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = 4096
STORES = {"ordinary": "NOTHING", "streamed outputs": "WRITTEN", "all streamed": "EVERYTHING"}
PATTERNS = {
    f"{stores}, runs of {run}": {"bypass": getattr(_C.host.Bypass, name), "run": run}
    for stores, name in STORES.items()
    for run in (32, 128, 512)
}
CEILING = "ceiling"  # of a name of a call: f"{name}, {CEILING}: {kind of stores}"


@dataclass(frozen=True)
class Form:
    """What one window's update works on."""

    dtype: str = "fp32"  # of the parameter and its gradients
    interval: int = 1
    rule: str = "adamw"
    state: str = "fp32"  # of the moments

    def __str__(self):
        notes = [", mean"] * (self.rule == "mean") + [f", {self.state} moments"] * (self.state != "fp32")
        return f"{self.dtype}, S={self.interval}{''.join(notes)}"

    def bytes_per_element(self):
        """Of the arrays, and of the weight that they are made from."""
        item = DTYPES[self.dtype].itemsize
        return 4 + 2 * DTYPES[self.state].itemsize + (3 + self.interval) * item + (4 if self.rule == "mean" else 0)


def tensor_at(address, elements, dtype):
    return torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(address), dtype=dtype)


def shape_of(elements):
    columns = min(COLUMNS, elements)
    return max(1, round(elements / columns)), columns


def fastest(name, loops, tries=4):
    """The ceiling of `name`, {what to call it: it}: of loops that move the same bytes, the fastest."""

    def shortest(kind):
        return min(measure_once(loops[kind], torch.device("cpu"), 1) for _ in range(tries))

    best = min(loops, key=shortest)
    return {f"{name}, {CEILING}: {best}": loops[best]}


class Update:
    """A parameter with all columns deferred, and the update of its window."""

    def __init__(self, form, elements, threads, selection=()):
        self.form = form
        self.rows, self.columns = shape_of(elements)
        dtype = DTYPES[form.dtype]
        self.weight = torch.empty(self.rows * self.columns, dtype=dtype)
        fill(self.weight)
        code = DTYPE_CODES[dtype]
        self.native = _C.host.Benchmark(
            weight=self.weight.data_ptr(),
            rows=self.rows,
            columns=self.columns,
            selection=list(selection),
            dtype=code,
            gradient_dtype=code,
            moments=DTYPE_CODES[DTYPES[form.state]],
            interval=form.interval,
            mean=form.rule == "mean",
            threads=threads,
        )
        self.elements = self.rows * (self.columns - len(selection))
        for lane in self.arrays()["lanes"]:
            fill(lane)
        fill(self.arrays()["exp_avg"])
        fill(self.arrays()["exp_avg_sq"], square=True)

    def arrays(self):
        """The host arrays as tensors."""
        found = self.native.arrays()
        dtype = DTYPES[self.form.dtype]
        arrays = {"lanes": [tensor_at(address, self.elements, dtype) for address in found.pop("lanes")]}
        arrays["written"] = tensor_at(found.pop("written"), self.elements, dtype)
        arrays["master"] = tensor_at(found.pop("master"), self.elements, torch.float32)
        state = DTYPES[self.form.state]
        return arrays | {name: tensor_at(address, self.elements, state) for name, address in found.items()}

    def names(self):
        """Of the forms of the update; one gradient is no window."""
        return {"ring": False} if self.form.interval == 1 else {"ring": False, "stream": True}

    def calls(self, isas):
        calls = {}
        for name, stream in self.names().items():
            for isa in isas:
                calls[f"{name}, {isa}"] = lambda s=stream, i=isa: self.native.update(stream=s, isa=i)
            loops = {
                kind: lambda s=stream, p=pattern: self.native.update_ceiling(stream=s, **p)
                for kind, pattern in PATTERNS.items()
            }
            calls |= fastest(name, loops)
        return calls

    def bytes(self):
        return {name: self.native.update_bytes(stream=stream) for name, stream in self.names().items()}


class CallerWork:
    """What the calling thread does in a step for one parameter, a tenth of whose columns are selected."""

    def __init__(self, dtype, elements, threads):
        self.form = Form(dtype, 4)
        columns = shape_of(elements)[1]
        selection = torch.randperm(columns, generator=torch.Generator().manual_seed(0))[: columns // 10]
        self.deferred = torch.ones(columns, dtype=torch.bool).index_fill_(0, selection, False)
        self.update = Update(self.form, elements, threads, selection.sort().values.tolist())
        self.native, self.weight = self.update.native, self.update.weight
        self.gradient = torch.empty_like(self.weight)
        fill(self.gradient)
        self.native.update(stream=False, isa=_C.config()["isa"])

    def calls(self, isas):
        native, weight, gradient = self.native, self.weight.data_ptr(), self.gradient.data_ptr()
        calls = {
            "host update": lambda: native.update(stream=False, isa=isas[-1]),
            "pack": lambda: native.pack(gradient),
            "norms": lambda: native.norms(gradient),
            "publish": lambda: native.publish(weight),
            "find edits": lambda: native.find_edits(weight),
            "pack and selected AdamW": lambda: native.apply(weight, gradient),
        }
        loops = {kind: lambda p=pattern: native.copy(gradient, **p) for kind, pattern in PATTERNS.items()}
        return calls | fastest("copy", loops)

    def bytes(self):
        """Of each call, read and written once; a copy's are those of the whole gradient."""
        whole, item = self.gradient.nbytes, self.gradient.itemsize
        deferred = self.update.elements * item
        return {
            "copy": 2 * whole,
            "pack": 2 * whole,
            "norms": whole,
            "publish": 4 * deferred,  # the weight, what it should hold and what it shall; and the weight again
            "find edits": 2 * deferred,
        }


def check():
    """Raises if the benchmarked calls and the reference arithmetic disagree, in any form, dtype or instruction set."""
    for dtype in DTYPES:
        for form in (Form(dtype), Form(dtype, 3), Form(dtype, 3, "mean")):
            for isa in _C.config()["isa_available"]:
                _check_update(form, isa)
        _check_caller(dtype)


def _check_update(form, isa):
    for name, stream in Update(form, 97, 1).names().items():
        update = Update(form, 5 * 97, 2)
        before = {key: value.clone() for key, value in update.arrays().items() if key != "lanes"}
        expected = _expected(form, before, [lane.float() for lane in update.arrays()["lanes"]])
        update.native.update(stream=stream, isa=isa)
        _compare(update, expected, f"{form}, {name}, {isa}")
        for pattern in PATTERNS.values():  # which leave the state as it is
            update.native.update_ceiling(stream=stream, **pattern)
        del expected["written"]
        _compare(update, expected, f"{form}, {name}, {isa}, after the ceilings")


def _compare(update, expected, what):
    for key, value in expected.items():
        if not reference.same_bits(update.arrays()[key], value).all():
            sys.exit(f"{key} ({what}) is not what the reference says: nothing was measured")


def _expected(form, state, lanes):
    """One window by tests/reference.py; the settings are those of host_benchmark.cpp."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    last = reference.Gradient(None, 1e-5, 0.9, 0.999, 1e-8, 0.01)
    counts, lr_sum, keep = [form.interval], last.lr, 1 - last.lr * last.weight_decay
    if form.rule == "mean":
        total = torch.zeros_like(m)
        for g in lanes:
            total = total + g
        m, v = reference.fold(m, v, total / len(lanes), last.beta1, last.beta2)
        counts = [1]
    else:
        lr_sum, keep = 0.0, 1.0
        for g in lanes:
            m, v = reference.fold(m, v, g, last.beta1, last.beta2)
            lr_sum, keep = lr_sum + last.lr, keep * (1 - last.lr * last.weight_decay)
    master, shown = reference.move(state["master"], m, v, counts, last, lr_sum, keep, 1)
    return {"master": master, "exp_avg": m, "exp_avg_sq": v, "written": shown.to(DTYPES[form.dtype])}


def _check_caller(dtype):
    work = CallerWork(dtype, 40 * COLUMNS, 2)
    gradient, weight = work.gradient.data_ptr(), work.weight.data_ptr()
    work.native.pack(gradient)
    packed = work.gradient.view(work.update.rows, -1)[:, work.deferred]
    if not torch.equal(work.update.arrays()["lanes"][0], packed.flatten()):
        sys.exit(f"packed {dtype} gradients are not the deferred columns: nothing was measured")
    for _ in range(2):  # a publication swaps arrays, and the next update has to know
        work.native.update(stream=False, isa=_C.config()["isa"])
        written = work.update.arrays()["written"].clone()
        work.native.publish(weight)
        if not torch.equal(work.weight.view(work.update.rows, -1)[:, work.deferred].flatten(), written):
            sys.exit(f"published {dtype} weights are not what the update wrote: nothing was measured")
