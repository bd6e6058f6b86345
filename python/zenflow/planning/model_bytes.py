# SPDX-License-Identifier: Apache-2.0
"""Bytes of a whole model under any settings: what it holds on the GPU and on the host, and what moves."""

import collections
import dataclasses
import math

from zenflow import sizes


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes that there are for one process; None: not known."""

    gpu: int | None
    host: int | None


class ModelBytes:
    """Bytes of one model under any settings."""

    def __init__(self, model, topk_ratio, limits):
        self.model, self.topk_ratio, self.limits = model, topk_ratio, limits
        self._entries = {}  # by what Settings decide them: (shape, item, selected, how many such parameters)

    def entries(self, settings):
        least = settings.min_offload_numel
        if least not in self._entries:
            counts = collections.Counter(zip(self.model.shapes, self.model.items, strict=True))
            self._entries[least] = [
                (shape, item, sizes.selected_columns(shape, sizes.is_split(shape, settings), self.topk_ratio), count)
                for (shape, item), count in counts.items()
            ]
        return self._entries[least]

    def host_bytes(self, settings, stream):
        """What stats().host_bytes will be."""
        return sum(n * sizes.host_bytes(*entry, settings, stream) for *entry, n in self.entries(settings))

    def host_peak(self, settings, stream):
        """What the optimizer asks for at its first step: the same, or the warm-up's."""
        return sum(
            n * max(sizes.host_bytes(*entry, settings, stream), sizes.warm_up_host_bytes(*entry, settings, stream))
            for *entry, n in self.entries(settings)
        )

    def host_buffer(self, settings):
        """ "ring" or "stream", as asked for or as fits."""
        if settings.host_buffer != "auto":
            return settings.host_buffer
        limit = self.limits.host
        return "stream" if limit is not None and self.host_peak(settings, False) > limit else "ring"

    def fits_host(self, settings):
        limit = self.limits.host
        return limit is None or self.host_peak(settings, self.host_buffer(settings) == "stream") <= limit

    def deferred_bytes(self, settings):
        """Of one step's gradients on their way down; of one window's weights on their way up."""
        return sum(n * item * sizes.deferred_count(shape, k) for shape, item, k, n in self.entries(settings))

    def work(self, settings):
        """The model's share of `predict`'s arguments. Where dtypes differ, elements are counted in bf16's or fp32's."""
        item = min((item for _, item, k, _ in self.entries(settings) if k is not None), default=2)
        return {
            "deferred": self.deferred_bytes(settings) / item,
            "item": item,
            "update_interval": settings.longest_interval,
            "update_delay": settings.update_delay,
            "deferred_rule": settings.deferred_rule,
            "host_buffer": self.host_buffer(settings),
            "moment": settings.moment_bytes,
            "offload_gradients": settings.offload_gradients,
        }

    def device_memory(self, settings):
        """(weights, gradients at their most, optimizer's state, its work space), bytes."""
        entries = self.entries(settings)
        weights = self.model.frozen_bytes + sum(n * math.prod(shape) * item for shape, item, _, n in entries)
        gradients = [(math.prod(shape) * item, k, n) for shape, item, k, n in entries]
        leaves = [size for size, k, _ in gradients if settings.offload_gradients and k is not None]
        stay = sum(n * size for size, k, n in gradients if not settings.offload_gradients or k is None)
        state = sum(n * sizes.device_bytes(*entry, settings) for *entry, n in entries)
        split = [(shape, k) for shape, _, k, n in entries for _ in range(n)]
        work = sizes.gpu_work_bytes([shape for shape, _ in split], [k for _, k in split], settings)
        return weights, stay + max(leaves, default=0), state, work
