# SPDX-License-Identifier: Apache-2.0
"""Single runs of the accuracy benchmark: one fine-tuning with one optimizer, and its result as a file in the cache.

As a program, it makes one run and prints a line per step; bench_accuracy.py starts it.
"""

import contextlib
import functools
import hashlib
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import accuracy_tasks
import zenflow

HERE = Path(__file__).resolve().parent
WEIGHT_DECAY = 0.01

# name: settings of ZenFlowOptimizer; None is torch.optim.AdamW. All others have their defaults: topk_ratio 0.1,
# update_interval 4, selection once in 16 windows.
METHODS = {
    "AdamW": None,
    "published": {"deferred_rule": "mean", "update_delay": 4, "lookahead": 0},
    "ours": {},
    "bfloat16 moments": {"state_dtype": "bfloat16"},
    "no look-ahead": {"lookahead": 0},
}
LONG_ONLY = ("no look-ahead",)


@dataclass(frozen=True)
class Run:
    task: str
    steps: int
    lr: float
    method: str
    seed: int
    quick: bool

    @property
    def case(self):
        return self.task, self.steps, self.lr

    @property
    def title(self):
        return f"{self.task}, {self.steps} steps, lr {self.lr:g}, seed {self.seed}, {self.method}"

    @property
    def seconds(self):
        """Rough, on one core."""
        return self.steps * accuracy_tasks.schedule_of(self.task, self.quick).step_seconds * 1.3  # evaluations: 0.3

    def file(self, cache):
        """Where its result lies: another file as soon as anything that it depends on is another."""
        schedule = accuracy_tasks.schedule_of(self.task, self.quick)
        facts = [asdict(self), METHODS[self.method], schedule.batch, schedule.settings, code_version(self.method)]
        key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]
        name = f"{self.task}-{self.steps}-{self.lr:g}-{self.method.replace(' ', '-')}-{self.seed}-{key}.json"
        return cache / "runs" / name


@functools.cache
def code_version(method):
    """What a result depends on: torch, Python with its reference text, this benchmark, and zenflow as imported."""
    files = [HERE / name for name in ("accuracy_runs.py", "accuracy_tasks.py", "step_model.py")]
    if METHODS[method] is not None:
        package = Path(zenflow.__file__).parent
        files += sorted([*package.rglob("*.py"), *package.glob("_C*.so")])
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return torch.__version__, platform.python_version(), contents


def make_optimizer(run, model):
    common = {"lr": run.lr, "weight_decay": WEIGHT_DECAY}
    settings = METHODS[run.method]
    if settings is None:
        return torch.optim.AdamW(model.parameters(), **common, fused=True)
    settings = accuracy_tasks.schedule_of(run.task, run.quick).settings | settings
    return zenflow.ZenFlowOptimizer(model.parameters(), **common, **settings, num_threads=1)


@torch.no_grad()
def evaluate(task, model, optimizer, size):
    """Mean loss on the validation rows, with the settled masters."""
    rows = len(task.validation[0])
    with optimizer.settled() if hasattr(optimizer, "settled") else contextlib.nullcontext():
        parts = [tuple(column[i : i + size] for column in task.validation) for i in range(0, rows, size)]
        return sum(task.loss(model, *part).item() * len(part[0]) for part in parts) / rows


def train(run, cache, advance=lambda: None):
    """The result: a dict of plain values. The learning rate is constant."""
    size = accuracy_tasks.schedule_of(run.task, run.quick).batch
    task = accuracy_tasks.load(run.task, cache, run.quick)
    torch.manual_seed(run.seed)
    model = task.new_model().eval()  # no dropout
    optimizer = make_optimizer(run, model)
    between = max(4, run.steps // 5 // 4 * 4)  # at the ends of windows
    curve = [(0, evaluate(task, model, optimizer, size))]
    began = time.perf_counter()
    for step, batch in enumerate(accuracy_tasks.batches(task.training, size, run.steps, run.seed), start=1):
        task.loss(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % between == 0 and step <= run.steps - between // 2:
            curve.append((step, evaluate(task, model, optimizer, size)))
        advance()
    if hasattr(optimizer, "flush"):
        optimizer.flush()  # no gradient is left out
    curve.append((run.steps, evaluate(task, model, optimizer, size)))
    return {"run": asdict(run), "loss": curve[-1][1], "curve": curve, "seconds": time.perf_counter() - began}


def main():
    """Arguments: the run's fields as JSON, the cache's folder."""
    run, cache = Run(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)  # as many runs as cores go on at once; and sums depend on the number of threads
    result = train(run, cache, advance=lambda: print("step", flush=True))
    file = run.file(cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".part").write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".part").replace(file)  # whole or not at all


if __name__ == "__main__":
    main()
