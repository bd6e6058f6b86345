# SPDX-License-Identifier: Apache-2.0
"""The programs that test_faults.py runs in processes of their own: `python fault_programs.py NAME [ARGUMENTS]`.

A program that finds something wrong raises, so that its exit code and its traceback say so. Gradients depend on the
step's number alone: whatever disturbs a run, its bits can be compared with those of an undisturbed one.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading

import torch
from torch import nn

from reference import same_bits
from zenflow import _C, ZenFlowOptimizer

SCHEDULE = {"update_interval": 3, "select_interval": 6, "update_delay": 1, "topk_ratio": 0.2, "min_offload_numel": 64}
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Training:
    """A few parameters, split and whole, of several dtypes, with an optimizer; `steps` counts committed steps."""

    def __init__(self, scale=1, **settings):
        def parameter(*shape, dtype=torch.float32):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.parameters)))
            self.parameters.append(nn.Parameter(values.to(dtype)))

        self.parameters = []
        parameter(12 * scale, 40 * scale)
        parameter(9 * scale, 30 * scale, dtype=torch.bfloat16)
        parameter(40 * scale)
        self.optimizer = ZenFlowOptimizer(
            self.parameters, lr=1e-2, **{**SCHEDULE, "num_threads": 2 if scale == 1 else 1, **settings}
        )

    @property
    def steps(self):
        store = self.optimizer._store
        return store.engine.clock[0] if store else 0

    def backward(self, step=None):
        """The gradients of a step, by default the next one."""
        generator = torch.Generator().manual_seed(1000 + (self.steps if step is None else step))
        for p in self.parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

    def train(self, steps=1):
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
        return self

    def train_to(self, step):
        return self.train(step - self.steps)

    def until_in_flight(self):
        """Steps until a host update is in flight: a window has closed, and the background thread has not finished."""
        for _ in range(200):
            before = self.optimizer.stats().total.host_update_seconds
            self.train()
            closed = self.steps % SCHEDULE["update_interval"] == 0
            if closed and self.optimizer.stats().total.host_update_seconds == before:
                return self
        raise AssertionError("200 steps, and every host update was finished when step() returned")


def flattened(value, path=""):
    """{path: tensor or plain value} of nested dicts and lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in flattened(inner, f"{path}/{key}").items()}
    return {path: value}


def snapshot(training):
    """All that training goes on from, copied. A state that has seen no step is no state."""
    shown = {i: float(training.optimizer.state[p]["step"]) for i, p in enumerate(training.parameters) if training.steps}
    saved = training.optimizer.state_dict()
    if training.steps == 0:
        saved = {"state": {}, "param_groups": [p for p in training.optimizer.param_groups[0] if p != "params"]}
    weights = [p.detach().clone() for p in training.parameters]
    return flattened({"weights": weights, "saved": saved, "shown": shown})


def check_same(actual, expected, what):
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual.keys() ^ expected.keys())}"
    for path, value in actual.items():
        wanted = expected[path]
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16):
            assert same_bits(value, wanted).all(), f"{what}: {path} differs in {(~same_bits(value, wanted)).sum()}"
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, wanted), f"{what}: {path}"
        else:
            assert value == wanted, f"{what}: {path} is {value}, expected {wanted}"


def check_undisturbed(training, more=8, what="", **settings):
    """At a step boundary of an undisturbed run, now and after some steps more."""
    twin = Training(**settings).train(training.steps)
    check_same(snapshot(training), snapshot(twin), f"{what} at step {twin.steps}")
    check_same(snapshot(training.train(more)), snapshot(twin.train(more)), f"{what} {more} steps later")


def threads():
    return len(os.listdir("/proc/self/task"))


# Interrupts


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th moment at which CPython looks for signals: where a function is entered, or
    a native one has returned. `reached` tells whether there were so many.
    """

    def __init__(self, n):
        self.left = n
        self.reached = False

    def __enter__(self):
        sys.unraisablehook = lambda _: None  # an interrupt in a generator that is being closed is lost
        sys.setprofile(self.look)

    def look(self, frame, event, argument):
        if event not in ("call", "c_return") or frame.f_code is InterruptAt.__exit__.__code__:
            return
        self.left -= 1
        if self.left < 0 and not self.reached:
            self.reached = True
            raise KeyboardInterrupt

    def __exit__(self, *exception):
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # torch's own decorator may have been cut in two
        return exception[0] is KeyboardInterrupt


def for_each_interrupt(make, act, check, stride=1):
    """act(made), interrupted at every moment in its turn."""
    count = 0
    while True:
        made, interrupt = make(), InterruptAt(count)
        with interrupt:
            act(made)
        if not interrupt.reached:
            return count
        check(made, count)
        count += stride


@program
def interrupted_anywhere(before, ratio):
    """In step number before + 1, whose group may have another topk_ratio than the steps before."""
    before, ratio = int(before), float(ratio)
    boundaries = []
    for more in (0, 1):
        twin = make_interruptible(before, ratio)
        twin.train(more)
        boundaries.append(snapshot(twin))
    end = snapshot(twin.train_to(before + 8))

    def act(training):
        training.backward()
        training.optimizer.step()

    def check(training, moment):
        done = training.steps - before
        assert done in (0, 1)
        check_same(snapshot(training), boundaries[done], f"interrupt {moment}, step {training.steps}")
        check_same(snapshot(training.train_to(before + 8)), end, f"some steps after interrupt {moment}")

    count = for_each_interrupt(lambda: make_interruptible(before, ratio), act, check)
    assert count > 30, count


def make_interruptible(before, ratio):
    training = Training().train(before)
    training.optimizer.param_groups[0]["topk_ratio"] = ratio
    return training


@program
def interrupted_methods():
    """Calls between steps are done or not begun, and training can go on."""

    def use_settled(training):
        with training.optimizer.settled():
            pass

    saved = Training().train(7).optimizer.state_dict()
    other = Training(update_interval=2, select_interval=4).train(5).optimizer.state_dict()
    methods = [  # (stride, call): loading looks for signals a thousand times
        (1, lambda training: training.optimizer.synchronize()),
        (1, lambda training: training.optimizer.flush()),
        (1, use_settled),
        (3, lambda training: training.optimizer.state_dict()),
        (11, lambda training: training.optimizer.load_state_dict(saved)),
        (11, lambda training: (training.optimizer.load_state_dict(other), training.optimizer.synchronize())),
    ]
    for i, (stride, act) in enumerate(methods):
        ends = []
        for calls in (0, 1):
            twin = Training().train(5)
            if calls:
                act(twin)
            ends.append(snapshot(twin.train_to(14)))

        def check(training, moment, i=i, ends=ends):
            what, end = f"method {i}, interrupt {moment}", snapshot(training.train_to(14))
            with contextlib.suppress(AssertionError):
                return check_same(end, ends[0], what)
            check_same(end, ends[1], what)

        for_each_interrupt(lambda: Training().train(5), act, check, stride)


@program
def interrupted_by_signals(rounds):
    """Prints "ready" and trains until a signal comes, `rounds` times; each time at a step's boundary."""
    training, twin = Training(scale=6), Training(scale=6)
    for _ in range(int(rounds)):
        try:
            print("ready", flush=True)
            while True:
                training.train()
        except KeyboardInterrupt:
            twin.train_to(training.steps)
            check_same(snapshot(training), snapshot(twin), f"step {twin.steps}")
    check_same(snapshot(training.train(8)), snapshot(twin.train(8)), "end")
    print(training.steps)


@program
def terminated_with_a_handler():
    """SIGTERM raises SystemExit(7); the run is saved on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    training = Training(scale=6)
    try:
        print("ready", flush=True)
        while True:
            training.train()
    finally:
        check_undisturbed(training, scale=6)


@program
def trains_until_killed():
    training = Training(scale=30)
    print("ready", flush=True)
    while True:
        training.train()


# Exceptions


@program
def exception_between_backward_and_step():
    training = Training().train(4)
    training.backward()
    try:
        raise RuntimeError("logging failed")
    except RuntimeError:
        pass
    check_undisturbed(training)


@program
def failing_closure():
    training = Training().train(4)

    def closure():
        assert torch.is_grad_enabled()
        training.backward()
        raise RuntimeError("no loss")

    for _ in range(3):
        try:
            training.optimizer.step(closure)
        except RuntimeError as error:
            assert str(error) == "no loss"
        else:
            raise AssertionError("the closure's error is lost")
    check_undisturbed(training)


# Forks


def in_child(function):
    """Runs function in a forked child; returns its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(60)
        function()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


@program
def fork_with_work_in_flight():
    training = Training(scale=40).until_in_flight()
    assert in_child(lambda: check_undisturbed(training, scale=40, what="child")) == 0
    check_undisturbed(training, scale=40, what="parent")


@program
def fork_and_leave():
    """The child steps and ends as a program ends, by its interpreter's exit."""
    training = Training(scale=40).until_in_flight()
    child = os.fork()
    training.train(4)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_undisturbed(training, scale=40)
    print("parent" if child else "child")


@program
def fork_of_a_fork():
    training = Training().train(4)
    assert in_child(lambda: in_child(training.train) == 0 and check_undisturbed(training)) == 0
    check_undisturbed(training)


@program
def fork_from_a_second_thread():
    """While the first one steps, at any moment of a step."""
    settings, last = {"scale": 12, "num_threads": 2}, 30
    twin = Training(**settings)
    boundaries = [snapshot(twin)] + [snapshot(twin.train()) for _ in range(last + 3)]
    training, forks, errors = Training(**settings), [], []

    def child():
        check_same(snapshot(training), boundaries[training.steps], f"child at step {training.steps}")
        check_same(snapshot(training.train(3)), boundaries[training.steps], f"child at step {training.steps}")

    def fork_often():
        try:
            for _ in range(12):
                assert in_child(child) == 0
                forks.append(training.steps)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fork_often)
    thread.start()
    while thread.is_alive():
        training = Training(**settings).train(last)
        check_same(snapshot(training), boundaries[last], "parent")
    thread.join()
    if errors:
        raise errors[0]
    print(forks)


def worker(weights, state, results):
    training = Training()
    for p, weight in zip(training.parameters, weights, strict=True):
        p.data.copy_(weight)
    training.optimizer.load_state_dict(state)
    check_undisturbed(training)
    results.put(training.steps)


def inheriting_worker(training, results):
    check_undisturbed(training)
    results.put(training.steps)


@program
def multiprocessing_workers(method):
    """fork: the child goes on with the parent's optimizer; spawn: with one of its own, from the parent's state."""
    training = Training().train(4)
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    if method == "fork":
        process = context.Process(target=inheriting_worker, args=(training, results))
    else:
        weights = [p.detach().clone() for p in training.parameters]
        process = context.Process(target=worker, args=(weights, training.optimizer.state_dict(), results))
    process.start()
    training.train()
    process.join()
    assert process.exitcode == 0
    assert results.get() == 12
    check_undisturbed(training)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((40,), float(i)).square() / 100


@program
def data_loader_workers():
    ends = []
    for workers in (0, 2):
        training = Training()
        method = "fork" if workers else None
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=workers, multiprocessing_context=method
        )
        for _ in range(2):
            for batch in loader:
                training.optimizer.zero_grad()
                a, b, c = training.parameters
                loss = (batch @ (a * c).T).square().mean() + (batch[:, :30].bfloat16() @ b.T).square().mean()
                loss.backward()
                training.optimizer.step()
        assert training.steps == 12
        ends.append(snapshot(training))
    check_same(*ends, "with workers")


# Exits


@program
def leaves(how):
    """Ends in one of many ways, with a host update in flight or a window open."""
    training = Training(scale=40).until_in_flight()
    if how == "window open":
        training.train(2)
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "os._exit":
        os._exit(4)
    elif how == "exception":
        raise ValueError("on purpose")
    elif how == "step hook":
        training.optimizer.register_step_post_hook(lambda *_: sys.exit(5))
        training.train()
    elif how == "abandoned":
        threading.Thread(target=training.train, args=(10,)).start()
    elif how == "cycle":
        training.cycle = [training]
    elif how == "atexit":
        atexit.register(training.train, 4)


# Lives of optimizers


@program
def dropped_with_work_in_flight():
    Training().train(4)  # what torch and the core make once
    gc.collect()
    before, held = threads(), _C.host_bytes_held()
    for _ in range(5):
        Training(scale=60, update_interval=2, select_interval=4).train(2)
        gc.collect()
    assert _C.host_bytes_held() == held == 0
    for _ in range(50):
        Training(num_threads=3).train(4)
    gc.collect()
    assert threads() == before, (threads(), before)
    assert _C.host_bytes_held() == held


@program
def two_optimizers():
    first, second = Training(), Training(host_buffer="stream")
    for _ in range(9):
        first.train()
        second.train()
    check_undisturbed(first)
    del first
    gc.collect()
    check_undisturbed(second, host_buffer="stream")


def in_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def join(*started):
    for thread, errors in started:
        thread.join()
        if errors:
            raise errors[0]


@program
def steps_from_other_threads():
    training = Training()
    for _ in range(6):
        join(in_thread(training.train))
    check_undisturbed(training)
    first, second = Training(scale=6, num_threads=2), Training(scale=6, num_threads=2)
    join(in_thread(lambda: first.train(60)), in_thread(lambda: second.train(50)))
    check_undisturbed(first, scale=6)
    check_undisturbed(second, scale=6)


# The machine


@program
def denormals_flushed():
    """The caller's floating point mode is kept, and changes no bit."""

    def run():
        training = Training()
        for step in range(8):
            training.backward(step)
            for p in training.parameters:
                p.grad.view(torch.int32 if p.dtype == torch.float32 else torch.int16).bitwise_and_(0x0000FFFF)
            training.optimizer.step()
        with training.optimizer.settled():
            pass
        return training

    wanted = snapshot(run())
    assert torch.set_flush_denormal(True)
    found = snapshot(run())
    assert torch.tensor(1e-40) * 1 == 0
    torch.set_flush_denormal(False)
    moments = wanted["/saved/state/0/exp_avg"].abs()
    assert ((moments > 0) & (moments < torch.finfo(torch.float32).tiny)).any()
    check_same(found, wanted, "with denormals flushed")


@program
def cores_and_threads():
    """One core, and many more threads than cores."""
    training = Training(scale=8)
    training.train(10)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    check_undisturbed(training, scale=8)
    for count in (None, 1, 2, 37):
        other = Training(scale=8, num_threads=count).train(18)
        check_same(snapshot(other), snapshot(training), f"{count} threads")
    assert _C.config()["threads"] == 1


@program
def threads_refused():
    """No thread can be made: the work is done by the caller."""
    Training().optimizer.state_dict()  # imports what torch imports late, which a nobody might not read
    held = threads()
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        pass
    else:
        print("threads are not refused here")
        return
    training = Training(scale=6, num_threads=4).train(13)
    assert threads() == held
    end = snapshot(training)
    check_undisturbed(training, scale=6)
    check_same(end, snapshot(Training(scale=6, num_threads=1).train(13)), "one thread")


# Memory


@program
def less_memory_than_needed():
    """MemoryError before anything changes, with the shortfall and the knobs; "auto" streams if that fits."""
    real, training = _C.available_host_bytes, Training(update_interval=6)
    weights = [p.detach().clone() for p in training.parameters]
    _C.available_host_bytes = lambda: 1000
    for _ in range(2):
        training.backward()
        try:
            training.optimizer.step()
        except MemoryError as error:
            message = str(error)
        else:
            raise AssertionError("no error")
        assert "short" in message and "GiB" in message, message
        for knob in ("topk_ratio", "split=False", "bfloat16"):
            assert knob in message, message
        assert _C.host_bytes_held() == 0
        assert training.optimizer.stats().host_bytes == 0
        assert all(torch.equal(p, w) for p, w in zip(training.parameters, weights, strict=True))
        assert not training.optimizer.state
    needed = {}
    for buffer in ("ring", "stream"):
        other = Training(update_interval=6, host_buffer=buffer)
        needed[buffer] = least_memory(other)
    assert needed["stream"] < needed["ring"]
    _C.available_host_bytes = lambda: needed["ring"] - 1
    training.train(13)
    assert training.optimizer.stats().host_buffer == "stream"
    try:
        Training(update_interval=6, host_buffer="ring").train()
    except MemoryError as error:
        for knob in ('host_buffer="stream"', "update_interval"):
            assert knob in str(error), error
    else:
        raise AssertionError("no error")
    _C.available_host_bytes = real
    end = snapshot(training)
    check_same(end, snapshot(Training(update_interval=6, host_buffer="ring").train(13)), "ring")


def least_memory(training):
    """The bytes with which the first step goes through, by bisection."""
    low, high = 0, 1 << 24
    training.backward()
    while low < high:
        middle = (low + high) // 2
        _C.available_host_bytes = lambda bytes=middle: bytes
        try:
            training.optimizer._make_room([])
        except MemoryError:
            low = middle + 1
        else:
            training.optimizer._clear()
            high = middle
    return low


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@program
def address_space_runs_out(host_buffer):
    """Allocations fail anywhere inside; the same step, with the limit raised again, has the right bits."""
    settings = {"scale": 40, "host_buffer": host_buffer, "num_threads": 2}
    ends = [snapshot(Training(**settings).train(n)) for n in (9,)]
    failures = 0
    for slack in range(0, 36 << 20, 3 << 20):

        def attempt(slack=slack):
            training, failed = Training(**settings), 0
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            while training.steps < 9:
                training.backward()
                resource.setrlimit(resource.RLIMIT_AS, (address_space() + slack, resource.RLIM_INFINITY))
                try:
                    training.optimizer.step()
                except (MemoryError, RuntimeError) as error:
                    assert isinstance(error, MemoryError) or "alloc" in str(error), error
                    failed += 1
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    training.optimizer.step()
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            check_same(snapshot(training), ends[0], f"slack {slack}")
            os._exit(10 + failed)

        code = in_child(attempt)
        assert code >= 10, f"slack {slack}: exit code {code}"
        failures += code - 10
    assert failures >= 3, failures
    print(failures)


@program
def step_fails_half_way():
    """No memory to make a strided gradient contiguous, where gradients already count: the run is over, and says so."""
    p = nn.Parameter(torch.zeros(1 << 21))
    optimizer = ZenFlowOptimizer([p], num_threads=1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.ones(1 << 22)[::2]
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 20), resource.RLIM_INFINITY))
    errors = []
    for call in (optimizer.step, optimizer.step, optimizer.state_dict):
        try:
            call()
        except (MemoryError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(errors) == 3, errors
    assert errors[0].startswith("MemoryError"), errors
    for error in errors[1:]:
        assert error.startswith("RuntimeError") and "half-way" in error and "checkpoint" in error, errors


# Running them


def start(name, *arguments, limit=60):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it for all that it starts
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # a hang shows where, and dies of it
    signal.alarm(limit)
    PROGRAMS[name](*arguments)


def serve():
    """Runs a program for each line of stdin, in a fork of this process, and prints its exit code.

    A line is a JSON list: files for stdout and stderr, seconds that it may take, name, arguments.
    """
    Training().optimizer.state_dict()  # imports what torch imports late
    assert threads() == 1
    print("ready", flush=True)
    for line in sys.stdin:
        output, errors, limit, name, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
            return start(name, *arguments, limit=limit)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start(*sys.argv[1:]) if sys.argv[1:] else serve()
