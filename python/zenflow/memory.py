# SPDX-License-Identifier: Apache-2.0
"""How much memory the optimizer's state takes, and whether the host has it. Allocates nothing."""

from zenflow import _C, devices
from zenflow.settings import selected_count
from zenflow.tensors import matrix_shape


def lane_count(settings, stream):
    """Lanes of gradients per parameter: of one window (or step, streaming) and of steps with an update in flight."""
    return (1 if stream else settings.longest_interval) + settings.update_delay


def host_bytes(p, split, topk_ratio, settings, stream):
    """Bytes of host memory for p's deferred columns; gradients are taken to have p's dtype (docs/memory.md)."""
    if not split:
        return 0
    rows, columns = matrix_shape(p.shape)
    item = p.element_size()
    fixed = 12 + 2 * item  # master, exp_avg, exp_avg_sq; last written and pending output
    total = 4 if stream and settings.deferred_rule == "mean" else 0
    deferred = rows * (columns - selected_count(topk_ratio, columns))
    windowed = deferred * (fixed + total + lane_count(settings, stream) * item)
    warm_up = rows * columns * (fixed + total + item) if settings.full_warm_up_rounds else 0
    return max(windowed, warm_up)


def growth_fits(parameters, settings, other, stream):
    """Whether the host has the memory for a change from `settings` to `other`; parameters as below."""
    growth = sum(host_bytes(*entry, other, stream) - host_bytes(*entry, settings, stream) for entry in parameters)
    return growth <= _C.available_host_bytes()


def device_bytes(p, split, topk_ratio):
    """Bytes beside p for its selected columns, or all of it: master, exp_avg and exp_avg_sq."""
    rows, columns = matrix_shape(p.shape)
    return 12 * rows * (selected_count(topk_ratio, columns) if split else columns)


def choose_host_buffer(wanted, parameters, settings):
    """The host buffer that fits, "ring" or "stream".

    wanted: "ring", "stream" or "auto" (the first that fits). parameters: (p, split, topk_ratio) of each.
    Raises MemoryError, with the shortfall and the knobs, if the host does not have enough left.
    """
    available = _C.available_host_bytes()
    beside = sum(device_bytes(*entry) for entry in parameters if devices.device_of(entry[0]) is None)
    needed = {
        name: beside + sum(host_bytes(*entry, settings, name == "stream") for entry in parameters)
        for name in (("ring", "stream") if wanted == "auto" else (wanted,))
    }
    for name, size in needed.items():
        if size <= available:
            return name
    name, size = min(needed.items(), key=lambda item: item[1])
    knobs = ["raise topk_ratio", "keep large parameters whole with split=False", "use bfloat16 parameters"]
    if name == "ring":
        knobs.insert(0, 'set host_buffer="stream"')
        knobs.insert(1, "lower update_interval")
    raise MemoryError(
        f"the optimizer state needs {_gib(size)} of host memory (host_buffer={name!r}), but {_gib(available)} is "
        f"available: {_gib(size - available)} short. To make it fit: {', or '.join(knobs)}; or free host memory"
    )


def _gib(size):
    return f"{size / 2**30:.2f} GiB"
