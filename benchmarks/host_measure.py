# SPDX-License-Identifier: Apache-2.0
"""What is measured of the host's kernels: which sizes, forms and threads, in turns with their ceilings and peers."""

import gc
from dataclasses import dataclass

import torch

from host_cases import CEILING, CallerWork, Form, Update
from host_peers import Peers
from timing import Ratio, Times, interleaved
from zenflow import _C

CPU = torch.device("cpu")
MEMORY_BOUND = 10_000_000  # elements from which on no cache holds the arrays
FP32, WINDOW = Form(), Form("bf16", 4)
OTHER_FORMS = (
    Form("fp32", 4),
    Form("bf16", 1),
    Form("bf16", 8),
    Form("fp16", 4),
    Form("fp32", 4, "mean"),
    Form("bf16", 4, "mean"),
)


@dataclass
class Record:
    """One workload's measurements: {call: Times} of as many rounds each, and bytes of its kernels."""

    what: str
    elements: int
    threads: int
    times: dict[str, Times]
    bytes: dict[str, int]

    def ceiling(self, name):
        return next(times for call, times in self.times.items() if call.startswith(f"{name}, {CEILING}"))

    def share(self, call, name=None):
        """Of the ceiling: 1 is as fast as memory allows."""
        return Ratio.of(self.ceiling(name or call.partition(",")[0]), self.times[call])

    def plain(self):
        times = {call: t.summary() for call, t in self.times.items()}
        return {
            "what": self.what,
            "elements": self.elements,
            "threads": self.threads,
            "bytes": self.bytes,
            "calls": times,
        }


class Session:
    """Measures one workload after the other, and keeps the reasons why some were left out."""

    def __init__(self, args, deepspeed):
        self.args, self.deepspeed = args, deepspeed
        available = _C.config()["isa_available"]
        self.isas = [isa for isa in available if isa != "scalar"] or available  # scalar code is there for its results
        self.left_out = []

    def _fits(self, what, elements, bytes_per_element):
        needed, free = elements * bytes_per_element, _C.available_host_bytes()
        if needed <= 0.95 * free:
            return True
        self.left_out.append(
            f"{what}, {elements:,} elements: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
        return False

    def _measure(self, calls, elements):
        repetitions = self.args.repetitions or min(25, max(9, round(1.5e9 / elements)))
        inner = self.args.inner or max(1, int(2e6 // elements))
        warm_up = 1 if elements > MEMORY_BOUND else 3
        return interleaved(calls, CPU, repetitions=repetitions, inner=inner, warm_up=warm_up)

    def update(self, form, elements, threads, peers=True):
        """The update of a window beside its ceilings and, if `peers`, other optimizers' steps."""
        needed = form.bytes_per_element() + (Peers.bytes_per_element if peers else 0)
        if not self._fits(str(form), elements, needed):
            return []
        self._say(f"{form}, {elements:,} elements, {threads} threads")
        torch.set_num_threads(threads)
        work = Update(form, elements, threads)
        calls = work.calls(self.isas)
        if peers:
            calls |= Peers(work.elements, self.deepspeed).calls
        record = Record(str(form), work.elements, threads, self._measure(calls, work.elements), work.bytes())
        del work, calls
        gc.collect()
        return [record]

    def caller(self, dtype, elements, threads):
        form = Form(dtype, 4)
        what = f"calling thread, {dtype}"
        if not self._fits(what, elements, form.bytes_per_element() + 2 * 4 + 4):
            return []
        self._say(f"{what}, {elements:,} elements, {threads} threads")
        torch.set_num_threads(threads)
        work = CallerWork(dtype, elements, threads)
        return [
            Record(what, work.gradient.numel(), threads, self._measure(work.calls(self.isas), elements), work.bytes())
        ]

    def sizes(self, form, threads):
        """One form in all memory-bound sizes at once, in turns, so that their costs can be compared."""
        sizes = [n for n in self.args.sizes if n >= MEMORY_BOUND] or self.args.sizes
        while sizes and not self._fits(f"{form}, all sizes at once", sum(sizes), form.bytes_per_element()):
            sizes = sizes[:-1]
        self._say(f"{form}, sizes in turns, {threads} threads")
        work = {n: Update(form, n, threads) for n in sizes}
        calls = {}
        for n, update in work.items():
            times = max(1, min(8, sizes[-1] // n))  # small ones more than once, to be measured as well

            def call(update=update, times=times):
                for _ in range(times):
                    update.native.update(stream=False, isa=self.isas[-1])

            calls[str(n)] = call
        measured = interleaved(calls, CPU, repetitions=self.args.repetitions or 9, inner=1, warm_up=1)
        records = []
        for n, update in work.items():
            times = max(1, min(8, sizes[-1] // n))
            seconds = Times(tuple(s / times for s in measured[str(n)].seconds))
            records.append(
                Record(f"{form}, sizes in turns", update.elements, threads, {"ring": seconds}, update.bytes())
            )
        return records

    def _say(self, what):
        print(f"  {what}", flush=True)

    def all(self):
        """All records; after an interrupt, those that were finished."""
        records = []
        try:
            for some in self._workloads():
                records += some
        except KeyboardInterrupt:
            self.left_out.append("what was to follow: the run was interrupted")
        return records

    def _workloads(self):
        args = self.args
        for elements in args.sizes:
            for threads in args.threads:
                for form in (FP32, WINDOW):
                    yield self.update(form, elements, threads)
        for threads in args.threads:
            for form in OTHER_FORMS:
                yield self.update(form, args.form_size, threads, peers=False)
            for dtype in ("bf16", "fp32"):
                yield self.caller(dtype, args.form_size, threads)
        for form in (FP32, WINDOW):
            yield self.sizes(form, args.threads[-1])
