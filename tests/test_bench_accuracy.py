# SPDX-License-Identifier: Apache-2.0
"""The accuracy benchmark works in its quick form, goes on where it was, and judges by AdamW's own spread."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy_data  # noqa: E402
import accuracy_report  # noqa: E402
import accuracy_runs  # noqa: E402
import accuracy_tasks  # noqa: E402
from accuracy_runs import Run  # noqa: E402


def command(cache, *arguments):
    return [
        sys.executable,
        *map(str, (BENCHMARKS / "bench_accuracy.py", "--quick", "--jobs", 2, "--cache", cache, *arguments)),
    ]


def bench(cache, *arguments):
    return subprocess.run(command(cache, *arguments), capture_output=True, text=True, timeout=600, check=False)


def run_files(cache):
    return {path: path.read_bytes() for path in (cache / "runs").glob("*.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(cache, saved, process) of a whole quick benchmark of one task."""
    cache, saved = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("saved")
    return cache, saved, bench(cache, "--only", "gpt", "--save", saved)


def test_a_benchmark_saves_table_numbers_and_picture(finished):
    cache, saved, done = finished
    assert done.returncode == 0, done.stderr
    assert "0 of 8 runs are there already" in done.stdout
    assert "nothing here says anything about accuracy" in done.stdout
    (text,) = saved.glob("*-accuracy-quick.txt")
    for word in ("commit: ", "torch: ", "processor: ", "gpt, 12, 0.001", "published", "AdamW's spread", "verdict"):
        assert word in text.read_text()
    content = json.loads(text.with_suffix(".json").read_text())
    assert len(content["runs"]) == len(run_files(cache)) == 8
    for result in content["runs"]:
        assert result["curve"][0][0] == 0 and result["curve"][-1] == [12, result["loss"]]
    (picture,) = saved.glob("*-accuracy-quick-gpt.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_methods_start_at_the_same_loss(finished):
    results = [json.loads(content) for content in run_files(finished[0]).values()]
    assert len({result["curve"][0][1] for result in results}) == 1
    assert len({result["loss"] for result in results}) == 8


def test_only_missing_runs_are_made_and_come_out_the_same(finished):
    cache = finished[0]
    before = run_files(cache)
    missing = next(path for path in before if "ours" in path.name)
    missing.unlink()
    others = {path: path.stat().st_mtime_ns for path in run_files(cache)}
    done = bench(cache, "--only", "gpt")
    assert done.returncode == 0, done.stderr
    assert "7 of 8 runs are there already" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in others} == others
    assert json.loads(missing.read_text())["curve"] == json.loads(before[missing])["curve"]


@pytest.mark.parametrize("method", ["AdamW", "ours"])
@pytest.mark.parametrize("task", ["minilm", "smollm"])
def test_the_other_tasks_learn_and_repeat(task, method, tmp_path):
    run = Run(task, 12, 1e-3, method, 0, True)
    first, again = (accuracy_runs.train(run, tmp_path) for _ in range(2))
    assert first["curve"] == again["curve"]
    assert first["loss"] < first["curve"][0][1]


def heed_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's & ignores them for all that it starts


def test_an_interrupted_benchmark_leaves_whole_results_and_no_process(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, "--only", "gpt", "--seeds", 50),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    while "seed" not in process.stdout.readline():  # a run is done
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command goes on" in errors
    files = run_files(tmp_path)
    assert 0 < len(files) < 150
    assert all("curve" in json.loads(content) for content in files.values())


def test_a_failed_run_is_named_and_the_others_go_on(finished, tmp_path):
    start = next(finished[0].glob("byte-gpt-*.pt"))
    (tmp_path / start.name).write_bytes(b"not a model")
    done = bench(tmp_path, "--only", "gpt", "--seeds", 1)
    assert done.returncode == 1
    assert "gpt, 12 steps, lr 0.001, seed 0, ours: exit 1" in done.stderr


# What a result depends on


def test_a_result_is_known_by_settings_and_code(monkeypatch, tmp_path):
    run = Run("gpt", 160, 3e-4, "ours", 0, False)
    known = run.file(tmp_path)
    assert known == run.file(tmp_path)
    others = [Run("gpt", 160, 3e-4, "ours", 1, False), Run("gpt", 160, 3e-4, "ours", 0, True)]
    monkeypatch.setitem(accuracy_runs.METHODS, "ours", {"topk_ratio": 0.2})
    others = [run.file(tmp_path), *(other.file(tmp_path) for other in others)]
    assert len({known, *others}) == 4
    monkeypatch.undo()
    monkeypatch.setattr(accuracy_runs, "code_version", lambda method: "other code")
    assert run.file(tmp_path) != known


def test_a_seed_is_an_order_of_the_same_rows():
    rows = torch.arange(10)
    (first,), (again,), (other,) = (
        [torch.cat(batch) for batch in zip(*accuracy_tasks.batches((rows,), 5, 4, seed), strict=True)]
        for seed in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)
    for order in (first, other):
        assert order[:10].sort().values.equal(rows) and order[10:].sort().values.equal(rows)


def test_validation_rows_are_never_trained_on():
    training, validation = accuracy_tasks.held_out((torch.arange(100), torch.arange(100, 200)), 4)
    assert training[0].tolist() == list(range(90)) and training[1].tolist() == list(range(100, 190))
    assert validation[0].tolist() == [90, 93, 96, 99] and validation[1].tolist() == [190, 193, 196, 199]


# Verdicts


def results_of(**losses):
    """{Run: result} of {method: losses of seeds 0, 1, ...}."""
    return {
        Run("gpt", 4, 1e-3, method, seed, True): {"loss": loss, "curve": [(0, 3.0), (4, loss)]}
        for method, values in losses.items()
        for seed, loss in enumerate(values)
    }


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ((2.005, 2.025), "as AdamW, better than published"),
        ((1.9, 1.9), "as AdamW, better than published"),
        ((2.04, 2.06), "2.0 spreads above AdamW, better than published"),
        ((2.30, 2.32), "15.0 spreads above AdamW, 0.050 WORSE than published"),
    ],
)
def test_the_yardstick_is_the_range_of_adamw(ours, words):
    results = results_of(AdamW=(2.00, 2.02), published=(2.25, 2.27), ours=ours)
    columns, (row,) = accuracy_report.table(results)
    assert row[-1] == words
    assert row[columns.index("AdamW's spread")] == "0.020"


def test_one_seed_has_no_spread():
    columns, (row,) = accuracy_report.table(results_of(AdamW=(2.0,), published=(2.2,), ours=(2.1,)))
    assert row[-1] == "no spread of one seed, better than published"
    assert row[columns.index("in spreads")] == "-"


@pytest.mark.parametrize(("adamw", "ours"), [((2.0, 2.5), (2.1,)), ((2.0,), (2.1, 9.9))])
def test_methods_are_compared_on_the_seeds_that_both_have(adamw, ours):
    results = results_of(AdamW=adamw, ours=ours)
    columns, (row,) = accuracy_report.table(results)
    assert row[columns.index("ours - AdamW")] == "+0.100"
    assert "ours - published" in columns and row[columns.index("ours - published")] == "-"


# Fetching


def test_without_apt_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(accuracy_data.DataError, match=r"apt-get is not here: .*--only minilm, or put Debian's r-cran"):
        accuracy_data.austen(tmp_path)


def test_apt_that_brings_nothing_is_quoted(monkeypatch, tmp_path):
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Unable to locate package' >&2\nexit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(accuracy_data.DataError, match=r"\(E: Unable to locate package\): run `apt-get update` as root"):
        accuracy_data.austen(tmp_path)


def test_another_version_of_the_novels_is_refused(tmp_path):
    package = tmp_path / "austen" / accuracy_data.AUSTEN
    package.parent.mkdir()
    package.write_bytes(b"!<arch>\n")
    with pytest.raises(accuracy_data.DataError, match=f"sha256 {hashlib.sha256(b'!<arch>' + bytes([10])).hexdigest()}"):
        accuracy_data.austen(tmp_path)


def test_members_of_a_package_are_found():
    def member(name, content):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    package = b"!<arch>\n" + member("control.tar.xz", b"odd") + member("data.tar.xz", b"found")
    assert accuracy_data.deb_member(package, "data.tar") == b"found"
    with pytest.raises(accuracy_data.DataError, match="holds no other"):
        accuracy_data.deb_member(package, "other")


def test_pip_that_fails_leaves_no_folder(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("a-package-without-a-hash==1.0\n")
    with pytest.raises(accuracy_data.DataError, match=r"pip cannot fetch what .*requirements.txt names"):
        accuracy_data.fetched(tmp_path / "folder", requirements)
    assert not (tmp_path / "folder").exists()
