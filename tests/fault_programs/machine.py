# SPDX-License-Identifier: Apache-2.0
"""Cores, threads and floating point modes."""

import os
import resource
import threading

import torch

from fault_programs.registry import program
from fault_programs.training import Training, check_same, check_undisturbed, snapshot, threads
from zenflow import _C


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
