# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: `-p emulated_gpu` gives every parameter to the emulated CUDA device (tests/cuda_emulation).

CPU tensors stand for a GPU's, but for those that move() took away: zenflow.devices is replaced, and while the engine is
called the memory of weights and gradients is the emulated device's alone. After a call the caller's stream is waited
for, as torch's next operation on it would; the copies to and from the host run on. Needs a zenflow that was built on
the emulated device.
"""

import os
import weakref

import torch

from zenflow import _C, devices

DEVICE = 0
ITEM_SIZES = (4, 2, 2)  # by dtype code

emulation = _C.emulation
stream = emulation.create_stream(DEVICE)
emulation.set_delay(int(os.environ.get("ZENFLOW_EMULATION_DELAY_US", "50")))


class Engine(_C.Engine):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.tensors = {}  # by parameter: (elements, item size)
        self.on_host = set()  # parameters
        self.gradient_items = {}  # by parameter: the item size of its gradient

    def add(self, sizes, dtype, split, step_count, device, seed):
        index = super().add(sizes, dtype, split, step_count, device, seed)
        self.tensors[index] = (torch.Size(sizes).numel(), ITEM_SIZES[dtype])
        if device == 0:
            self.on_host.add(index)
        return index

    def commit(self, rows, *plan):
        on_device(self, rows, lambda: super(Engine, self).commit(rows, *plan))

    def stage(self, row, *plan):
        self.gradient_items[row[0]] = ITEM_SIZES[row[5]]
        on_device(self, [row], lambda: super(Engine, self).stage(row, *plan))

    def unstage(self, index, address):
        size = self.tensors[index][0] * self.gradient_items[index]
        with Placed([] if index in self.on_host else [(address, size)]):
            super().unstage(index, address)

    def publish_early(self, row):
        def publish():
            published = super(Engine, self).publish_early(row)
            self.join_publications()  # the memory is the device's in this call alone
            return published

        return on_device(self, [row], publish)

    def synchronize(self, rows):
        on_device(self, rows, lambda: super(Engine, self).synchronize(rows))

    def flush(self, rows):
        on_device(self, rows, lambda: super(Engine, self).flush(rows))

    def show_settled(self, rows):
        on_device(self, rows, lambda: super(Engine, self).show_settled(rows))

    def show_training(self, rows):
        on_device(self, rows, lambda: super(Engine, self).show_training(rows))

    def adopt_edits(self, rows):
        on_device(self, rows, lambda: super(Engine, self).adopt_edits(rows))


def on_device(engine, rows, call):
    pieces = []
    for index, address, _, _, gradient, dtype, *_ in rows:
        if index in engine.on_host:
            continue
        count, item = engine.tensors[index]
        pieces += [(address, count * item), (gradient, count * ITEM_SIZES[max(dtype, 0)])]
    with Placed(pieces):
        return call()


class Placed:
    """While it is entered, (address, bytes) pieces are memory of the device."""

    def __init__(self, pieces):
        self.pieces = {address: size for address, size in pieces if address and size}

    def __enter__(self):
        for address, size in self.pieces.items():
            emulation.adopt(address, size, DEVICE)

    def __exit__(self, *error):
        emulation.synchronize_stream(stream)
        for address in self.pieces:
            emulation.disown(address)


class DeviceMemory(devices.DeviceMemory):
    def use_stream(self, stream):
        pass

    def allocate(self, size):
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        emulation.adopt(tensor.data_ptr(), size, DEVICE)
        self._tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def release(self, address, last_stream):
        emulation.synchronize_stream(last_stream)
        reuse(address)
        del self._tensors[address]


def empty(shape, device):
    tensor = torch.empty(shape, dtype=torch.float32, device="cpu")
    if tensor.numel() and device is not None:
        emulation.adopt(tensor.data_ptr(), tensor.nbytes, device)
        weakref.finalize(tensor, reuse, tensor.data_ptr())
    return tensor


def reuse(address):
    """What torch's allocator does with freed memory is ordered behind the caller's stream."""
    emulation.synchronize_stream(stream)
    emulation.disown(address)


def move(p, *, to_host):
    """What model.to(device) does to a parameter."""
    p.data = p.data.clone()
    p.is_on_host = to_host


_C.Engine = Engine
devices.DeviceMemory = DeviceMemory
devices.device_of = lambda tensor: None if getattr(tensor, "is_on_host", False) else DEVICE
devices.empty = empty
devices.current_stream = lambda device: stream
