# SPDX-License-Identifier: Apache-2.0
"""How long a GPU waits for offloading, measured without one: a simulated device around the real optimizer.

    make bench-stall
    PYTHONPATH=build/paced/python python benchmarks/bench_stall.py --scenarios a100,fits --rounds 1

The device is the emulated CUDA runtime that the CUDA half is tested on, paced (tests/cuda_emulation/pace.h): forward,
backward and kernels take a given time on no core, copies take bytes / link bandwidth, streams and events mean what
they mean in CUDA. The optimizer, its device class, hooks, host threads and host memory are the real ones. A kernel
takes what a pass over one parameter's gradient takes in a GPU's memory. The host's lanes hold real gradients; once all
have been filled copies move no bytes, since a core would have to do what DMA engines do, so their share of the host's
memory bandwidth is left out. Columns are selected once, at the start.

Backward is autograd's, through one parameter per layer, so that gradients leave while it runs. Nothing in the loop
waits for the device but the optimizer. "Default" is the default mode, in which gradients leave in step().

Scenarios and how they are scaled to this machine: stall_scenarios.py. Each way to train has a process of its own (but
not with --quick); rounds take turns, each scenario begins with measuring the host update, and the table has medians
over the rounds. One core is left to the training loop and the simulation; the others are the host update's.

step: seconds of a step, over whole windows. stall: of these, the time in which the device had nothing to do. host: time
of the host update per step. predicted: what zenflow.planning.predict says of step, from the speeds of device, link and
host in the same row. sent: bytes over the link, both ways, per step, by the size of the model, beside what
(S + 1) / S * (1 - topk_ratio) says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from stall_methods import FORWARD_SHARE, METHODS, TOPK_RATIO
from stall_scenarios import DEVICE_MEMORY_TO_LINK, SCENARIOS
from stall_timeline import draw
from timing import HERE, describe, format_table, progress, save, show_table, whole_number
from zenflow.planning import predict
from zenflow.sizes import moved_bytes

SIZES = {"elements": 100e6, "rounds": 3, "steps": 12}
QUICK = {"elements": 8.4e6, "rounds": 1, "steps": 4, "scenarios": "fits"}
HOST_UPDATE, UPDATES_MEASURED = "host update", 7
PREDICTION_WITHIN = 0.15


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", help=f"of {', '.join(SCENARIOS)}; default all")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument(
        "--elements", type=whole_number, help=f"parameters, in bfloat16; default {SIZES['elements']:.0e}"
    )
    parser.add_argument("--rounds", type=whole_number, help=f"default {SIZES['rounds']}")
    parser.add_argument(
        "--steps", type=whole_number, help=f"timed steps, at least two windows; default {SIZES['steps']}"
    )
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument("--threads", type=whole_number, default=cores, help=f"of the host update; default {cores}")
    parser.add_argument("--quick", action="store_true", help="in some seconds: shows that it works, and nothing else")
    parser.add_argument("--save", action="store_true", help="write table, JSON and pictures to benchmarks/results/")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a file with what to do, in the processes that measure
    args = parser.parse_args()
    for name, value in {"scenarios": ",".join(SCENARIOS), **SIZES, **(QUICK if args.quick else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, known in (("scenarios", SCENARIOS), ("methods", METHODS)):
        setattr(args, name, getattr(args, name).split(","))
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"--{name}: no such: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


# In a worker


def perform(method, elements, threads, steps, pace=None):
    import stall_run  # makes the process's device the simulated one

    if method == HOST_UPDATE:
        return stall_run.host_update(elements, threads, UPDATES_MEASURED)
    return stall_run.measure(method, elements, threads, pace, steps)


def work(path):
    task = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(perform(**task)))


# In the parent


def run(args, **task):
    task = {"elements": args.elements, "threads": args.threads, "steps": args.steps, **task}
    if args.quick:
        return perform(**task)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(task))
        done = subprocess.run(
            [sys.executable, __file__, "--worker", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{task['method']} failed:\n{done.stderr}")
        return json.loads(path.read_text())


def measure_all(args):
    """{scenario: {method: [result of each round]}}, and the host update's seconds whenever they were measured."""
    results = {scenario: {method: [] for method in args.methods} for scenario in args.scenarios}
    host = []
    count = args.rounds * len(args.scenarios) * (1 + len(args.methods))
    with progress(count, "running") as advance:
        for _ in range(args.rounds):
            for scenario in args.scenarios:
                here = run(args, method=HOST_UPDATE)
                host.append(here["host_seconds"])
                advance(HOST_UPDATE)
                model_bytes = 2 * here["elements"]
                device, link = SCENARIOS[scenario].scaled(here["host_seconds"], model_bytes)
                kernel = 2 * model_bytes / here["layers"] / (link * DEVICE_MEMORY_TO_LINK)
                for method in args.methods:
                    result = run(args, method=method, pace=(device, link, kernel))
                    result |= {"device_seconds": device, "link_bytes_per_second": link}
                    result["predicted_seconds"] = predicted_seconds(method, result)
                    results[scenario][method].append(result)
                    advance(f"{scenario}: {method}")
    return results, host


def predicted_seconds(method, result):
    """Of a step, by the speeds of device, link and host that `result` has."""
    settings, interval = METHODS[method].settings, result["update_interval"]
    busy = result["step_seconds"] - result["stall_seconds"]
    if settings is None:
        return busy
    deferred = result["model_bytes"] / 2 * (1 - settings.get("topk_ratio", TOPK_RATIO))
    rule = settings.get("deferred_rule", "adamw")
    moved, _ = moved_bytes(2, interval, mean=rule == "mean", stream=False)
    return predict(
        deferred=deferred,
        item=2,
        device_seconds=busy,
        host_bandwidth=deferred * moved / (interval * result["host_seconds"]),
        link_bandwidth=result["link_bytes_per_second"],
        update_interval=interval,
        update_delay=result["update_delay"],
        deferred_rule=rule,
        offload_gradients=settings.get("offload_gradients", False),
        forward_share=FORWARD_SHARE,
    ).step_seconds


def summary(rounds, none, synchronous):
    """One row's numbers: medians over the rounds, ratios within each."""

    def median(value):
        return statistics.median(value(i) for i in range(len(rounds)))

    def of(key):
        return median(lambda i: rounds[i][key])

    row = {key: of(key) for key in ("step_seconds", "stall_seconds", "host_seconds", "down_bytes", "up_bytes")}
    row |= {key: rounds[0][key] for key in ("update_interval", "update_delay", "model_bytes", "host_bytes")}
    row["schedules"] = sorted({(r["update_interval"], r["update_delay"]) for r in rounds})
    row["of_device"] = median(lambda i: rounds[i]["step_seconds"] / rounds[i]["device_seconds"])
    row["predicted_seconds"] = median(lambda i: rounds[i]["predicted_seconds"])
    row["predicted_by_measured"] = median(lambda i: rounds[i]["predicted_seconds"] / rounds[i]["step_seconds"])
    if none:
        row["of_no_offload"] = median(lambda i: rounds[i]["step_seconds"] / none[i]["step_seconds"])
    if synchronous:
        row["speedup"] = median(lambda i: synchronous[i]["step_seconds"] / rounds[i]["step_seconds"])
        row["stall_saved"] = median(lambda i: 1 - rounds[i]["stall_seconds"] / synchronous[i]["stall_seconds"])
    return row


def formula(method, row):
    """Bytes both ways by the size of the model, as they should be."""
    if method == "none":
        return 0.0
    share = 1.0 if method in ("synchronous", "delay-by-one") else 1 - TOPK_RATIO
    return (row["update_interval"] + 1) / row["update_interval"] * share


COLUMNS = [
    "",
    "S, delay",
    "step ms",
    "stall ms",
    "host ms",
    "of no offload",
    "over synchronous",
    "stall less",
    "predicted",
    "sent",
    "",
]


def cells(method, label, row):
    sent = (row["down_bytes"] + row["up_bytes"]) / row["model_bytes"]
    exact = formula(method, row)
    schedule = " or ".join(f"{s}, {d}" for s, d in row["schedules"])
    return [
        label,
        "" if method == "none" else schedule,
        f"{1e3 * row['step_seconds']:.1f}",
        f"{1e3 * row['stall_seconds']:.1f}",
        f"{1e3 * row['host_seconds']:.1f}",
        f"{row['of_no_offload']:.3f}" if "of_no_offload" in row else "",
        f"{row['speedup']:.2f}x" if "speedup" in row else "",
        f"{row['stall_saved']:.1%}" if "stall_saved" in row else "",
        f"{1e3 * row['predicted_seconds']:.1f} ({row['predicted_by_measured'] - 1:+.0%})",
        f"{sent:.3f}",
        f"{exact:.3f}",
    ]


def report(scenario, methods):
    """(title, {method: its numbers}, rows) of a scenario's table."""
    none, synchronous = methods.get("none"), methods.get("synchronous")
    table = {method: summary(rounds, none, synchronous) for method, rounds in methods.items()}
    paces = next(iter(methods.values()))
    device = statistics.median(r["device_seconds"] for r in paces)
    link = statistics.median(r["link_bytes_per_second"] for r in paces)
    here = f"device {1e3 * device:.1f} ms a step, link {link / 1e9:.2f} GB/s"
    title = f"{scenario}: {SCENARIOS[scenario].title}. Here: {here}"
    return title, table, [cells(method, METHODS[method].label, row) for method, row in table.items()]


def save_all(args, facts, results, tables, text):
    """The numbers first, without the time lines that the pictures show."""
    settings = {key: value for key, value in vars(args).items() if key not in ("worker", "save")}
    rounds = {
        scenario: {m: [{k: v for k, v in r.items() if k != "lanes"} for r in rounds] for m, rounds in methods.items()}
        for scenario, methods in results.items()
    }
    name = "stall-quick" if args.quick else "stall"
    save(name, facts, {"settings": settings, "tables": tables, "rounds": rounds}, text)
    for scenario, methods in results.items():
        path = HERE / "results" / f"{facts['date']}-{name}-{scenario}.png"
        shown = {METHODS[m].label: rounds[0] for m, rounds in methods.items()}
        if not draw(path, SCENARIOS[scenario].title, shown):
            print("no pictures: matplotlib is not installed (pip install '.[bench]')")
            return
        print(f"written: {os.path.relpath(path)}")


def main():
    args = parse_arguments()
    if args.worker:
        return work(args.worker)
    import zenflow

    if not hasattr(zenflow._C, "emulation"):
        raise SystemExit(
            "bench_stall needs a zenflow on the emulated device: run `make bench-stall`, or `make paced` and then "
            "PYTHONPATH=build/paced/python python benchmarks/bench_stall.py"
        )
    facts = describe(torch.device("cpu")) | {"device": "simulated (tests/cuda_emulation/pace.h); no GPU was used"}
    results, host = measure_all(args)
    texts, tables = [], {}
    for scenario, methods in results.items():
        title, tables[scenario], rows = report(scenario, methods)
        show_table(title, COLUMNS, rows)
        texts.append(f"{title}\n{format_table(COLUMNS, rows)}")
    model_bytes = next(row["model_bytes"] for table in tables.values() for row in table.values())
    updates = ", ".join(f"{1e3 * seconds:.1f}" for seconds in host)
    note = (
        f"{model_bytes / 2e6:,.0f}M parameters in bfloat16; host update of all, whenever it was measured: "
        f"{updates} ms on {args.threads} threads"
    )
    off = max(abs(row["predicted_by_measured"] - 1) for table in tables.values() for row in table.values())
    note += (
        f"\nPredicted steps differ from measured ones by {off:.0%} at most; {PREDICTION_WITHIN:.0%} are allowed: "
        f"{'holds' if off <= PREDICTION_WITHIN else 'MISSED'}"
    )
    print(note)
    if args.save:
        save_all(args, facts, results, tables, "\n\n".join([*texts, note]))


if __name__ == "__main__":
    main()
