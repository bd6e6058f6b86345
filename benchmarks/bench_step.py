# SPDX-License-Identifier: Apache-2.0
"""A training step on one GPU, in several ways: seconds, stall, the publishing step, device memory, bytes each way.

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py --layers 32 --hidden 4096 --intermediate 11008 --heads 32 --batch 1 --checkpoint
    python benchmarks/bench_step.py --methods adamw,zenflow,zenflow-hooks

Each way runs in a process of its own on the same model, out of sizes and with random weights (step_model.py), and first
measures forward and backward alone. What is not installed is left out, with the reason.

step: median of the timed steps, by events on the compute stream. stall: time per step in which no kernel ran, less the
same of forward and backward alone; copies count as idle. It comes from some further steps under torch's profiler, as do
the bytes. publishing: median of steps that publish a host update over the mean of their neighbours. memory: peak of
torch's allocator during the timed steps, in all and beyond weights.

Without a GPU it runs on CPU tensors in small form: it shows that the benchmark works, and nothing about a GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from device_trace import trace
from step_methods import METHODS, Method, Skip
from step_model import make_batches, make_model
from timing import describe, format_table, link_bandwidth, progress, save, show_table, whole_number

GPU_SIZES = {"layers": 16, "hidden": 2048, "intermediate": 5632, "heads": 16, "vocabulary": 32_000}
GPU_SIZES |= {"batch": 4, "sequence": 1024, "dtype": "bf16"}
CPU_SIZES = {"layers": 2, "hidden": 256, "intermediate": 704, "heads": 4, "vocabulary": 1000}
CPU_SIZES |= {"batch": 2, "sequence": 64, "dtype": "fp32"}
TRACED_WINDOWS = 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in GPU_SIZES.items():
        kind = {"choices": ["fp32", "bf16"]} if name == "dtype" else {"type": whole_number}
        parser.add_argument(f"--{name}", help=f"default {value}, on the CPU {CPU_SIZES[name]}", **kind)
    parser.add_argument("--checkpoint", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--update-interval", type=whole_number, default=4)
    parser.add_argument("--update-delay", type=int, default=1)
    parser.add_argument("--steps", type=whole_number, default=24, help="timed steps")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--cpu", action="store_true", help="CPU tensors, even if there is a GPU")
    parser.add_argument("--no-save", action="store_true", help="write no files")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # METHOD:FILE, in the processes that measure
    args = parser.parse_args()
    args.methods = args.methods.split(",")
    if unknown := set(args.methods) - METHODS.keys():
        parser.error(f"--methods: no such method: {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    args.device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    for name, value in (CPU_SIZES if args.device == "cpu" else GPU_SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


# In a worker: one method


class Clock:
    """Marks on the device's compute stream, or on the CPU's clock."""

    def __init__(self, device):
        self.on_gpu = device.type == "cuda"
        self.marks = []

    def mark(self):
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        """Between each mark and the next one."""
        if self.on_gpu:
            torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]


def time_steps(method, batches, device):
    """(seconds, whether it published) of each step."""
    clock, published = Clock(device), []
    for batch in batches:
        clock.mark()
        published.append(method.publishes())
        method.step(batch)
    clock.mark()
    return clock.seconds(), published


def publishing_ratio(seconds, published):
    """Median of the publishing steps over the mean of their neighbours; None where there are none."""
    ratios = [
        seconds[i] / statistics.mean((seconds[i - 1], seconds[i + 1]))
        for i in range(1, len(seconds) - 1)
        if published[i] and not published[i - 1] and not published[i + 1]
    ]
    return statistics.median(ratios) if ratios else None


def trace_steps(method, batches):
    """Activity of steps with a batch each, in all."""

    def run():
        for batch in batches:
            method.step(batch)

    return trace(run)


def measure_method(name, args):
    device = torch.device(args.device)
    interval = args.update_interval
    model = make_model(args, device)
    weights = sum(p.nbytes for p in model.parameters())
    traced = TRACED_WINDOWS * interval
    warm_up = 2 * interval + args.update_delay
    batches = make_batches(args, device, warm_up + args.steps + traced)
    alone = Method(model, args)
    time_steps(alone, batches[:3], device)
    alone_seconds, _ = time_steps(alone, batches[:10], device)
    base = trace_steps(alone, batches[:traced]) if device.type == "cuda" else None
    model.zero_grad()

    method = METHODS[name](model, args)
    time_steps(method, batches[:warm_up], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, published = time_steps(method, batches[warm_up : warm_up + args.steps], device)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": statistics.median(seconds),
        "alone_seconds": statistics.median(alone_seconds),
        "publishing_ratio": publishing_ratio(seconds, published),
        "all_step_seconds": seconds,
        "all_published": published,
        "weight_bytes": weights,
    }
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        activity = trace_steps(method, batches[warm_up + args.steps :])
        stall = max(0.0, activity.idle - base.idle) / traced
        result |= {
            "peak_bytes": peak,
            "stall_seconds": stall,
            "stall_share": stall / result["step_seconds"],
            "d2h_bytes": activity.d2h_bytes / traced,
            "h2d_bytes": activity.h2d_bytes / traced,
        }
    return result | method.facts()


def work(args):
    name, _, path = args.worker.partition(":")
    try:
        result = measure_method(name, args)
    except Skip as reason:
        result = {"skipped": str(reason)}
    Path(path).write_text(json.dumps(result))


# In the parent: all of them, and the table


def run_worker(name, args):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", f"{name}:{path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if path.exists():
            return json.loads(path.read_text())
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return {"skipped": f"it failed: {last}"}


def row_of(name, result):
    label = METHODS[name].label
    if "skipped" in result:
        return [label, "-", *[""] * 7]

    def milliseconds(key):
        return f"{1e3 * result[key]:.1f}" if key in result else ""

    def gigabytes(value):
        return "" if value is None else f"{value / 1e9:.3g}"

    ratio, peak = result["publishing_ratio"], result.get("peak_bytes")
    return [
        label,
        milliseconds("step_seconds"),
        milliseconds("alone_seconds"),
        f"{milliseconds('stall_seconds')} ({result['stall_share']:.1%})" if "stall_seconds" in result else "",
        "" if ratio is None else f"{ratio:.2f}x",
        gigabytes(peak),
        gigabytes(None if peak is None else peak - result["weight_bytes"]),
        gigabytes(result.get("d2h_bytes", result.get("packed_d2h_bytes"))),
        gigabytes(result.get("h2d_bytes", result.get("published_h2d_bytes"))),
    ]


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    device = torch.device(args.device)
    facts = describe(device)
    link = link_bandwidth(device)
    results = {}
    with progress(len(args.methods), "running") as advance:
        for name in args.methods:
            results[name] = run_worker(name, args)
            advance(METHODS[name].label)

    count = next((result["parameters"] for result in results.values() if "parameters" in result), 0)
    title = (
        f"{count / 1e6:,.0f}M parameters, {args.dtype}, {args.batch} x {args.sequence} tokens, topk_ratio "
        f"{args.topk_ratio}, update_interval {args.update_interval}, update_delay {args.update_delay}, "
        f"on {facts['device']}"
    )
    columns = ["", "step ms", "alone ms", "stall ms", "publishing", "peak GB", "beyond GB", "down GB", "up GB"]
    rows = [row_of(name, result) for name, result in results.items()]
    show_table(title, columns, rows)
    notes = [f"{METHODS[name].label}: {r['skipped']}" for name, r in results.items() if "skipped" in r]
    notes += [f"link, pinned: {name} {rate / 1e9:.1f} GB/s" for name, rate in link.items()]
    if device.type == "cpu":
        notes.append(
            "CPU tensors in small form: nothing here says anything about a GPU. Bytes are those that would cross."
        )
    print("\n".join(notes))
    if not args.no_save:
        settings = {key: value for key, value in vars(args).items() if key not in ("worker", "no_save")}
        text = "\n".join([title, format_table(columns, rows), *notes])
        name = "step-cpu" if device.type == "cpu" else "step"
        save(name, facts, {"settings": settings, "link_bytes_per_second": link, "methods": results}, text)


if __name__ == "__main__":
    main()
