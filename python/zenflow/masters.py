# SPDX-License-Identifier: Apache-2.0
"""Which weights ZenFlowOptimizer.master_weights() exports, under which names, and those that have no master.

Not for: how a master comes out of the engine (store.py).
"""

import torch


def named_weights(model, groups):
    """{name: parameter}, each parameter once: the model's, or without one the optimizer's, which must have names."""
    held = {
        p: group["param_names"][j] if "param_names" in group else None
        for group in groups
        for j, p in enumerate(group["params"])
    }
    if model is None:
        if None in held.values():
            raise ValueError(
                "the optimizer does not know its parameters' names: pass the model, as in "
                "optimizer.master_weights(model), or make the optimizer with model.named_parameters()"
            )
        return {name: p for p, name in held.items()}
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"master_weights() takes the model itself, got {type(model).__name__}")
    named = dict(model.named_parameters())
    if held and not any(p in held for p in named.values()):
        raise ValueError("the optimizer has none of this model's parameters: pass the model that it trains")
    return named


def without_master(p):
    """A copy of p in host memory, in fp32; parameters that are no floating-point numbers stay as they are."""
    weight = p.detach().to("cpu", torch.float32 if p.is_floating_point() else p.dtype, copy=True)
    return weight.contiguous()
