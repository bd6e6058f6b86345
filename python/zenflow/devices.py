# SPDX-License-Identifier: Apache-2.0
"""Where parameters live: the host, or a GPU with torch's stream and memory. The only file that asks torch.cuda.

A device is None for the host, else the GPU's ordinal.
"""

import functools

import torch

from zenflow import _C

TYPES = ("cpu", "cuda")


def device_of(tensor):
    """The device of a tensor whose type is one of TYPES."""
    return tensor.device.index if tensor.is_cuda else None


def why_not(device):
    """Why parameters cannot be updated there; None if they can."""
    if device is None or _cuda_half()["cuda_built"]:
        return None
    return (
        f"this build has no CUDA half ({_cuda_half()['cuda_reason']}): install zenflow where nvcc works, or use "
        "model.to('cpu'), or torch.optim.AdamW for it"
    )


@functools.cache
def _cuda_half():
    return _C.config()


def empty(shape, device):
    """An uninitialised fp32 tensor."""
    return torch.empty(shape, dtype=torch.float32, device="cpu" if device is None else f"cuda:{device}")


def current_stream(device):
    """torch's current stream of a GPU, as an integer."""
    return torch.cuda.current_stream(device).cuda_stream


def is_capturing():
    """Whether torch's current stream is recording a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class DeviceMemory:
    """GPU memory for the native core, from torch's allocator, so that torch's statistics show it."""

    def __init__(self, device):
        self._device = device
        self._tensors = {}  # by address

    def use_stream(self, stream):
        """Makes a stream, an integer, torch's current one in this thread."""
        torch.cuda.set_stream(self._stream(stream))

    def allocate(self, size):
        """The address of `size` bytes. Raises torch.OutOfMemoryError."""
        tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
        self._tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def try_allocate(self, size):
        """The same, or 0 where there is not as much."""
        try:
            return self.allocate(size)
        except torch.cuda.OutOfMemoryError:
            return 0

    def release(self, address, stream):
        """Gives memory back once what is queued so far on the stream, an integer, and torch's current one has run."""
        tensor = self._tensors.pop(address)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream(stream))

    def _stream(self, handle):
        if handle == 0:  # which ExternalStream takes for "any"
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, device=f"cuda:{self._device}")

    def held(self):
        """Bytes allocated now."""
        return sum(tensor.nbytes for tensor in self._tensors.values())
