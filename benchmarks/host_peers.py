# SPDX-License-Identifier: Apache-2.0
"""The optimizers that the host update is compared with, on one fp32 parameter: torch's fused AdamW and DeepSpeed's.

Their threads are torch's (torch.set_num_threads): DeepSpeed's kernels run in the same OpenMP.
"""

import os
import sys
from pathlib import Path

import torch

from step_methods import DEEPSPEED, Skip, require_deepspeed

TORCH, DEEPSPEED_LABEL = "torch AdamW(fused=True)", f"DeepSpeedCPUAdam {DEEPSPEED}"
SETTINGS = {"lr": 1e-5, "weight_decay": 0.01}


def deepspeed_adam():
    """The class, its kernels built; or Skip with the reason. The first call on a machine compiles for minutes."""
    require_deepspeed()
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # there pip puts ninja
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))], adamw_mode=True)
    except Exception as error:  # whatever a compiler or an import may bring up
        raise Skip(f"DeepSpeedCPUAdam does not build here: {str(error).strip().splitlines()[-1]}") from error
    return DeepSpeedCPUAdam


class Peers:
    """One parameter, gradient and pair of moments, which all peers update in turn."""

    bytes_per_element = 16

    def __init__(self, elements, deepspeed):
        self.parameter = torch.nn.Parameter(torch.empty(elements))
        self.parameter.grad = torch.empty(elements)
        fill(self.parameter.detach())
        fill(self.parameter.grad)
        fused = torch.optim.AdamW([self.parameter], fused=True, **SETTINGS)
        fused.step()
        self.calls = {TORCH: fused.step}
        if deepspeed is None:
            return
        theirs = deepspeed([self.parameter], adamw_mode=True, **SETTINGS)
        moments = {key: fused.state[self.parameter][key] for key in ("exp_avg", "exp_avg_sq")}
        theirs.state[self.parameter] |= {"step": 1, **moments}
        self.calls[DEEPSPEED_LABEL] = theirs.step


def fill(tensor, square=False):
    """Normal random numbers, or their squares; a pattern of a million is repeated, since many take their time."""
    pattern = torch.randn(min(tensor.numel(), 1 << 20))
    pattern = pattern.square_() if square else pattern
    whole = tensor.numel() // pattern.numel()
    tensor[: whole * pattern.numel()].view(whole, -1).copy_(pattern)
    tensor[whole * pattern.numel() :].copy_(pattern[: tensor.numel() - whole * pattern.numel()])
