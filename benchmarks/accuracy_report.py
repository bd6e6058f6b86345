# SPDX-License-Identifier: Apache-2.0
"""The accuracy benchmark's verdicts, table and pictures, out of the results of its runs.

Results are {Run: {"loss": ..., "curve": [(step, loss), ...], ...}}.
"""

from statistics import mean

from accuracy_runs import METHODS

COLOURS = dict(zip(METHODS, ("tab:grey", "tab:blue", "tab:orange", "tab:green", "tab:purple"), strict=False))


def by_case(results):
    """{(task, steps, lr): {method: {seed: result}}}, in the order of the runs."""
    cases = {}
    for run, result in results.items():
        cases.setdefault(run.case, {}).setdefault(run.method, {})[run.seed] = result
    return cases


def losses(methods, method):
    return [result["loss"] for result in methods.get(method, {}).values()]


def spread(values):
    """Largest minus smallest over the seeds; None for a single one."""
    return max(values) - min(values) if len(values) > 1 else None


def difference(methods, method, other):
    """Mean of `method` less `other` over the seeds that both have: same batches; None if there are none."""
    pairs = [
        (result["loss"], methods[other][seed]["loss"])
        for seed, result in methods.get(method, {}).items()
        if seed in methods.get(other, {})
    ]
    return mean(a - b for a, b in pairs) if pairs else None


def verdict(methods, method="ours"):
    """In words: how `method` does against AdamW, in AdamW's own spread, and against the published rule."""
    words = []
    gap, yardstick = difference(methods, method, "AdamW"), spread(losses(methods, "AdamW"))
    if gap is not None and yardstick is None:
        words.append("no spread of one seed")
    elif gap is not None:
        words.append("as AdamW" if gap <= yardstick else f"{gap / yardstick:.1f} spreads above AdamW")
    gain = difference(methods, method, "published")
    if gain is not None:
        words.append("better than published" if gain < 0 else f"{gain:.3f} WORSE than published")
    return ", ".join(words) or "-"


def number(value, form=".3f"):
    return "-" if value is None else format(value, form)


def table(results):
    """(columns, rows): final validation losses, means over the seeds."""
    cases = by_case(results)
    methods = [name for name in METHODS if any(name in case for case in cases.values())]
    columns = ["task, steps, lr", "seeds", *methods, "AdamW's spread", "ours - AdamW", "in spreads", "ours - published"]
    rows = []
    for (task, steps, lr), case in cases.items():
        gap, yardstick = difference(case, "ours", "AdamW"), spread(losses(case, "AdamW"))
        means = [mean(values) if (values := losses(case, name)) else None for name in methods]
        rows.append(
            [
                f"{task}, {steps}, {lr:g}",
                len(losses(case, "AdamW")),
                *map(number, means),
                number(yardstick),
                number(gap, "+.3f"),
                number(gap / yardstick if gap is not None and yardstick else None, "+.1f"),
                number(difference(case, "ours", "published"), "+.3f"),
                verdict(case),
            ]
        )
    return [*columns, "verdict"], rows


def draw(results, task, path):
    """The task's validation curves: a panel per case, a line per method, a band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no display
    from matplotlib import pyplot

    cases = {case: methods for case, methods in by_case(results).items() if case[0] == task}
    figure, panels = pyplot.subplots(1, len(cases), figsize=(5 * len(cases), 4), layout="constrained", squeeze=False)
    for panel, ((_, steps, lr), methods) in zip(panels[0], cases.items(), strict=True):
        for method, seeds in methods.items():
            curves = [result["curve"] for result in seeds.values()]
            at = [step for step, _ in curves[0]]
            points = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
            panel.fill_between(at, list(map(min, points)), list(map(max, points)), color=COLOURS[method], alpha=0.2)
            panel.plot(at, list(map(mean, points)), "o-", markersize=3, color=COLOURS[method], label=method)
        panel.set(title=f"{task}, {steps} steps, lr {lr:g}", xlabel="step", ylabel="validation loss")
        panel.grid(alpha=0.3)
    panels[0][0].legend(title="mean, and range over seeds")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
