# SPDX-License-Identifier: Apache-2.0
"""Where device code runs in these tests: a GPU, or the emulated device of tests/cuda_emulation.

Tests get one as the fixture `machine` (conftest.py) and say nothing of which it is.
"""

import torch

from zenflow import _C, devices

EMULATED = hasattr(_C, "emulation")
_PATTERN = 0xA5
_GUARD = 64  # bytes


def why_no_gpu():
    """The reason to skip what needs a GPU; None if there is one."""
    if EMULATED:
        return "zenflow._C is built on the emulated device"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch.cuda.is_available() is False (torch {torch.__version__})"
    return devices.why_not(0)


class _Machine:
    """Memory of a device, with guard bytes around each tensor."""

    def __init__(self):
        self._buffers = []

    def put(self, tensor, offset=0):
        """A contiguous copy on the device; `offset` elements lie between an aligned address and it."""
        tensor = tensor.contiguous()
        before = offset * tensor.element_size()
        buffer = torch.full((before + tensor.nbytes + _GUARD,), _PATTERN, dtype=torch.uint8)
        inside = slice(before, before + tensor.nbytes)
        buffer[inside] = tensor.reshape(-1).view(torch.uint8)
        buffer = self._adopt(buffer)
        self._buffers.append((buffer, inside))
        return buffer[inside].view(tensor.dtype).view(tensor.shape)

    def empty(self, *shape, dtype=torch.float32, offset=0):
        """Memory with a pattern in it, which kernels are to overwrite."""
        return self.put(torch.full(shape, _PATTERN).to(dtype), offset)

    def get(self, tensor):
        """A copy in host memory, once all that was queued is done."""
        self.synchronize()
        return tensor.cpu().clone()

    def check_guards(self):
        """Nothing was written around what put() and empty() gave."""
        self.synchronize()
        for buffer, inside in self._buffers:
            for guard in (buffer[: inside.start], buffer[inside.stop :]):
                assert (guard == _PATTERN).all(), "a kernel wrote beside a tensor"


class Gpu(_Machine):
    """The current CUDA device, on a stream of its own."""

    name = "cuda"

    def __init__(self):
        super().__init__()
        self._stream = torch.cuda.Stream()

    @property
    def stream(self):
        return self._stream.cuda_stream

    def _adopt(self, buffer):
        moved = buffer.cuda()
        torch.cuda.current_stream().synchronize()
        return moved

    def host(self, tensor):
        """A copy in page-locked host memory; the device reaches it under the same address."""
        return tensor.contiguous().pin_memory()

    def synchronize(self):
        self._stream.synchronize()

    def close(self):
        self._buffers.clear()


class Emulated(_Machine):
    """Ordinary memory that is declared the emulated device's."""

    name = "emulated"

    def __init__(self):
        super().__init__()
        self._host = []
        self.stream = _C.emulation.create_stream(0)

    def _adopt(self, buffer):
        _C.emulation.adopt(buffer.data_ptr(), buffer.nbytes, 0)
        return buffer

    def host(self, tensor):
        """Mapped host memory looks like device memory to a kernel."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        if copy.nbytes:
            self._host.append(self._adopt(copy))
        return copy

    def synchronize(self):
        _C.emulation.synchronize_stream(self.stream)

    def close(self):
        self.synchronize()
        for buffer in [*(buffer for buffer, _ in self._buffers), *self._host]:
            _C.emulation.disown(buffer.data_ptr())
        _C.emulation.destroy_stream(self.stream)
