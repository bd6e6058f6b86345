# SPDX-License-Identifier: Apache-2.0
"""What a run of bench_kernels.py --cpu prints and saves: targets first, then each workload's calls."""

from pathlib import Path

import host_plots
from host_cases import CEILING
from host_targets import Judge
from timing import Ratio, format_table, save, show_table

TARGET_COLUMNS = ["target", "what", "threads", "limit", "measured [10 %, 90 %]", "at", ""]
CALL_COLUMNS = ["workload", "parameters", "threads", "call", "ns/parameter", "+-", "GB/s", "of ceiling [10 %, 90 %]"]


def huge_pages():
    """What the system grants: our arrays ask for huge pages, torch's tensors get them only where they are "always"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def call_rows(record):
    for call, times in record.times.items():
        name, _, rest = call.partition(", ")
        moved = record.bytes.get(name)
        yield [
            record.what,
            f"{record.elements:,}",
            record.threads,
            call,
            f"{1e9 * times.median / record.elements:.3f}",
            f"{times.spread:.0%}",
            f"{moved / times.median / 1e9:.1f}" if moved else "",
            _share(record, name, rest, times),
        ]


def _share(record, name, rest, times):
    if rest.startswith(CEILING) or name not in record.bytes:
        return ""
    against = name if any(call.startswith(f"{name}, {CEILING}") for call in record.times) else "copy"
    if not any(call.startswith(f"{against}, {CEILING}") for call in record.times):
        return ""
    return Ratio.of(record.ceiling(against), times, record.bytes[name] / record.bytes[against])


def report(records, session, facts, notes, keep):
    judge = Judge(records, session.isas)
    verdicts = judge.all()
    targets = [v.row() for v in verdicts]
    calls = [row for record in records for row in call_rows(record)]
    title = f"Targets: of the sizes from {judge.from_size:,.0f} parameters on the worst counts"
    show_table(title, TARGET_COLUMNS, targets)
    show_table("Calls, medians", CALL_COLUMNS, calls)
    notes = [*notes, *(f"left out: {reason}" for reason in session.left_out)]
    print("\n".join(notes))
    if not keep:
        return
    measured = {"targets": [v.plain() for v in verdicts], "notes": notes, "records": [r.plain() for r in records]}
    text = [title, format_table(TARGET_COLUMNS, targets), "", format_table(CALL_COLUMNS, calls), "", *notes]
    path = save("kernels-cpu", facts, measured, "\n".join(text))
    picture = path.with_suffix(".png")
    if host_plots.draw(records, session.isas[-1], picture):
        print(f"written: {picture}")
    else:
        print("no pictures: matplotlib is not installed (pip install '.[bench]')")
