#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes real models with AdamW, with ZenFlow as published and with ours: do they end at the same loss?

    python benchmarks/bench_accuracy.py --save         # some 40 minutes on 2 cores
    python benchmarks/bench_accuracy.py --long --save  # more steps, and ours without look-ahead
    python benchmarks/bench_accuracy.py --quick        # tiny random models: it works, and says nothing about accuracy

gpt: a byte-level GPT of 0.85M parameters, pre-trained here on Jane Austen, on Python's reference text, 12 x 96 bytes.
minilm: all-MiniLM-L6-v2 with a new head of 2 classes, on snippets of movie reviews, 16 x 64 tokens.
smollm: SmolLM2-135M on Jane Austen, 4 x 64 tokens.

All methods see the same batches from the same start; a seed is another order of the rows, and for minilm another head.
Dropout is off and the learning rate constant. "published" is deferred_rule="mean", update_delay=4, lookahead=0; "ours"
has the defaults. min_offload_numel is 4096 for gpt, so that all its matrices are split; elsewhere it is the default.

Losses are those of the settled fp32 masters on held-out rows, at the end after flush(). AdamW's spread is its largest
less its smallest loss over the seeds: what the order of the rows alone makes. "as AdamW" means that ours is above AdamW
by no more than that.

Each run is a process on one torch thread; as many go on at once as there are cores. Its result is a file in the cache,
named after all that it depends on. A benchmark that was stopped goes on where it was, and results are made anew
where the code has changed.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

import accuracy_data
import accuracy_report
import accuracy_tasks
import timing
import zenflow
from accuracy_runs import LONG_ONLY, METHODS, Run

HERE = Path(__file__).resolve().parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(accuracy_tasks.SCHEDULES)}, by commas (all)")
    parser.add_argument("--seeds", type=int, help="how many (gpt 3, minilm 2, smollm 1)")
    parser.add_argument("--long", action="store_true", help="more steps, and ours without look-ahead")
    parser.add_argument("--quick", action="store_true", help="tiny models with random weights, no download")
    parser.add_argument("--jobs", type=int, help="runs at once (one per core)")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="folder of data and single results")
    folder = HERE / "results"
    parser.add_argument("--save", type=Path, nargs="?", const=folder, help="write table, JSON and pictures (here)")
    args = parser.parse_args()
    args.tasks = args.only.split(",") if args.only else list(accuracy_tasks.SCHEDULES)
    if unknown := set(args.tasks) - accuracy_tasks.SCHEDULES.keys():
        parser.error(f"--only: no such task: {', '.join(sorted(unknown))}")
    for name in ("seeds", "jobs"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name}: {value} is less than 1")
    args.jobs = args.jobs or len(zenflow.config().cpus)
    return args


def wanted_runs(args):
    """In the order of the table: task, case, method, seed."""
    runs = []
    for task in args.tasks:
        schedule = accuracy_tasks.schedule_of(task, args.quick)
        for steps, lr in schedule.cases + (schedule.long_cases if args.long else ()):
            for method in METHODS:
                if args.long or method not in LONG_ONLY:
                    seeds = range(args.seeds or schedule.seeds)
                    runs += [Run(task, steps, lr, method, seed, args.quick) for seed in seeds]
    return runs


def prepare(task, args):
    """Fetches data and pre-trains, so that the runs find all they need."""
    with timing.progress(None, f"preparing {task}, once") as advance:
        accuracy_tasks.load(task, args.cache, args.quick, lambda: advance("pre-training"))


class Processes:
    """Makes runs, each in a process of its own."""

    def __init__(self, cache):
        self.cache, self.alive, self.stopped = cache, set(), False

    def make(self, run, advance):
        """Returns the result; raises RuntimeError with what the process said if it failed."""
        command = [sys.executable, HERE / "accuracy_runs.py", json.dumps(dataclasses.asdict(run)), self.cache]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, text=True)
            self.alive.add(process)
            if self.stopped:
                process.terminate()
            with process:
                for _ in process.stdout:
                    advance()
            self.alive.discard(process)
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(f"{run.title}: exit {process.returncode}: {accuracy_data.last_line(errors.read())}")
        return json.loads(run.file(self.cache).read_text())

    def stop(self):
        self.stopped = True
        for process in list(self.alive):
            process.terminate()


def make_runs(runs, args):
    """{run: result} of those that succeeded, and messages of the others. The longest runs come first."""
    results, failures, processes = {}, [], Processes(args.cache)
    pool = ThreadPoolExecutor(args.jobs)
    with progress_in_seconds(sum(run.seconds for run in runs)) as (advance, say):
        try:
            futures = {}
            for run in sorted(runs, key=lambda run: -run.seconds):
                seconds_per_step = run.seconds / run.steps
                futures[pool.submit(processes.make, run, lambda s=seconds_per_step: advance(s))] = run
            for done in as_completed(futures):
                run = futures[done]
                try:
                    results[run] = done.result()
                    say(f"{run.title}: {results[run]['loss']:.4f} ({results[run]['seconds']:.0f} s)")
                except RuntimeError as error:
                    failures.append(str(error))
                    say(f"FAILED: {error}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
    return results, failures


class progress_in_seconds:
    """Gives (advance by estimated seconds of one core, print a line above the bar)."""

    def __init__(self, total):
        self.total = total

    def __enter__(self):
        try:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        except ImportError:
            self.bar = None
            return lambda seconds: None, lambda line: print(line, flush=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, transient=True, speed_estimate_period=600)
        self.bar.start()
        task = self.bar.add_task("fine-tuning", total=self.total)
        say = lambda line: self.bar.console.print(line, highlight=False, soft_wrap=True)  # noqa: E731
        return (lambda seconds: self.bar.advance(task, seconds)), say

    def __exit__(self, *error):
        if self.bar:
            self.bar.stop()


def save(args, facts, results, text):
    name = "accuracy-quick" if args.quick else "accuracy"
    singles = [results[run] for run in results]
    timing.save(name, facts, {"methods": METHODS, "runs": singles}, text, args.save)
    for task in args.tasks:
        path = args.save / f"{facts['date']}-{name}-{task}.png"
        accuracy_report.draw(results, task, path)
        print(f"written: {os.path.relpath(path)}")


def main():
    args = parse_arguments()
    torch.set_num_threads(1)  # pre-training's sums depend on it
    runs = wanted_runs(args)
    missing = [run for run in runs if not run.file(args.cache).is_file()]
    minutes = sum(run.seconds for run in missing) / min(args.jobs, max(1, len(missing))) / 60
    print(
        f"{len(runs) - len(missing)} of {len(runs)} runs are there already; the others take some {minutes:.0f} minutes"
    )
    try:
        for task in sorted({run.task for run in missing}, key=args.tasks.index):
            prepare(task, args)
    except (accuracy_data.DataError, accuracy_data.prepare_model.PrepareError) as error:
        print(f"bench_accuracy.py: {error}", file=sys.stderr)
        return 1
    made, failures = make_runs(missing, args) if missing else ({}, [])
    results = {}
    for run in runs:
        if run in made or run not in missing:
            results[run] = made.get(run) or json.loads(run.file(args.cache).read_text())

    columns, rows = accuracy_report.table(results)
    timing.show_table("Validation loss after fine-tuning, means over seeds", columns, rows)
    if args.quick:
        print("Tiny models with random weights: nothing here says anything about accuracy.")
    if args.save and results:
        facts = timing.describe(torch.device("cpu"))
        save(args, facts, results, timing.format_table(columns, rows))
    for failure in failures:
        print(f"bench_accuracy.py: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nbench_accuracy.py: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
