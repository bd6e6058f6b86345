# SPDX-License-Identifier: Apache-2.0
"""docs/failures.md names only tests that exist, and has a report and a test in each row."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "failures.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "[" in line]
TESTS = sorted(set(re.findall(r"`([^`\s]+::[^`]+)`", PAGE)))


def test_every_row_has_one_report_and_a_test():
    assert len(ROWS) > 30
    reports = []
    for row in ROWS:
        kind, report, tests = row.strip("| ").split(" | ")
        assert kind
        assert re.fullmatch(r"\[[\w. -]+ \d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", report), row
        assert re.fullmatch(r"`[^`]+::\w+`(, `[^`]+::\w+`)*", tests), row
        reports.append(report)
    assert len(set(reports)) == len(reports)


@pytest.mark.parametrize("test", TESTS)
def test_each_test_that_is_named_exists(test):
    file, name = test.split("::")
    source = (ROOT / "tests" / file).read_text()
    definition = rf"^TEST\({name}\)" if file.endswith(".cpp") else rf"^(def {name}\(|{name}\b.* = )"
    assert re.search(definition, source, re.MULTILINE), f"{file} has no {name}"


def test_the_readme_leads_to_the_page():
    assert "docs/failures.md" in (ROOT / "README.md").read_text()
