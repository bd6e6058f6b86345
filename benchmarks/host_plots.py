# SPDX-License-Identifier: Apache-2.0
"""The picture of a run of bench_kernels.py --cpu: share of the ceiling and time by size, and bars against peers."""

from host_measure import FP32, WINDOW
from host_peers import DEEPSPEED_LABEL, TORCH


def draw(records, best, path):
    """Writes `path`; false where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(17, 4.5), layout="constrained")
    shares, costs, bars = figure.subplots(1, 3)
    for form in (FP32, WINDOW):
        for threads in sorted({r.threads for r in records}):
            mine = sorted(
                (r for r in records if r.what == str(form) and r.threads == threads), key=lambda r: r.elements
            )
            for name in ("ring", "stream"):
                call = f"{name}, {best}"
                if mine and call in mine[0].times:
                    _line(shares, costs, mine, call, f"{form}, {name}, {_threads(threads)}")
    shares.axhline(1, color="black", linewidth=0.8)
    shares.set(
        xscale="log", ylim=0, xlabel="parameters", ylabel="share of the ceiling", title="How near to memory's limit"
    )
    costs.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ns per parameter", title="Time of one window")
    shares.legend(fontsize=7)
    costs.legend(fontsize=7)
    _bars(bars, records, best)
    figure.savefig(path, dpi=150)
    return True


def _threads(count):
    return f"{count} thread" + ("s" if count > 1 else "")


def _line(shares, costs, records, call, label):
    sizes = [r.elements for r in records]
    ratios = [r.share(call) for r in records]
    line = shares.plot(sizes, [x.median for x in ratios], marker="o", label=label)[0]
    shares.fill_between(sizes, [x.low for x in ratios], [x.high for x in ratios], alpha=0.15, color=line.get_color())
    costs.plot(sizes, [1e9 * r.times[call].median / r.elements for r in records], marker="o", label=label)


def _bars(axes, records, best):
    """Time per parameter of four gradients, at the largest size that all of them were measured at."""
    threads = max(r.threads for r in records)
    both = [{r.elements: r for r in records if r.what == str(f) and r.threads == threads} for f in (FP32, WINDOW)]
    common = both[0].keys() & both[1].keys()
    if not common:
        return
    single, window = (found[max(common)] for found in both)
    bars = {
        "torch fused x 4": (single.times.get(TORCH), 4),
        "DeepSpeed x 4": (single.times.get(DEEPSPEED_LABEL), 4),
        "ours, fp32 x 4": (single.times[f"ring, {best}"], 4),
        "ours, bf16 stream": (window.times[f"stream, {best}"], 1),
        "ours, bf16 ring": (window.times[f"ring, {best}"], 1),
    }
    bars = {name: (times, count) for name, (times, count) in bars.items() if times is not None}
    values = [1e9 * count * times.median / single.elements for times, count in bars.values()]
    spreads = [value * times.spread for value, (times, _) in zip(values, bars.values(), strict=True)]
    axes.barh(list(bars), values, xerr=spreads, color=["gray" if "ours" not in name else "tab:blue" for name in bars])
    axes.set(xlabel="ns per parameter", title=f"Four gradients, {single.elements:,} parameters, {_threads(threads)}")
