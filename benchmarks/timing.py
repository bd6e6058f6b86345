# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: clocks, the machine in words, tables, and files in benchmarks/results/.

Not for: what is measured (bench_*.py).
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import zenflow

HERE = Path(__file__).resolve().parent
QUEUE_AHEAD = 10_000_000  # cycles that the device sleeps while launches are queued, so that it never waits for the host


def whole_number(text):
    """A type of arguments: an integer from 1 on, also as 1e6."""
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return int(value)


@dataclass(frozen=True)
class Times:
    """Seconds of repeated measurements."""

    seconds: tuple[float, ...]

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def spread(self):
        """Half of the range from the 10th to the 90th percentile, relative to the median."""
        ordered = sorted(self.seconds)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return (high - low) / 2 / self.median

    def __add__(self, other):
        """Of both in a row, round by round."""
        return Times(tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def summary(self):
        return {"median": self.median, "spread": self.spread, "count": len(self.seconds), "seconds": self.seconds}


@dataclass(frozen=True)
class Ratio:
    """How often one measurement contains another, round by round: the median, and the 10 and 90 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, longer, shorter, factor=1.0):
        """`factor` * longer / shorter of two Times that were interleaved."""
        rounds = sorted(factor * a / b for a, b in zip(longer.seconds, shorter.seconds, strict=True))
        tenth = len(rounds) // 10
        return cls(statistics.median(rounds), rounds[tenth], rounds[-1 - tenth])

    def __str__(self):
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def measure_once(function, device, inner):
    """Seconds of one of `inner` calls in a row: by CUDA events on a GPU, by the clock on the CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(inner):
            function()
        return (time.perf_counter() - start) / inner
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUE_AHEAD)
    start.record()
    for _ in range(inner):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / inner


def interleaved(functions, device, *, repetitions, inner, warm_up=2):
    """Times of several functions, {name: Times}: in turns, so that clocks and neighbours change for all alike."""
    for function in functions.values():
        for _ in range(warm_up):
            function()
    seconds = {name: [] for name in functions}
    with progress(repetitions * len(functions), "measuring") as advance:
        for _ in range(repetitions):
            for name, function in functions.items():
                seconds[name].append(measure_once(function, device, inner))
                advance(name)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def link_bandwidth(device, megabytes=256, repetitions=7):
    """Bytes a second of pinned copies to and from the host, medians; {} on the CPU."""
    if device.type != "cuda":
        return {}
    here = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device)
    copies = {
        "d2h": lambda: here.copy_(there, non_blocking=True),
        "h2d": lambda: there.copy_(here, non_blocking=True),
    }
    times = interleaved(copies, device, repetitions=repetitions, inner=1)
    return {name: here.nbytes / times[name].median for name in copies}


# The machine, and where results go


def _output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def describe(device):
    """When, where and with what a benchmark ran, as a dict of plain values."""
    config = zenflow.config()
    commit = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]]),
        "commit": commit + (" with changes" if changed else ""),
        "zenflow": config.version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": config.isa,
        "system": platform.platform(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        facts |= {
            "device": properties.name,
            "device memory": properties.total_memory,
            "driver": driver[0] if driver else "unknown",
            "CUDA of torch": torch.version.cuda,
            "CUDA of zenflow": config.cuda_reason,
        }
    else:
        facts["device"] = "CPU tensors; no GPU was used"
    return facts


def save(name, facts, results, text, folder=None):
    """Writes DATE-NAME.json and .txt into results/, or another folder, says where, and returns that path without a
    suffix. Earlier ones of the same day get overwritten."""
    folder = folder or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{facts['date']}-{name}"
    path.with_suffix(".json").write_text(json.dumps({"machine": facts, **results}, indent=1) + "\n")
    head = "\n".join(f"{key}: {value}" for key, value in facts.items())
    path.with_suffix(".txt").write_text(f"{head}\n\n{text}\n")
    print(f"written: {os.path.relpath(path)}.json and .txt")
    return path


# Tables and progress: rich where it is installed


def format_table(columns, rows):
    """Plain text; the first column is left-aligned."""
    rows = [columns, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def show_table(title, columns, rows):
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console = None
    if Console is None or not sys.stdout.isatty():
        print(f"\n{title}\n{format_table(columns, rows)}\n")
        return
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


@contextlib.contextmanager
def progress(total, title):
    """Gives a function to call after each of `total` pieces of work, with what was done."""
    try:
        from rich.progress import Progress
    except ImportError:
        Progress = None
    if Progress is None or not sys.stdout.isatty():
        yield lambda done: None
        return
    with Progress(transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, advance=1, description=f"{title}: {done}")
