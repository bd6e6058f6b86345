# SPDX-License-Identifier: Apache-2.0
"""One way to train on the paced device (paced_device.py), and what device, link and host did in some of its steps."""

import statistics

import paced_device
from stall_methods import METHODS, TOPK_RATIO
from stall_model import PacedModel
from zenflow import ZenFlowOptimizer

LR = 1e-5
MOST_FITTING_STEPS = 200  # some 40 are due


class Run:
    """One optimizer on one model.

    Args:
        threads: of the host update.
    """

    def __init__(self, method, elements, threads):
        self.model = PacedModel(elements)
        self.optimizer = None
        if method.settings is not None:
            settings = {"topk_ratio": TOPK_RATIO, "num_threads": threads, **method.settings}
            self.optimizer = ZenFlowOptimizer(self.model.parameters, LR, **settings)
        self.device_seconds = 0.0
        self.host_spans = []  # (begin, end) of host updates
        paced_device.set_pace(moves_bytes=True)  # until all lanes have real gradients

    @property
    def schedule(self):
        """(update_interval, update_delay) in force."""
        stats = self.optimizer.stats() if self.optimizer else None
        return (stats.update_interval, stats.update_delay) if stats else (1, 0)

    def step(self):
        self.model.run(self.device_seconds)
        if self.optimizer is None:
            for p in self.model.parameters:
                p.grad = None
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        span = self.optimizer._store.engine.report()["host_update_span"]
        if span not in self.host_spans:
            self.host_spans.append(span)

    def steps(self, count):
        for _ in range(count):
            self.step()

    def fill_lanes(self, pace):
        paced_device.set_pace(moves_bytes=True)
        self.steps(2 * sum(self.schedule) + 1)
        self.set_pace(pace)

    def set_pace(self, pace):
        """`pace`: (device seconds of a step, link bytes per second, seconds of a kernel)."""
        self.device_seconds, link, kernel = pace
        paced_device.set_pace(link_bytes_per_second=link, kernel_seconds=kernel)

    def fit(self):
        """Trains until a schedule that is measured was chosen."""
        for _ in range(MOST_FITTING_STEPS):
            if self.optimizer is None or self.optimizer.stats().fitted is not False:
                return
            self.step()
        raise RuntimeError(f"no schedule was chosen in {MOST_FITTING_STEPS} steps")

    def finish_window(self):
        while self.optimizer is not None and self.optimizer._store.engine.clock[1] != 0:
            self.step()


def host_update(elements, threads, updates):
    """What a host AdamW of every parameter once takes here (median), and the model's size."""
    run = Run(METHODS["synchronous"], elements, threads)
    run.steps(3)
    paced_device.set_pace()
    seconds = []
    for _ in range(updates):
        run.step()
        seconds.append(run.optimizer.stats().last_window.host_update_seconds)
    size = {"elements": run.model.elements, "layers": run.model.layers}
    return {"host_seconds": statistics.median(seconds), **size}


def measure(name, elements, threads, pace, least_steps):
    """Steps, and what device, link and host did in them, as plain values; times in seconds since the first step."""
    run = Run(METHODS[name], elements, threads)
    run.set_pace(pace)
    run.fit()
    run.fill_lanes(pace)
    interval, delay = run.schedule
    run.finish_window()
    run.steps(2 * interval)
    paced_device.wait()
    paced_device.emulation.take_occupied()
    run.host_spans.clear()
    steps = interval * max(2, -(-least_steps // interval))
    run.steps(interval + steps + 1)
    paced_device.wait()
    return {
        "update_interval": interval,
        "update_delay": delay,
        "host_bytes": run.optimizer.stats().host_bytes if run.optimizer else 0,
        **activity(paced_device.emulation.take_occupied(), run, interval, steps),
    }


def activity(occupied, run, before, steps):
    """Of `steps` steps after the first `before` ones; the device is busy with a layer's work or with a kernel."""
    work = sorted((o for o in occupied if o[1] == "work"), key=lambda o: o[3])
    compute = work[0][0]
    starts = [o[3] for o in work[:: 2 * run.model.layers]]
    first, last = starts[before], starts[before + steps]
    lanes = {"device": [], "down": [], "host": [], "up": []}
    byte_counts = {"down": 0, "up": 0}
    busy = 0.0
    for stream, what, count, begin, end in sorted(occupied, key=lambda o: o[3]):
        if not first <= begin < last:
            continue
        if what in byte_counts:
            byte_counts[what] += count
            lanes[what].append((begin - first, end - first))
        elif stream == compute:
            busy += end - begin
            lanes["device"].append((begin - first, end - first))
    lanes["host"] = [(max(0.0, a - first), b - first) for a, b in run.host_spans if b > first and a < last]
    step = (last - first) / steps
    return {
        "steps": steps,
        "step_seconds": step,
        "stall_seconds": max(0.0, step - busy / steps),
        "model_bytes": 2 * run.model.elements,
        "down_bytes": byte_counts["down"] / steps,
        "up_bytes": byte_counts["up"] / steps,
        "host_seconds": sum(b - a for a, b in lanes["host"]) / steps,
        "starts": [start - first for start in starts[before : before + steps + 1]],
        "lanes": {lane: merged(spans) for lane, spans in lanes.items()},
    }


def merged(spans, gap=1e-4):
    """Spans that follow each other at once become one."""
    whole = []
    for begin, end in spans:
        if whole and begin - whole[-1][1] <= gap:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((begin, end))
    return whole
