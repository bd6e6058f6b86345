# SPDX-License-Identifier: Apache-2.0
"""How much memory the optimizer's state takes, and whether the host has it. Allocates nothing."""

from zenflow import _C, devices, sizes


def host_bytes(p, split, topk_ratio, settings, stream):
    """The most host memory that p's deferred columns take; gradients are taken to have p's dtype (docs/memory.md)."""
    entry = p.shape, p.element_size(), sizes.selected_columns(p.shape, split, topk_ratio), settings, stream
    return max(sizes.host_bytes(*entry), sizes.warm_up_host_bytes(*entry))


def growth_fits(parameters, settings, other, stream):
    """Whether the host has the memory for a change from `settings` to `other`; parameters as below."""
    growth = sum(host_bytes(*entry, other, stream) - host_bytes(*entry, settings, stream) for entry in parameters)
    return growth <= _C.available_host_bytes()


def device_bytes(p, split, topk_ratio, settings):
    """Memory beside p for its selected columns, or all of it."""
    return sizes.device_bytes(p.shape, p.element_size(), sizes.selected_columns(p.shape, split, topk_ratio), settings)


def choose_host_buffer(wanted, parameters, settings):
    """The host buffer that fits, "ring" or "stream".

    wanted: "ring", "stream" or "auto" (the first that fits). parameters: (p, split, topk_ratio) of each.
    Raises MemoryError, with the shortfall and the knobs, if the host does not have enough left.
    """
    available = _C.available_host_bytes()
    beside = sum(device_bytes(*entry, settings) for entry in parameters if devices.device_of(entry[0]) is None)
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
