# SPDX-License-Identifier: Apache-2.0
"""What a fine-tuning run measured, and how it is shown: a table, a plot and a JSON file."""

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from statistics import mean, median

import matplotlib
import torch
from rich.table import Table

TITLES = {"adamw": "AdamW", "zenflow": "ZenFlow"}
COLOURS = {"adamw": "tab:grey", "zenflow": "tab:orange"}


@dataclass
class Run:
    """One optimizer's run. Lists have an entry per step; seconds are wall time."""

    name: str
    parameters: int
    model_bytes: int
    training_loss: list[float] = field(default_factory=list)
    validation_loss: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)  # of those, inside optimizer.step()
    host_bytes: int = 0  # held by the optimizer in host memory
    device_bytes: int = 0  # held by the optimizer beside the parameters
    peak_gpu_bytes: int | None = None
    zenflow: dict = field(default_factory=dict)  # ZenFlowOptimizer.stats()

    def measure_memory_and_traffic(self, optimizer, device):
        """Call once, at the end of the run."""
        if hasattr(optimizer, "stats"):
            stats = optimizer.stats()
            self.zenflow = asdict(stats)
            self.host_bytes, self.device_bytes = stats.host_bytes, stats.device_bytes
        else:
            state = [value for entry in optimizer.state.values() for value in entry.values()]
            self.device_bytes = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
        if device.type == "cuda":
            self.peak_gpu_bytes = torch.cuda.max_memory_allocated(device)


def machine(device):
    """What the numbers were measured on and with."""
    packages = ("torch", "transformers", "zenflow")
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{item.name: item.version for item in distributions() if item.name in packages},
    }


def rows(run):
    """(label, text) pairs; "-" where the optimizer has nothing to measure."""
    before, after = run.validation_loss[0][1], run.validation_loss[-1][1]
    zenflow = {name: value / len(run.step_seconds) for name, value in run.zenflow.get("total", {}).items()}
    moved = sum(value for name, value in zenflow.items() if name.endswith("_bytes")) / run.model_bytes
    yield "validation loss before", f"{before:.3f}"
    yield "validation loss after", f"{after:.3f}"
    yield "perplexity before", f"{math.exp(before):.2f}"
    yield "perplexity after", f"{math.exp(after):.2f}"
    yield "seconds per step (median)", f"{median(run.step_seconds):.3f}"
    yield "  of it in step() (median)", f"{median(run.optimizer_seconds):.3f}"
    yield "  of it in step() (mean, first left out)", f"{mean(run.optimizer_seconds[1:] or [0]):.3f}"
    yield "stall per step (mean)", f"{zenflow['stall_seconds']:.3f}" if zenflow else "-"
    yield "background update (mean)", f"{zenflow['host_update_seconds']:.3f}" if zenflow else "-"
    yield "bytes over PCIe per step / model size", f"{moved:.2f}" if zenflow else "-"
    yield "optimizer's host bytes per parameter", f"{run.host_bytes / run.parameters:.2f}"
    yield "optimizer's device bytes per parameter", f"{run.device_bytes / run.parameters:.2f}"
    overlap = run.zenflow.get("selection_overlap")
    yield "columns that the last selection kept", f"{overlap:.0%}" if overlap is not None else "-"
    if run.peak_gpu_bytes is not None:
        yield "peak GPU memory, GiB", f"{run.peak_gpu_bytes / 2**30:.2f}"


def table(runs, device):
    caption = "Same start, same batches. " if len(runs) > 1 else ""
    if device.type == "cpu" and any(run.zenflow for run in runs):
        caption += "On a CPU, host and device are one memory: bytes over PCIe are those that would cross."
    result = Table(title="Fine-tuning", caption=caption, caption_justify="left")
    result.add_column()
    for run in runs:
        result.add_column(TITLES[run.name], justify="right")
    for cells in zip(*(rows(run) for run in runs), strict=True):
        result.add_row(cells[0][0], *(text for _, text in cells))
    return result


def smooth(values, window=8):
    """Mean of the last `window` values at each point."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot(runs, title, path):
    matplotlib.use("Agg")  # draws into files; needs no display
    from matplotlib import pyplot  # here, as it may take seconds to look for fonts

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        colour, name = COLOURS[run.name], TITLES[run.name]
        steps = range(1, len(run.training_loss) + 1)
        axes.plot(steps, run.training_loss, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(run.training_loss), color=colour, label=f"{name}, training (mean of 8 steps)")
        axes.plot(*zip(*run.validation_loss, strict=True), "o--", color=colour, label=f"{name}, validation")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)  # there is no half a step
    axes.ticklabel_format(useOffset=False)  # losses, not what is added to one
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_json(runs, facts, path):
    content = {**facts, "runs": {run.name: asdict(run) for run in runs}}
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
