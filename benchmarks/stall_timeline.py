# SPDX-License-Identifier: Apache-2.0
"""The picture of bench_stall.py: what device, link and host did in some steps of each way to train."""

import textwrap

LANES = {"device": ("#3b6ea5", 3), "down": ("#c97b2c", 2), "host": ("#5a8f4b", 1), "up": ("#8c5aa8", 0)}
NAMES = {"device": "device", "down": "device to host", "host": "host update", "up": "host to device"}
STEPS_SHOWN = 8


def draw(path, title, results):
    """Writes `path`; false where matplotlib is not installed.

    Args:
        results: {label: result of stall_run.measure}.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    windows = [r for r in results.values() if r["update_interval"] > 1] or results.values()
    shown = max(r["starts"][min(STEPS_SHOWN, r["steps"])] for r in windows)
    figure = Figure(figsize=(12, 1.15 * len(results) + 1), layout="constrained")
    axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, result) in zip(axes, results.items(), strict=True):
        for lane, (colour, height) in LANES.items():
            spans = [(begin, end - begin) for begin, end in result["lanes"][lane] if begin < shown]
            axis.broken_barh([(1e3 * a, 1e3 * b) for a, b in spans], (height - 0.4, 0.8), facecolors=colour)
        for start in result["starts"]:
            if start < shown:
                axis.axvline(1e3 * start, color="black", linewidth=0.5)
        axis.set_yticks([height for _, height in LANES.values()], [NAMES[lane] for lane in LANES], fontsize=6)
        axis.set_xlim(0, 1e3 * shown)
        axis.set_ylim(-0.6, 3.6)
        axis.set_title(label, fontsize=8, loc="left")
    axes[-1].set_xlabel("ms; lines: steps begin on the device", fontsize=8)
    figure.suptitle("\n".join(textwrap.wrap(title, 130)), fontsize=9)
    figure.savefig(path, dpi=130)
    return True
