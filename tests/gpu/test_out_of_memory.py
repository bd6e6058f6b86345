# SPDX-License-Identifier: Apache-2.0
"""The allocator refuses device memory: the call says so, and repeated it gives the bits that it would have given."""

import itertools

import pytest
import torch

from strategies import FP32
from training import SMALL, Pair
from zenflow import devices


class Refusing:
    """In place of DeviceMemory.allocate while it is `on`: `times` calls from number `first` on, counted from 1, are
    refused."""

    def __init__(self, first, times):
        self.calls, self.refused, self.first, self.times, self.on = 0, 0, first, times, False
        self.allocate = devices.DeviceMemory.allocate

    def __call__(self, memory, size):
        self.calls += self.on
        if self.on and self.calls >= self.first and self.refused < self.times:
            self.refused += 1
            raise torch.cuda.OutOfMemoryError("refused by a test")
        return self.allocate(memory, size)


@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
def test_what_was_refused_memory_can_be_repeated(device, hooks, monkeypatch):
    for first in itertools.count(1):
        refusing = Refusing(first, times=2)
        with monkeypatch.context() as patch:
            patch.setattr(devices.DeviceMemory, "allocate", lambda memory, size, call=refusing: call(memory, size))
            pair = Pair(device, FP32, hooks=hooks, shapes=SMALL, max_grad_norm=1.0, min_offload_numel=64)
            for _ in range(7):
                train_until_granted(pair, refusing)
            pair.check_state()
        if refusing.refused < 2:
            break
    if device == "cuda":
        assert refusing.calls > 0


def train_until_granted(pair, refusing):
    for _ in range(10):
        pair.optimizer.zero_grad()
        pair.twin.zero_grad()
        refusing.on = True
        try:
            pair.backward()
            pair.optimizer.step()
        except torch.cuda.OutOfMemoryError:
            continue
        finally:
            refusing.on = False
        return pair.finish_twin()
    raise AssertionError("it never goes on")
