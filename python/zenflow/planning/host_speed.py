# SPDX-License-Identifier: Apache-2.0
"""Measures the bytes per second of the host update here, with the engine itself, in a second or two. Needs no torch."""

import ctypes
import mmap
import statistics

from zenflow import _C
from zenflow.sizes import host_bytes, moved_bytes

ELEMENTS = 1 << 24  # with state and gradients more than caches hold
COLUMNS = 4096
DTYPE_CODES = {4: 0, 2: 1}  # fp32, bf16
WINDOWS_BEFORE, WINDOWS_MEASURED = 2, 5  # the first update touches new memory


def measure_host_bandwidth(item, settings, stream):
    """Bytes per second, counted as `sizes.moved_bytes` does, under `settings` with numbers for a schedule.

    Raises MemoryError if the host does not have the memory for it.
    """
    shape = ELEMENTS // COLUMNS, COLUMNS
    needed, available = host_bytes(shape, item, 0, settings, stream) + 2 * item * ELEMENTS, _C.available_host_bytes()
    if needed > available:
        raise MemoryError(
            f"measuring the host update takes {needed / 1e9:.2f} GB, and {available / 1e9:.2f} GB are available: free "
            "memory, or give host_bandwidth"
        )
    mean, interval = settings.deferred_rule == "mean", settings.longest_interval
    engine = _C.Engine(
        mean=mean,
        stream=stream,
        update_interval=interval,
        update_delay=settings.update_delay,
        lookahead=0.0,
        automatic=False,
        moments=DTYPE_CODES[settings.moment_bytes],
        num_threads=settings.num_threads or 0,
        reserved_share=float(settings.pt_reserved_cores_perc),
        pin_threads=True,
    )
    index = engine.add(list(shape), DTYPE_CODES[item], True, 0, 0, 0)
    engine.lend(index, 0, 0, 0, 0)
    weight, gradient = _Zeros(item * ELEMENTS), _Zeros(item * ELEMENTS)
    without_gradient = (index, weight.address, None, False, 0, 0, None, 0)
    with_gradient = (index, weight.address, None, False, gradient.address, DTYPE_CODES[item], None, 0)
    group = (1e-3, 0.9, 0.999, 1e-8, 0.0, False)  # lr, betas, eps, weight_decay, maximize
    seconds = []
    for window in range(WINDOWS_BEFORE + WINDOWS_MEASURED):
        before = engine.report()["total"]["host_update_seconds"]
        for step in range(interval):
            engine.commit([with_gradient], [group], False, window == step == 0, step == interval - 1, 0.0)
            engine.adopt_edits([])  # waits: on a GPU the host does not pack at the same time
        engine.synchronize([without_gradient])
        seconds.append(engine.report()["total"]["host_update_seconds"] - before)
    closing, folding = moved_bytes(item, interval, mean=mean, stream=stream, moment=settings.moment_bytes)
    return ELEMENTS * (closing + (interval - 1) * folding) / statistics.median(seconds[WINDOWS_BEFORE:])


class _Zeros:
    """Zero-filled memory and where it is."""

    def __init__(self, size):
        self._memory = mmap.mmap(-1, size)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
