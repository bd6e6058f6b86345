# SPDX-License-Identifier: Apache-2.0
"""Device memory: what training with ZenFlow takes beyond weights, and that a steady step takes nothing new."""

import gc

import pytest
import torch
from torch import nn

from strategies import BF16
from training import Pair
from zenflow import ZenFlowOptimizer

pytestmark = pytest.mark.gpu
MB = 2**20


@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
def test_a_steady_step_allocates_nothing_new(hooks):
    """step() asks torch for no memory, nor torch CUDA. Of the steps looked at some publish, some end a window, and none
    selects."""
    shapes = [((1024, 1024), "contiguous"), ((700, 512), "contiguous"), ((64,), "contiguous")]
    pair = Pair("cuda", BF16, hooks=hooks, shapes=shapes, max_grad_norm=50.0, select_interval=1000)
    for step in range(1, 14):
        pair.backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        pair.optimizer.step()
        after = torch.cuda.memory_stats()
        if step >= 10:
            for counter in ("allocation.all.allocated", "segment.all.allocated"):
                assert after[counter] == before[counter], f"{counter} in step {step}"
        pair.finish_twin()
    pair.check_state()


def test_memory_beyond_weights():
    """While gradients leave during backward. Per split element at most 12 * topk_ratio bytes for selected columns and
    topk_ratio gradient items for what is staged; per unsplit one 12 bytes; and 256 MB."""
    gc.collect()
    torch.cuda.empty_cache()
    layers, width, ratio = 24, 4096, 0.1
    model = nn.Sequential(*(nn.Linear(width, width, dtype=BF16, device="cuda") for _ in range(layers)))
    split = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    unsplit = sum(p.numel() for p in model.parameters()) - split
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = ZenFlowOptimizer(
        model.parameters(), 1e-4, topk_ratio=ratio, update_interval=4, select_interval=8, offload_gradients=True
    )
    batch = torch.randn(8, width, dtype=BF16, device="cuda")

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated() - weights - optimizer.stats().device_bytes
    torch.cuda.reset_peak_memory_stats()
    for _ in range(17):
        step()
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - weights - base
    bound = 12 * ratio * split + ratio * split * 2 + 12 * unsplit + 256 * MB
    assert beyond <= bound, f"{beyond / MB:.0f} MB beyond weights, {bound / MB:.0f} are allowed"
    held = optimizer.stats().device_bytes
    assert held <= bound, f"stats() say {held / MB:.0f} MB"
