# SPDX-License-Identifier: Apache-2.0
"""A GPU that takes time but no core: zenflow's CUDA half on the emulated runtime, paced (tests/cuda_emulation/pace.h).

CPU tensors stand for a GPU's. The optimizer, its CUDA device class, its streams, events and host threads are the real
ones; kernels and the copies' bytes are replaced by the time that they take. Needs a zenflow that was built for it
(`make paced`); importing this module connects it.
"""

import collections
import weakref

import torch

from zenflow import _C, devices

DEVICE = 0
emulation = _C.emulation
stream = emulation.create_stream(DEVICE)


def set_pace(*, link_bytes_per_second=float("inf"), kernel_seconds=0.0, moves_bytes=False):
    """What copies (each way) and kernels take from now on. Columns are still selected, by norms nobody computed."""
    emulation.set_pace(
        link_bytes_per_second=link_bytes_per_second,
        kernel_seconds=kernel_seconds,
        moves_bytes=moves_bytes,
        runs=["select_largest"],
    )


def work(seconds):
    """Queues something that keeps the device busy for so long, as a layer's forward does."""
    emulation.queue_work(stream, seconds)


def wait():
    emulation.synchronize_device(DEVICE)


def adopt(tensor):
    """Makes a CPU tensor one of the device, as long as it lives."""
    emulation.adopt(tensor.data_ptr(), tensor.nbytes, DEVICE)
    weakref.finalize(tensor.untyped_storage(), _leave, tensor.data_ptr())
    return tensor


def _leave(address):
    wait()
    emulation.disown(address)


class _DeviceMemory(devices.DeviceMemory):
    """Keeps what is released for the next one who asks for as much: like torch's, it never makes the host wait."""

    def __init__(self, device):
        super().__init__(device)
        self._free = collections.defaultdict(list)  # by size

    def use_stream(self, stream):
        pass

    def allocate(self, size):
        tensor = self._free[size].pop() if self._free[size] else adopt(torch.empty(size, dtype=torch.uint8))
        self._tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def release(self, address, stream):
        tensor = self._tensors.pop(address)
        self._free[tensor.nbytes].append(tensor)


def _empty(shape, device):
    tensor = torch.empty(shape, dtype=torch.float32)
    return adopt(tensor) if tensor.numel() and device is not None else tensor


devices.DeviceMemory = _DeviceMemory
devices.device_of = lambda tensor: DEVICE
devices.empty = _empty
devices.current_stream = lambda device: stream
