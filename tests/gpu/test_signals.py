# SPDX-License-Identifier: Apache-2.0
"""A signal that comes while the engine asks torch for memory is handled before or after the step, not within."""

import signal

import pytest

from strategies import FP32
from training import SMALL, Pair
from zenflow import devices


class Interrupted(Exception):
    pass


def raise_interrupted(*_):
    raise Interrupted


@pytest.mark.parametrize("method", ["allocate", "release"])
def test_an_interrupt_falls_after_the_step_whose_memory_is_asked_for(device, method, monkeypatch):
    original, interrupted = getattr(devices.DeviceMemory, method), 0

    def signalling(*arguments):
        signal.raise_signal(signal.SIGUSR1)
        return original(*arguments)

    pair = Pair(device, FP32, shapes=SMALL)
    before = signal.signal(signal.SIGUSR1, raise_interrupted)
    try:
        for _ in range(6):
            pair.backward()
            with monkeypatch.context() as patch:
                patch.setattr(devices.DeviceMemory, method, signalling)
                try:
                    pair.optimizer.step()
                except Interrupted:
                    interrupted += 1
            pair.finish_twin()
        pair.check_state()
    finally:
        signal.signal(signal.SIGUSR1, before)
    if device == "cuda":
        assert interrupted > 0
