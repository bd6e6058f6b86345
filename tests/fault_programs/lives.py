# SPDX-License-Identifier: Apache-2.0
"""Optimizers that come and go, and threads that use them."""

import gc
import threading

from fault_programs.registry import program
from fault_programs.training import Training, check_undisturbed, threads
from zenflow import _C


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
