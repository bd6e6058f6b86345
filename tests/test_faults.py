# SPDX-License-Identifier: Apache-2.0
"""What may befall a training process: signals, exceptions, forks, exits, threads, a lack of cores or memory.

Each test runs a program of fault_programs/ in a process of its own and looks at its exit code, at what it wrote to
stderr, and at the clock: a hang is killed and fails. That weights and state are right the programs check themselves.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

# Python itself would warn of a fork beside threads, which is what some of the programs are about.
PYTHON = [sys.executable, "-W", "ignore::DeprecationWarning"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",  # torch's threads are not what forks and counts are about
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
}
LIMIT = 120  # seconds, on a busy machine


def launch(*arguments, **pipes):
    command = [*PYTHON, "-m", "fault_programs", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, **pipes)


@pytest.fixture(scope="module")
def nursery():
    """A process that has imported torch and forks one for each program."""
    with launch(stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n", "it has not started; see its stderr"
        yield process
        process.stdin.close()


@pytest.fixture
def run(nursery, tmp_path):
    """run(program, arguments): its stdout, after checking how it ended and what it said."""

    def run(name, *arguments, code=0, errors=""):
        files = [tmp_path / f"{name}.{stream}" for stream in ("out", "err")]
        print(json.dumps([*map(str, files), LIMIT, name, *arguments]), file=nursery.stdin, flush=True)
        ended = int(nursery.stdout.readline())
        output, said = (file.read_text() for file in files)
        check_end(ended, said, code, errors)
        return output

    return run


def check_end(ended, said, code=0, errors=""):
    """stderr is what was expected, and only that: no message of a destructor, no traceback."""
    assert ended == code, f"exit code {ended}, expected {code}; stderr:\n{said}"
    for line in errors.splitlines():
        assert line in said, said
    if not errors:
        assert said == ""
    for word in ("terminate called", "Exception ignored", "Fatal", "zenflow: "):
        assert word not in said, said


def start(name, *arguments):
    """A program in a process of its own, from the first instruction on; returns once it is "ready"."""
    process = launch(name, *arguments, stderr=subprocess.PIPE)
    wait_until_ready(process)
    return process


def wait_until_ready(process):
    line = process.stdout.readline()
    assert line == "ready\n", f"{line!r}, stderr:\n{process.stderr.read()}"


def finish(process, code=0):
    """stdout after the process has ended."""
    output, errors = process.communicate(timeout=LIMIT)
    check_end(process.returncode, errors, code)
    return output


def let_it_run(process, seconds):
    """Any moment will do; the programs, not the clock, say what must hold then."""
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)


# Signals


def interrupt(process, number):
    """Sends the signal until the program says something or ends: Python loses an exception in a destructor."""
    process.send_signal(number)
    while not select.select([process.stdout], [], [], LIMIT / 2)[0]:
        process.send_signal(number)


@pytest.mark.parametrize(
    ("steps", "ratio"),
    [(0, 0.2), (2, 0.2), (3, 0.2), (6, 0.5)],
    ids=["first step", "a window ends", "publication", "selection of another size"],
)
def test_an_interrupt_falls_before_or_after_a_step(run, steps, ratio):
    run("interrupted_anywhere", steps, ratio)


@pytest.mark.parametrize("steps", [0, 3, 6], ids=["first step", "publication", "selection"])
def test_an_interrupt_in_a_backward_from_which_gradients_leave_loses_and_doubles_nothing(run, steps):
    run("interrupted_backward", steps)


@pytest.mark.parametrize("offload_gradients", [0, 1], ids=["default", "offload_gradients"])
def test_a_signal_handler_may_save_at_any_moment_of_backward_and_step(run, offload_gradients):
    run("saved_by_a_handler", 3, offload_gradients)


def test_an_interrupt_falls_before_or_after_every_other_call(run):
    run("interrupted_methods")


def test_ctrl_c_at_random_moments_leaves_a_step_boundary():
    moments, rounds = random.Random(3), 15
    process = start("interrupted_by_signals", str(rounds))
    for left in reversed(range(rounds)):
        let_it_run(process, moments.uniform(0.005, 0.08))
        interrupt(process, signal.SIGINT)
        if left:
            wait_until_ready(process)
    assert int(finish(process)) > rounds


def test_sigterm_ends_the_process_at_once():
    process = start("trains_until_killed")
    let_it_run(process, 0.2)
    process.send_signal(signal.SIGTERM)
    assert finish(process, code=-signal.SIGTERM) == ""


def test_a_sigterm_handler_can_save_and_leave():
    process = start("terminated_with_a_handler")
    let_it_run(process, 0.2)
    interrupt(process, signal.SIGTERM)
    finish(process, code=7)


# Exceptions


def test_an_exception_between_backward_and_step_changes_nothing(run):
    run("exception_between_backward_and_step")


def test_a_failing_closure_changes_nothing(run):
    run("failing_closure")


def test_a_failing_hook_of_the_user_leaves_no_half_done_call(run):
    run("failing_hooks")


# Forks


def test_parent_and_child_go_on_after_a_fork_with_work_in_flight(run):
    run("fork_with_work_in_flight")


def test_a_forked_child_ends_as_any_program():
    process = launch("fork_and_leave", stderr=subprocess.PIPE)
    assert finish(process).split() == ["child", "parent"]


def test_fork_of_a_fork(run):
    run("fork_of_a_fork")


def test_a_second_thread_may_fork_while_the_first_steps(run):
    run("fork_from_a_second_thread")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(run, method):
    run("multiprocessing_workers", method)


def test_a_pickled_training_goes_on_in_a_spawned_process(run):
    run("pickled_for_a_spawned_process")


@pytest.mark.parametrize("inherits", [0, 1], ids=["own", "inherited"])
def test_an_optimizer_may_step_in_a_data_loader_worker(run, inherits):
    run("steps_in_data_loader_workers", inherits)


def test_data_loader_workers_beside_training(run):
    run("data_loader_workers")


# Exits


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("work in flight", 0),
        ("window open", 0),
        ("sys.exit", 3),
        ("os._exit", 4),
        ("step hook", 5),
        ("abandoned", 0),
        ("cycle", 0),
        ("atexit", 0),
    ],
)
def test_leaving_is_silent(run, how, code):
    run("leaves", how, code=code)


def test_leaving_by_an_exception_shows_that_exception_alone(run):
    run("leaves", "exception", code=1, errors="ValueError: on purpose")


def test_a_crash_shows_where_and_does_not_hang():
    process = launch("leaves", "abort", stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in errors and "in leaves" in errors


# Lives of optimizers


def test_optimizers_that_are_dropped_leave_no_thread_and_no_memory(run):
    run("dropped_with_work_in_flight")


def test_optimizers_that_are_dropped_leave_no_hook(run):
    run("dropped_with_hooks")


def test_two_optimizers_do_not_mind_each_other(run):
    run("two_optimizers")


@pytest.mark.parametrize("delay", [0, 1])
def test_two_optimizers_of_one_model_take_each_others_writes_for_edits_and_say_so(run, delay):
    count, _, told = run("two_optimizers_of_one_model", delay).partition(" ")
    assert count == ("2" if delay else "0\n")  # each once
    assert not delay or "another ZenFlowOptimizer" in told


def test_a_copy_may_be_made_in_another_thread(run):
    run("copied_in_another_thread")


def test_any_thread_may_step(run):
    run("steps_from_other_threads")


# The machine


def test_denormals_are_kept_where_the_caller_flushes_them(run):
    run("denormals_flushed")


def test_one_core_or_more_threads_than_cores_change_no_bit(run):
    run("cores_and_threads")


def test_training_goes_on_where_threads_are_refused(run):
    if "not refused" in run("threads_refused"):
        pytest.skip("this system makes threads beyond RLIMIT_NPROC")


# Memory


def test_a_lack_of_memory_is_told_before_anything_changes(run):
    run("less_memory_than_needed")


def test_a_lack_of_memory_in_backward_loses_nothing(run):
    run("less_memory_than_needed_in_backward")


@pytest.mark.parametrize("buffer", ["ring", "stream"])
def test_training_goes_on_after_an_allocation_has_failed(run, buffer):
    run("address_space_runs_out", buffer)


def test_a_step_that_fails_half_way_is_not_built_upon(run):
    run("step_fails_half_way")
