# SPDX-License-Identifier: Apache-2.0
"""Each kernel: its time, the bytes it moves, its share of the memory's bandwidth, and the same work done by others.

    python benchmarks/bench_kernels.py              # the device's: 256 MB of bf16 gradients, 4,096 columns
    python benchmarks/bench_kernels.py --megabytes 1024 --columns 11008 --dtype fp32
    python benchmarks/bench_kernels.py --cpu        # the host's: 1e5 to 4e8 parameters, 1 to all threads
    python benchmarks/bench_kernels.py --cpu --quick

The device's kernels need a GPU and a zenflow with its CUDA half.

Bandwidth is relative to a device-to-device copy of the same size, measured in the same run and in turns with the
kernels. Two shares are given: of the useful bytes, and of the bytes of whole 32-byte sectors (kernel_cases.py counts
both). Results are compared with torch's first, checksums excepted. Times are CUDA events'; launches are queued ahead.

With --torch-only the plain torch side runs on CPU tensors, to see without a GPU that this half of the benchmark works.

With --cpu a window's update is measured beside a STREAM-like loop over the same arrays with the same threads (its
ceiling), beside torch's fused AdamW and DeepSpeedCPUAdam, and the calling thread's kernels beside a copy. Each table
row that belongs to a target says whether it holds. Results are compared with tests/reference.py first. Everything takes
turns; ratios are taken within a round, and come as a median with the 10 and 90 % quantiles.
"""

import argparse
import os
import sys

import torch

from timing import describe, format_table, interleaved, link_bandwidth, save, show_table, whole_number
from zenflow import _C

SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000, 400_000_000)
QUICK_SIZES = (100_000, 400_000)
FORM_SIZE = 32_000_000  # at which forms other than the two main ones are measured, and the calling thread's work
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=whole_number, help="size of the gradient; default 256, with --torch-only 64"
    )
    parser.add_argument("--columns", type=whole_number, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--repetitions", type=whole_number, help="default 25, fewer for large sizes on the host")
    parser.add_argument(
        "--inner", type=whole_number, help="calls in a row in one measurement; default 4, on the host by size"
    )
    parser.add_argument("--only", help="kernels whose name contains this")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--torch-only", action="store_true", help="plain torch on CPU tensors alone")
    parser.add_argument("--cpu", action="store_true", help="the host's kernels")
    parser.add_argument("--quick", action="store_true", help="with --cpu: small sizes, few repetitions, no files")
    parser.add_argument("--sizes", type=whole_number, nargs="+", help="with --cpu: parameters")
    parser.add_argument("--threads", type=whole_number, nargs="+", help="with --cpu; default 1 to all")
    parser.add_argument("--no-save", action="store_true", help="write no files")
    args = parser.parse_args()
    if not args.cpu:
        args.megabytes = args.megabytes or (64 if args.torch_only else 256)
        args.repetitions, args.inner = args.repetitions or 25, args.inner or 4
        return args
    args.sizes = sorted(args.sizes or (QUICK_SIZES if args.quick else SIZES))
    args.form_size = min(args.sizes[-1], FORM_SIZE)
    args.threads = sorted(args.threads or range(1, len(os.sched_getaffinity(0)) + 1))
    if args.quick:
        args.repetitions, args.inner = args.repetitions or 3, args.inner or 1
    return args


def find_device(args):
    if args.torch_only:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("bench_kernels needs a CUDA device, and torch finds none; --cpu measures the host's")
    config = _C.config()
    if not config["cuda_built"]:
        sys.exit(f"this zenflow has no CUDA half ({config['cuda_reason']}): build it where nvcc works")
    device = torch.device(args.device)
    torch.cuda.set_device(device)
    return device


def make_cases(args, device):
    from kernel_cases import Workload, kernels

    if device.type == "cpu":  # there is no kernel to call: plain torch alone, with the arguments made all the same
        kernels.build_place = kernels.column_checksums = lambda *arguments, **named: None
        kernels.column_norms_scratch = lambda gradients, norms: 1
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    sizes = {"megabytes": args.megabytes, "columns": args.columns, "topk_ratio": args.topk_ratio}
    workload = Workload(device, stream, dtype=DTYPES[args.dtype], **sizes)
    cases = [case for case in workload.all() if not args.only or args.only in case.name]
    return workload, cases


def check(cases):
    """Names of the cases in which a kernel and torch disagree, after one call of each."""
    wrong = []
    for case in cases:
        case.ours()
        case.torch()
        torch.cuda.synchronize()
        if not case.same():
            wrong.append(case.name)
    return wrong


def measure(args, device, workload, cases):
    """{name: Times}; "copy" is a copy of the gradient."""
    copy = torch.empty_like(workload.gradient)
    functions = {"copy": lambda: copy.copy_(workload.gradient)}
    for case in cases:
        if device.type == "cuda":
            functions[case.name] = case.ours
        functions[f"{case.name}, torch"] = case.torch
    return interleaved(functions, device, repetitions=args.repetitions, inner=args.inner)


def result_of(case, times, copy_bandwidth):
    result = {
        "useful_bytes": case.useful,
        "sector_bytes": case.sectors,
        "torch": times[f"{case.name}, torch"].summary(),
    }
    if case.name in times:
        seconds = times[case.name].median
        result["ours"] = times[case.name].summary()
        if case.useful:
            result["share_useful"] = case.useful / seconds / copy_bandwidth
            result["share_sectors"] = case.sectors / seconds / copy_bandwidth
    return result


def row_of(name, result):
    ours, plain = result.get("ours"), result["torch"]

    def percent(key):
        return f"{result[key]:.0%}" if key in result else ""

    return [
        name,
        f"{1e6 * ours['median']:.1f}" if ours else "",
        f"{ours['spread']:.0%}" if ours else "",
        f"{result['useful_bytes'] / 1e6:.0f}" if result["useful_bytes"] else "",
        f"{result['sector_bytes'] / 1e6:.0f}" if result["sector_bytes"] else "",
        percent("share_useful"),
        percent("share_sectors"),
        f"{1e6 * plain['median']:.1f}",
        f"{plain['median'] / ours['median']:.1f}x" if ours else "",
    ]


def main_host(args):
    import host_cases
    from host_measure import Session
    from host_peers import deepspeed_adam
    from host_report import huge_pages, report
    from step_methods import Skip

    notes, deepspeed = [], None
    try:
        deepspeed = deepspeed_adam()
    except Skip as reason:
        notes.append(f"DeepSpeedCPUAdam is left out: {reason}")
    if args.quick:
        notes.append("Quick: small sizes and few repetitions. Nothing here says anything about speed.")
    facts = describe(torch.device("cpu")) | {"huge pages": huge_pages()}
    session = Session(args, deepspeed)
    host_cases.check()
    records = session.all()
    if not records:
        sys.exit("\n".join(["nothing was measured", *session.left_out]))
    report(records, session, facts, notes, keep=not (args.no_save or args.quick))


def main():
    args = parse_arguments()
    torch.manual_seed(0)
    main_host(args) if args.cpu else main_device(args)


def main_device(args):
    device = find_device(args)
    facts = describe(device)
    workload, cases = make_cases(args, device)
    if device.type == "cuda" and (wrong := check(cases)):
        sys.exit(f"these kernels and torch disagree, so nothing was measured: {', '.join(wrong)}")
    times = measure(args, device, workload, cases)
    copy_bandwidth = 2 * workload.bytes / times["copy"].median
    link = link_bandwidth(device)
    results = {case.name: result_of(case, times, copy_bandwidth) for case in cases}

    title = (
        f"{workload.rows:,} x {workload.columns:,} {args.dtype}, {workload.width:,} columns selected, on "
        f"{facts['device']}; a copy moves {copy_bandwidth / 1e9:.0f} GB/s (read and written)"
    )
    columns = ["kernel", "us", "+-", "MB useful", "MB sectors", "of copy", "in sectors", "torch us", "faster"]
    rows = [row_of(name, result) for name, result in results.items()]
    show_table(title, columns, rows)
    notes = [f"link, pinned: {name} {rate / 1e9:.1f} GB/s" for name, rate in link.items()]
    if device.type == "cpu":
        notes.append("CPU tensors: plain torch alone. The kernels need a GPU; --cpu measures the host's.")
    print("\n".join(notes))
    if not args.no_save:
        measured = {"copy_bytes_per_second": copy_bandwidth, "link_bytes_per_second": link, "kernels": results}
        text = "\n".join([title, format_table(columns, rows), *notes])
        save("kernels-torch" if device.type == "cpu" else "kernels", facts, measured, text)


if __name__ == "__main__":
    main()
