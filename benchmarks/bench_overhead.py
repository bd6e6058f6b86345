# SPDX-License-Identifier: Apache-2.0
"""What one step() costs in Python, beside the native call: the price of many small parameters.

    python benchmarks/bench_overhead.py --parameters 300
    python benchmarks/bench_overhead.py --parameters 300 --device cuda

Prints medians: of the whole step, of the native commit in it, of the difference, and of torch's own AdamW. On a GPU
these are times on the host, in which work is queued; the device is waited for between steps and not counted.
"""

import argparse
import platform
import statistics
import time

import torch

import zenflow
from timing import whole_number


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=whole_number, default=300)
    parser.add_argument("--rows", type=whole_number, default=64)
    parser.add_argument("--columns", type=whole_number, default=64)
    parser.add_argument("--steps", type=whole_number, default=200)
    parser.add_argument("--device", default="cpu", type=torch.device)
    return parser.parse_args()


def make_parameters(args):
    shape = (args.rows, args.columns)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=args.device)) for _ in range(args.parameters)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


class TimedCommit:
    """Stands before the engine and adds up the time that commit() takes."""

    def __init__(self, engine):
        self._engine = engine
        self.seconds = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def commit(self, *arguments):
        start = time.perf_counter()
        self._engine.commit(*arguments)
        self.seconds.append(time.perf_counter() - start)


def time_steps(optimizer, steps, device):
    seconds = []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def main():
    args = parse_arguments()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"bench_overhead: --device {args.device} needs a GPU, and torch {torch.__version__} sees none")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    optimizer = zenflow.ZenFlowOptimizer(make_parameters(args), min_offload_numel=0, num_threads=1)
    adamw = torch.optim.AdamW(make_parameters(args), fused=True)
    for warmed in (optimizer, adamw):
        time_steps(warmed, 8, args.device)

    optimizer._store.engine = timed = TimedCommit(optimizer._store.engine)
    whole = time_steps(optimizer, args.steps, args.device)
    python = [step - commit for step, commit in zip(whole, timed.seconds, strict=True)]
    peer = time_steps(adamw, args.steps, args.device)

    config = zenflow.config()
    print(f"zenflow {config.version}, torch {config.torch}, Python {platform.python_version()}, {config.isa}")
    print(
        f"{args.parameters} parameters of {args.rows} x {args.columns}, fp32, on {args.device}, "
        f"medians of {args.steps} steps, 1 thread"
    )
    for name, seconds in (
        ("step()", whole),
        ("native commit", timed.seconds),
        ("Python", python),
        ("AdamW fused", peer),
    ):
        print(f"  {name:<14} {1e3 * statistics.median(seconds):7.3f} ms")


if __name__ == "__main__":
    main()
