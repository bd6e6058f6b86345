# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run where there is no GPU, say so, and count right."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_stall  # noqa: E402
import device_trace  # noqa: E402
import host_measure  # noqa: E402
import host_targets  # noqa: E402
import stall_scenarios  # noqa: E402
import stall_timeline  # noqa: E402
import step_methods  # noqa: E402
import timing  # noqa: E402
import zenflow  # noqa: E402
from bench_step import publishing_ratio  # noqa: E402

EMULATED = next(
    (path for name in ("paced", "emulation-none") if (path := BENCHMARKS.parent / "build" / name / "python").is_dir()),
    None,
)


def run(name, *arguments, path=None):
    command = [sys.executable, BENCHMARKS / name, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, check=False, env=environment
    )


def test_device_kernels_in_plain_torch():
    done = run("bench_kernels.py", "--torch-only", "--megabytes", 1, "--repetitions", 1, "--inner", 1, "--no-save")
    assert done.returncode == 0, done.stderr
    for word in ("selective_adam", "scatter, checksums", "top_k of 28,672", "The kernels need a GPU"):
        assert word in done.stdout


def test_host_kernels():
    done = run("bench_kernels.py", "--cpu", "--quick", "--sizes", 1e4, 1e5, "--threads", 2, "--no-save")
    assert done.returncode == 0, done.stderr
    for word in ("bf16, S=4: stream / ring", "torch AdamW(fused=True)", "pack, share of copy bandwidth", "98,304"):
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_say_what_they_need():
    done = run("bench_kernels.py")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr


@pytest.mark.slow
def test_steps_on_cpu_tensors():
    sizes = ["--layers", 1, "--hidden", 256, "--intermediate", 256, "--vocabulary", 300, "--batch", 1, "--sequence", 8]
    done = run("bench_step.py", "--cpu", "--no-save", "--steps", 9, *sizes)
    assert done.returncode == 0, done.stderr
    assert "it failed" not in done.stdout, done.stdout
    for method in step_methods.METHODS.values():
        assert method.label in done.stdout
    assert "nothing here says anything about a GPU" in done.stdout
    assert "DeepSpeed 0.19.6 ZenFlow: it needs a GPU" in done.stdout


@pytest.mark.skipif(EMULATED is None, reason="zenflow was not built on the emulated device: make paced")
def test_what_crosses_the_simulated_link_is_what_the_formula_says():
    methods = {"none": 0.0, "synchronous": 2.0, "default": 1.125, "leaving": 1.125}
    done = run("bench_stall.py", "--quick", "--methods", ",".join(methods), path=EMULATED)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith(("0.000", "2.000", "1.125"))]
    assert [(float(row[-2]), float(row[-1])) for row in rows] == [(x, x) for x in methods.values()], done.stdout
    assert "Predicted steps differ from measured ones by" in done.stdout
    print(done.stdout)  # a busy machine's times: for the report, and not judged


@pytest.mark.skipif(hasattr(zenflow._C, "emulation"), reason="this zenflow is on the emulated device")
def test_the_simulated_device_says_what_it_needs():
    done = run("bench_stall.py")
    assert done.returncode == 1
    assert "make bench-stall" in done.stderr


def test_stall_scenarios_keep_their_ratios():
    for scenario in stall_scenarios.SCENARIOS.values():
        device, link = scenario.scaled(host_seconds_here=0.1, bytes_here=2e8)
        assert 0.1 / device == pytest.approx(scenario.host / scenario.device)
        assert 2e8 / link / device == pytest.approx(scenario.copy / scenario.device)
    llama = stall_scenarios.SCENARIOS["a100"]
    assert llama.device + llama.copy + llama.host == pytest.approx(6.79)


@pytest.mark.parametrize("intervals", [(1,), (1, 1), (4,), (1, 4)])
def test_any_ways_to_train_can_be_drawn(intervals, tmp_path):
    pytest.importorskip("matplotlib")
    lanes = {lane: [(0.0, 0.5), (1.0, 1.5)] for lane in stall_timeline.LANES}
    results = {
        f"way {i}": {"update_interval": interval, "steps": 4, "starts": [0.0, 1.0, 2.0, 3.0, 4.0], "lanes": lanes}
        for i, interval in enumerate(intervals)
    }
    assert stall_timeline.draw(tmp_path / "drawn.png", "title", results)
    assert (tmp_path / "drawn.png").stat().st_size > 0


@pytest.mark.parametrize(("quick", "name"), [(False, "stall"), (True, "stall-quick")])
def test_numbers_are_saved_before_pictures_and_a_quick_run_overwrites_no_real_one(quick, name, monkeypatch):
    written = []
    monkeypatch.setattr(bench_stall, "save", lambda name, facts, results, text: written.append((name, results)))
    monkeypatch.setattr(bench_stall, "draw", lambda path, title, shown: written.append((path.name, shown)) or True)
    rounds = [{"step_seconds": 1.0, "lanes": {}}]
    bench_stall.save_all(SimpleNamespace(quick=quick), {"date": "today"}, {"fits": {"none": rounds}}, {}, "")
    assert [what for what, _ in written] == [name, f"today-{name}-fits.png"]
    assert written[0][1]["rounds"] == {"fits": {"none": [{"step_seconds": 1.0}]}}
    assert "lanes" in next(iter(written[1][1].values()))


def test_without_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not stall_timeline.draw(tmp_path / "drawn.png", "title", {})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench_stall.py", ["--rounds", "0"]),
        ("bench_stall.py", ["--elements", "nan"]),
        ("bench_kernels.py", ["--cpu", "--quick", "--sizes", "0"]),
        ("bench_kernels.py", ["--cpu", "--quick", "--threads", "-1"]),
        ("bench_step.py", ["--cpu", "--steps", "0"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_measured(name, arguments):
    done = run(name, *arguments)
    assert done.returncode == 2 and f"{arguments[-1]} is not an integer >= 1" in done.stderr, done.stderr


def test_results_carry_machine_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "HERE", tmp_path)
    facts = timing.describe(torch.device("cpu"))
    assert {"date", "command", "commit", "zenflow", "torch", "device", "processor"} <= facts.keys()
    timing.save("name", facts, {"answer": 42}, "a table")
    (text,) = (tmp_path / "results").glob("*-name.txt")
    assert "no GPU was used" in text.read_text() and text.read_text().endswith("a table\n")
    assert json.loads(text.with_suffix(".json").read_text())["answer"] == 42


def test_times():
    times = timing.Times(tuple(float(i) for i in range(1, 12)))
    assert times.median == 6.0
    assert times.spread == pytest.approx((10 - 2) / 2 / 6)


def test_ratios_are_taken_within_a_round():
    slow_machine, fast_machine = 10.0, 1.0
    ours = timing.Times((slow_machine, fast_machine, slow_machine))
    theirs = timing.Times((2 * slow_machine, 2 * fast_machine, 2 * slow_machine))
    assert timing.Ratio.of(theirs, ours) == timing.Ratio(2.0, 2.0, 2.0)
    assert timing.Ratio.of(theirs + ours, ours, factor=0.5).median == 1.5


def test_the_worst_size_decides_on_a_target():
    good, bad = timing.Ratio(1.2, 1.1, 1.3), timing.Ratio(0.8, 0.7, 0.9)
    at_least = host_targets.judge("1", "speed", 1, host_targets.AT_LEAST, 1.0, [(10, good), (20, bad)])
    assert (at_least.holds, at_least.elements) == (False, 20)
    at_most = host_targets.judge("8", "share", 1, host_targets.AT_MOST, 1.0, [(10, good), (20, bad)])
    assert (at_most.holds, at_most.elements) == (False, 10)
    assert host_targets.judge("1", "speed", 1, host_targets.AT_LEAST, 1.0, [(10, None)]).holds is None


def test_a_size_that_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(host_measure._C, "available_host_bytes", lambda: 1 << 20)
    session = host_measure.Session(SimpleNamespace(), None)
    assert session.update(host_measure.FP32, 1_000_000, 1) == []
    assert "fp32, S=1, 1,000,000 elements: needs 0.0 GB" in session.left_out[0]


def test_idle_time_is_what_no_kernel_covers():
    assert device_trace.idle_time([]) == 0
    assert device_trace.idle_time([(5, 6), (0, 2), (1, 3), (3, 4)]) == 1
    copy = {"cat": "gpu_memcpy", "ts": 2.0, "dur": 6.0, "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 70}}
    kernels = [{"cat": "kernel", "ts": float(t), "dur": 2.0, "name": "k"} for t in (0, 8)]
    activity = device_trace.activity_of([copy, *kernels, {"ph": "M"}])
    assert activity == device_trace.Activity(span=10e-6, idle=6e-6, d2h_bytes=70, h2d_bytes=0)


def test_the_publishing_step_is_compared_with_its_neighbours():
    assert publishing_ratio([1.0, 3.0, 2.0, 9.0], [False, True, False, False]) == 2.0
    assert publishing_ratio([1.0, 1.0, 1.0], [None] * 3) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [("0.19.8", "scrambles weights"), ("0.18.0", "0.19.6 is the one"), (None, "is not installed")],
)
def test_other_versions_of_deepspeed_are_refused(found, words, monkeypatch):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(step_methods.metadata, "version", version)
    on_gpu = SimpleNamespace(is_cuda=True)
    model = SimpleNamespace(parameters=lambda: iter([on_gpu]))
    with pytest.raises(step_methods.Skip, match=words):
        step_methods.DeepSpeedZenFlow(model, None)
