# SPDX-License-Identifier: Apache-2.0
"""What a GPU did during some steps, by torch's profiler: how long no kernel ran, and which bytes crossed the link."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Activity:
    """Of some steps; seconds and bytes in all."""

    span: float  # from the first kernel's start to the last one's end
    idle: float  # of it, without any kernel; copies do not count as work
    d2h_bytes: int
    h2d_bytes: int


def idle_time(intervals):
    """Time between the first start and the last end that no (start, end) interval covers."""
    idle, covered = 0.0, None
    for start, end in sorted(intervals):
        if covered is not None and start > covered:
            idle += start - covered
        covered = end if covered is None else max(covered, end)
    return idle


def activity_of(events):
    """From a Chrome trace's events, whose times are in microseconds."""
    kernels, copied = [], {"DtoH": 0, "HtoD": 0}
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") == "gpu_memcpy":
            for direction in copied:
                if direction in event["name"]:
                    copied[direction] += int(event["args"]["bytes"])
    span = max(end for _, end in kernels) - min(start for start, _ in kernels) if kernels else 0.0
    return Activity(span / 1e6, idle_time(kernels) / 1e6, copied["DtoH"], copied["HtoD"])


def trace(run):
    """Calls `run` under the profiler, waits for the device, and returns its Activity."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return activity_of(json.loads(path.read_text())["traceEvents"])
