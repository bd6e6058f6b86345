# SPDX-License-Identifier: Apache-2.0
"""Signals and interrupts, at any moment."""

import contextlib
import functools
import signal
import sys

from fault_programs.registry import program
from fault_programs.training import Training, check_same, check_undisturbed, snapshot
from reference import same_bits


def raise_interrupt():
    raise KeyboardInterrupt


class InterruptAt:
    """Calls `handler` at the n-th moment at which CPython looks for signals: where a function is entered, or a native
    one has returned. `reached` tells whether there were so many.
    """

    def __init__(self, n, handler=raise_interrupt):
        self.left = n
        self.handler = handler
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
            self.handler()

    def __exit__(self, *exception):
        sys.setprofile(None)
        return exception[0] is KeyboardInterrupt


def for_each_interrupt(make, act, check, stride=1, handler=lambda made: raise_interrupt()):
    """act(made), interrupted by handler(made) at every moment in its turn."""
    count = 0
    while True:
        made = make()
        interrupt = InterruptAt(count, functools.partial(handler, made))
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
def interrupted_backward(before):
    """With gradients that leave in backward: what is in p.grad then is what the next step takes, once."""
    before = int(before)

    def make():
        training = Training(offload_gradients=True).train(before)
        training.optimizer.zero_grad()
        return training

    def act(training):
        training.backward()
        training.optimizer.step()

    def check(training, moment):
        twin = Training().train(before)
        twin.backward()
        if training.steps == before:
            for p, q in zip(training.parameters, twin.parameters, strict=True):
                q.grad = None if p.grad is None else q.grad
            training.optimizer.step()
        twin.optimizer.step()
        for p, q in zip(training.parameters, twin.parameters, strict=True):
            assert same_bits(p, q).all(), f"the step after interrupt {moment}"
        ends = [snapshot(t.train_to(before + 8)) for t in (training, twin)]
        check_same(*ends, f"some steps after interrupt {moment}")

    count = for_each_interrupt(make, act, check, stride=5)
    assert count > 60, count


@program
def saved_by_a_handler(before, offload_gradients):
    """A signal's handler saves, at any moment of backward and step: from that one goes on, and so does the training."""
    before, settings = int(before), {"offload_gradients": bool(int(offload_gradients))}
    end = snapshot(Training().train_to(before + 6))
    saved = []

    def act(training):
        training.backward()
        training.optimizer.step()

    def save(training):
        weights = [p.detach().clone() for p in training.parameters]
        saved[:] = weights, training.optimizer.state_dict()

    def check(training, moment):
        resumed = Training(**settings)
        for p, weight in zip(resumed.parameters, saved[0], strict=True):
            p.data.copy_(weight)
        resumed.optimizer.load_state_dict(saved[1])
        assert resumed.steps - before in (0, 1)
        check_same(snapshot(resumed.train_to(before + 6)), end, f"from what was saved at moment {moment}")
        check_same(snapshot(training.train_to(before + 6)), end, f"after saving at moment {moment}")

    count = for_each_interrupt(lambda: Training(**settings).train(before), act, check, stride=7, handler=save)
    assert count > 60, count


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
