# SPDX-License-Identifier: Apache-2.0
"""Optimizers that come and go, and threads that use them."""

import atexit
import copy
import gc
import threading
import warnings
import weakref

import torch

from compare import assert_all_same, assert_same_state
from fault_programs.registry import program
from fault_programs.training import SCHEDULE, Training, check_undisturbed, threads
from reference import ReferenceZenFlow
from zenflow import _C, ZenFlowOptimizer


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
def dropped_with_hooks():
    """Hooks on parameters that live on, and what Python itself keeps for the process's end."""
    parameters = Training().parameters

    def kept():
        gc.collect()
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters)
        return hooks, len(weakref.finalize._registry), atexit._ncallbacks(), threads(), _C.host_bytes_held()

    def train():
        training = Training(offload_gradients=True)
        training.parameters = parameters
        training.optimizer = ZenFlowOptimizer(parameters, offload_gradients=True, **SCHEDULE)
        training.train(4)

    train()  # what torch and the core make once
    before = kept()
    for _ in range(50):
        train()
    assert kept() == before, (kept(), before)


@program
def two_optimizers_of_one_model(delay):
    """Each takes the other's writes for edits, as the reference does; and says so where that may lose an update."""
    settings = {**SCHEDULE, "update_delay": int(delay)}
    ours, theirs = Training().parameters, Training().parameters
    optimizers = [ZenFlowOptimizer(ours, num_threads=2, **settings) for _ in range(2)]
    references = [ReferenceZenFlow(theirs, **settings) for _ in range(2)]
    told = []
    for step in range(14):
        for optimizer, reference in zip(optimizers, references, strict=True):
            for parameters in (ours, theirs):
                generator = torch.Generator().manual_seed(step)
                for p in parameters:
                    p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            told += [str(warning.message) for warning in caught]
            reference.step()
            assert_all_same(ours, theirs, f"step {step}")
    for optimizer, reference in zip(optimizers, references, strict=True):
        assert_same_state(optimizer, reference, "state")
    print(len(told), *set(told))


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


@program
def copied_in_another_thread():
    """With work in flight; the copy and the original go on alike."""
    training, made = Training(scale=40).until_in_flight(), []
    join(in_thread(lambda: made.append(copy.deepcopy(training))))
    check_undisturbed(training, scale=40)
    check_undisturbed(made[0], scale=40)
