# SPDX-License-Identifier: Apache-2.0
"""Takes each barrier and each warp operation of the kernels away in turn; the kernels' tests must fail each time.

    python tests/cuda_emulation/mutate_barriers.py BUILD/kernel_tests

Nothing is rebuilt: the emulated device lets threads pass the line without waiting (barrier_sites.h). At a barrier all
go on at once; in a warp operation each lane is alone. Exit status 1 if a deletion goes unnoticed, if the tests never
reach a line, or if two operations share one.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPERATION = re.compile(r"\b__(?:syncthreads(?:_and|_or|_count)?|[a-z_]+_sync|syncwarp)\s*\(")
TIMEOUT = 120  # seconds; a kernel that loops for ever has been noticed


def operations() -> dict[str, int]:
    """How many barriers and warp operations there are on each line that has any."""
    found = {}
    for path in sorted([*ROOT.glob("cuda/*.cu"), *ROOT.glob("cuda/*.h")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if count := len(OPERATION.findall(line.split("//")[0])):
                found[f"{path.relative_to(ROOT)}:{number}"] = count
    return found


def first_failure(tests: str, filter: str = "", **environment: str) -> str | None:
    """The first test that fails, or None; the rest are not waited for. The filter is part of the tests' names."""
    settings = {**os.environ, "ZENFLOW_EMULATION_DELAY_US": "0", **environment}
    command = [tests, filter] if filter else [tests]
    failed, matched = None, True
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        alarm = threading.Timer(TIMEOUT, run.kill)
        alarm.start()
        for line in run.stdout:
            matched &= line != "0 passed, 0 failed\n"
            if line.startswith("FAILED"):
                failed = failed or line.split()[1]
                run.kill()
        alarm.cancel()
    return failed or (f"status {run.returncode}" if matched and run.returncode else None)


def main() -> int:
    tests = sys.argv[1]
    with tempfile.NamedTemporaryFile("r") as listed:
        if failed := first_failure(tests, ZENFLOW_EMULATION_LIST_BARRIERS=listed.name):
            print(f"the tests fail as they are: {failed}")
            return 1
        reached = set(listed.read().split())

    unnoticed = 0
    for place, count in operations().items():
        if count > 1:
            verdict, good = f"{count} operations share the line: give each its own", False
        elif place not in reached:
            verdict, good = "no test gets there", False
        else:
            # Most kernels' tests are named after their file: these first.
            settings = {"ZENFLOW_EMULATION_DELETE_BARRIER": place}
            failed = first_failure(tests, Path(place).stem, **settings) or first_failure(tests, **settings)
            verdict, good = (f"noticed by {failed}", True) if failed else ("NOT NOTICED", False)
        unnoticed += not good
        print(f"{place:32} {verdict}", flush=True)
    print(f"{len(operations())} lines, {unnoticed} to mend")
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main())
