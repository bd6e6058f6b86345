# SPDX-License-Identifier: Apache-2.0
"""The targets of the host's speed, each a ratio with its limit, and what a run's records say of them.

A target is judged at its worst memory-bound size, by the median; a ratio comes with its 10 and 90 % quantiles.
"""

from dataclasses import dataclass

from host_measure import FP32, MEMORY_BOUND, WINDOW
from host_peers import DEEPSPEED_LABEL, TORCH
from timing import Ratio

AT_LEAST, AT_MOST = "at least", "at most"


@dataclass(frozen=True)
class Verdict:
    target: str
    what: str
    threads: int
    limit: str
    ratio: Ratio | None  # None: not measured
    elements: int
    holds: bool | None

    def row(self):
        said = {True: "holds", False: "MISSED", None: "not measured"}[self.holds]
        at = f"{self.elements:,}" if self.ratio else ""
        return [self.target, self.what, self.threads, self.limit, self.ratio or "", at, said]

    def plain(self):
        ratio = self.ratio and {"median": self.ratio.median, "low": self.ratio.low, "high": self.ratio.high}
        fields = {"target": self.target, "what": self.what, "threads": self.threads, "limit": self.limit}
        return fields | {"ratio": ratio, "elements": self.elements, "holds": self.holds}


def judge(target, what, threads, side, limit, ratios):
    """The verdict on (elements, ratio) of several sizes: the worst counts."""
    words = f"{side} {limit:g}"
    ratios = [(n, r) for n, r in ratios if r is not None]
    if not ratios:
        return Verdict(target, what, threads, words, None, 0, None)
    worst = (min if side == AT_LEAST else max)(ratios, key=lambda pair: pair[1].median)
    holds = worst[1].median >= limit if side == AT_LEAST else worst[1].median <= limit
    return Verdict(target, what, threads, words, worst[1], worst[0], holds)


class Judge:
    def __init__(self, records, isas):
        self.records, self.isas, self.best = records, isas, isas[-1]
        largest = max(r.elements for r in records)
        self.from_size = min(MEMORY_BOUND, largest) * 0.9  # sizes are rounded to whole rows

    def _of(self, what, threads):
        return [
            r for r in self.records if r.what == str(what) and r.threads == threads and r.elements >= self.from_size
        ]

    def _row(self, target, words, what, threads, side, limit, ratio):
        return judge(target, words, threads, side, limit, [(r.elements, ratio(r)) for r in self._of(what, threads)])

    def all(self):
        counts = sorted({r.threads for r in self.records})
        rows = [row for t in counts for row in self.single_step(t)]
        rows += [row for t in counts for row in self.window(t)]
        rows += [row for t in counts for row in self.instruction_sets(t)]
        rows += [row for form in (FP32, WINDOW) for row in self.flat(form, counts[-1])]
        return rows + [row for t in counts for row in self.calling_thread(t)]

    def single_step(self, threads):
        ours = f"ring, {self.best}"
        for peer in (DEEPSPEED_LABEL, TORCH):
            yield self._row(
                "1", f"{FP32}: {peer} / ours", FP32, threads, AT_LEAST, 1.0, lambda r, p=peer: _ratio(r, p, ours)
            )
        yield self._row("1", f"{FP32}: share of ceiling", FP32, threads, AT_LEAST, 0.9, lambda r: r.share(ours))

    def window(self, threads):
        ring, stream = f"ring, {self.best}", f"stream, {self.best}"

        def row(words, limit, ratio):
            return self._row("2", f"{WINDOW}: {words}", WINDOW, threads, AT_LEAST, limit, ratio)

        yield row("stream / ring", 1.8, lambda r: _ratio(r, stream, ring))
        yield row("ring, share of ceiling", 0.85, lambda r: r.share(ring))
        yield row("stream, share of ceiling", 0.85, lambda r: r.share(stream))
        yield row(f"4 steps of {DEEPSPEED_LABEL} / ring", 3.0, lambda r: _ratio(r, DEEPSPEED_LABEL, ring, 4))

    def instruction_sets(self, threads):
        if "avx512" not in self.isas:
            return
        for form in (FP32, WINDOW):
            yield self._row(
                "3",
                f"{form}: speed of avx2 / of avx512",
                form,
                threads,
                AT_LEAST,
                0.8,
                lambda r: _ratio(r, "ring, avx512", "ring, avx2"),
            )

    def flat(self, form, threads):
        what = f"{form}, sizes in turns"
        records = [r for r in self.records if r.what == what and r.threads == threads]
        if len(records) < 2:
            yield Verdict("4", f"{form}: cost per parameter by size", threads, f"{AT_MOST} 1.1", None, 0, None)
            return
        base = records[0]
        costs = [(r, Ratio.of(r.times["ring"], base.times["ring"], base.elements / r.elements)) for r in records[1:]]
        words = f"{form}: cost per parameter / that of {base.elements:,}"
        yield judge("4", words, threads, AT_MOST, 1.1, [(r.elements, cost) for r, cost in costs])
        yield judge("4", words, threads, AT_LEAST, 0.9, [(r.elements, cost) for r, cost in costs])

    def calling_thread(self, threads):
        for dtype in ("bf16", "fp32"):
            what = f"calling thread, {dtype}"

            def row(words, side, limit, ratio, what=what):
                return self._row("8", f"{what}: {words}", what, threads, side, limit, ratio)

            def work(r, *calls):
                return Ratio.of(sum((r.times[c] for c in calls[1:]), r.times[calls[0]]), r.times["host update"])

            yield row("pack + norms / host update", AT_MOST, 0.2, lambda r: work(r, "pack", "norms"))
            yield row(
                "pack + norms + publish / host update", AT_MOST, 0.35, lambda r: work(r, "pack", "norms", "publish")
            )
            for call in ("pack", "norms", "publish", "find edits"):
                yield row(
                    f"{call}, share of copy bandwidth",
                    AT_LEAST,
                    0.85,
                    lambda r, c=call: Ratio.of(r.ceiling("copy"), r.times[c], r.bytes[c] / r.bytes["copy"]),
                )


def _ratio(record, longer, shorter, factor=1.0):
    if longer not in record.times:
        return None
    return Ratio.of(record.times[longer], record.times[shorter], factor)
