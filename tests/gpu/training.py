# SPDX-License-Identifier: Apache-2.0
"""Training on a device beside the same training on the CPU, step by step and bit for bit."""

import torch
from torch import nn

from backward import backward_of
from compare import assert_all_same, assert_same_saved
from strategies import FP32, MIXED_GRADIENTS, laid_out
from zenflow import ZenFlowOptimizer

SCHEDULE = {"update_interval": 2, "select_interval": 4, "topk_ratio": 0.1, "min_offload_numel": 1000, "lr": 1e-2}
# (shape, layout): together more than the device's ring of chunks holds, with every kind of place for a parameter
LARGE = [
    ((4096, 4096), "contiguous"),
    ((2048, 4096), "transposed"),
    ((3, 1000, 1001), "contiguous"),
    ((256, 128, 3, 3), "channels_last"),
    ((4096,), "contiguous"),
    ((31, 30), "contiguous"),
]
SMALL = [((64, 70), "contiguous"), ((40, 64), "transposed"), ((16, 8, 3, 3), "channels_last"), ((40,), "contiguous")]


def moved(tensor, device):
    """A copy on the device with the same strides, whatever they are; `to` makes some of them contiguous."""
    whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved_parameters(parameters, device):
    made = [nn.Parameter(moved(p, device)) for p in parameters]
    for p in made if MIXED_GRADIENTS else ():
        p.grad_dtype = None  # any
    return made


def on_cpu(tensors):
    """On the current stream, at once: what it shows is what the next operation of a user would see."""
    return [tensor.detach().cpu() for tensor in tensors]


class Pair:
    """An optimizer on `device` and its twin on the CPU, of the same parameters and gradients.

    Args:
        hooks: the one on the device runs with offload_gradients=True, the twin without.
        settings: of both optimizers.
    """

    def __init__(self, device, dtype=FP32, *, hooks=False, seed=0, shapes=None, **settings):
        generator = torch.Generator().manual_seed(seed)
        if shapes is None:
            shapes = SMALL if torch.device(device).type == "cpu" else LARGE
        values = [laid_out(torch.randn(s, generator=generator).to(dtype), layout) for s, layout in shapes]
        self.theirs = moved_parameters(values, "cpu")
        self.ours = moved_parameters(values, device)
        self.device, self.hooks, self.seed = device, hooks, seed
        self.settings = {**SCHEDULE, **settings}
        self.optimizer = self.new_optimizer()
        self.twin = ZenFlowOptimizer(self.theirs, **self.settings)
        self.done = 0

    def new_optimizer(self):
        return ZenFlowOptimizer(self.ours, offload_gradients=self.hooks, **self.settings)

    def gradients(self, micro_batch=0):
        """Of the coming step, on the CPU: some columns are larger, and which ones changes slowly."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * self.done + micro_batch)
        slow = torch.Generator().manual_seed(self.done // 3)
        made = []
        for p in self.theirs:
            size = torch.randn(p.shape[-1:], generator=slow).exp()
            made.append((torch.randn(p.shape, generator=generator) * size).to(p.dtype))
        return made

    def backward(self, micro_batch=0):
        """One backward pass on both sides; adds to what is in p.grad."""
        gradients = self.gradients(micro_batch)
        backward_of((p, moved(g, p.device)) for p, g in zip(self.ours, gradients, strict=True))
        backward_of(zip(self.theirs, gradients, strict=True))

    def step(self, after_backward=lambda: None, after_step=lambda: None):
        """One step of both, with calls on the device's side around it."""
        self.backward()
        after_backward()
        self.finish_step(after_step)

    def finish_step(self, after_step=lambda: None):
        self.optimizer.step()
        self.optimizer.zero_grad()
        after_step()
        self.finish_twin()

    def finish_twin(self):
        """After a step of the optimizer alone."""
        self.optimizer.zero_grad()
        self.twin.step()
        self.twin.zero_grad()
        self.done += 1
        self.check(f"after step {self.done}")

    def check(self, when):
        assert_all_same(on_cpu(self.ours), self.theirs, when)

    def check_state(self):
        assert_same_saved(self.optimizer, self.twin, f"after step {self.done}")
