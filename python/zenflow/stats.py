# SPDX-License-Identifier: Apache-2.0
"""What `ZenFlowOptimizer.stats()` returns."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Counters:
    """Sums over some steps.

    Attributes:
        steps: calls of step().
        stall_seconds: time that step() waited for the host update.
        host_update_seconds: time that the background thread worked.
        d2h_bytes: deferred gradients packed for the host; they cross PCIe where parameters are on a GPU.
        h2d_bytes: deferred weights written back.
        handover_bytes: fp32 state of columns that changed sides, both ways.
        nonfinite_norms: steps whose global gradient norm was not finite (they were not clipped); counted where
            max_grad_norm is set.
    """

    steps: int = 0
    stall_seconds: float = 0.0
    host_update_seconds: float = 0.0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    handover_bytes: int = 0
    nonfinite_norms: int = 0


@dataclasses.dataclass(frozen=True)
class Stats:
    """A snapshot; nothing in it changes later.

    Attributes:
        total: since construction or loading; last_window: from the end of the window before to the end of the last one.
        global_grad_norm: of the last step, where max_grad_norm is set; None else.
        selection_overlap: share of the selected columns that the last selection kept; None before the second.
        skipped_steps: steps that skip_nonfinite left out.
        update_interval, update_delay: in force, in steps; with update_interval="auto", of the last window.
        fitted: whether a schedule that is measured was chosen; None where none is.
        host_buffer: "ring" or "stream", as chosen at the first step; None before.
        host_bytes: host memory held for deferred columns; device_bytes: memory held for selected and unsplit
            ones and, on GPUs, for what is on its way.
        parameters, split_parameters: how many have state, and how many of them have deferred columns.
    """

    total: Counters
    last_window: Counters
    global_grad_norm: float | None
    selection_overlap: float | None
    skipped_steps: int
    update_interval: int
    update_delay: int
    fitted: bool | None
    host_buffer: str | None
    host_bytes: int
    device_bytes: int
    parameters: int
    split_parameters: int

    def __str__(self):
        steps = max(1, self.total.steps)
        norm = "not computed" if self.global_grad_norm is None else f"{self.global_grad_norm:.4g}"
        kept = "no second selection yet" if self.selection_overlap is None else f"{self.selection_overlap:.0%}"
        rows = [
            ("steps", f"{self.total.steps} ({self.skipped_steps} skipped)"),
            ("schedule", f"a window of {self.update_interval} steps, visible {self.update_delay} later"),
            ("stall", f"{1e3 * self.total.stall_seconds / steps:.2f} ms a step"),
            ("host update", f"{1e3 * self.total.host_update_seconds / steps:.2f} ms a step"),
            (
                "down, up",
                f"{self.total.d2h_bytes / steps / 1e6:.1f} MB, {self.total.h2d_bytes / steps / 1e6:.1f} MB a step",
            ),
            (
                "memory",
                f"host {self.host_bytes / 1e6:.1f} MB ({self.host_buffer}), device {self.device_bytes / 1e6:.1f} MB",
            ),
            ("parameters", f"{self.parameters}, {self.split_parameters} of them split"),
            ("selection kept", kept),
            ("gradient norm", norm),
        ]
        return "\n".join(["ZenFlow", *(f"  {name:<14} {value}" for name, value in rows)])


def make_stats(settings, store, skipped_steps, fit):
    """The Stats of an optimizer; store is None before its first step, fit unless its schedule is measured."""
    report = {"total": {}, "last_window": {}, "gradient_norm": math.nan, "selection_overlap": math.nan}
    records = []
    if store is not None:
        report, records = store.engine.report(), list(store.records.values())
    return Stats(
        total=Counters(**report["total"]),
        last_window=Counters(**report["last_window"]),
        global_grad_norm=_none_if_nan(report["gradient_norm"]),
        selection_overlap=_none_if_nan(report["selection_overlap"]),
        skipped_steps=skipped_steps,
        update_interval=report["last_window"].get("steps", 0) if settings.automatic else settings.update_interval,
        update_delay=settings.update_delay,
        fitted=fit.chosen if fit else None,
        host_buffer=store.host_buffer if store else None,
        host_bytes=store.engine.host_bytes if store else 0,
        device_bytes=store.device_bytes() if store else 0,
        parameters=len(records),
        split_parameters=sum(record.split for record in records),
    )


def _none_if_nan(value):
    return None if math.isnan(value) else value
