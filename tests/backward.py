# SPDX-License-Identifier: Apache-2.0
"""Backward passes that give parameters the gradients that a test chooses."""

import torch


class Give(torch.autograd.Function):
    """A scalar whose backward gives p the gradient g, in g's dtype and layout."""

    @staticmethod
    def forward(ctx, p, g):
        ctx.g = g
        return torch.zeros((), device=p.device)

    @staticmethod
    def backward(ctx, _):
        return ctx.g.clone(), None


def backward_of(pairs):
    """Gives each parameter its gradient, in one backward pass."""
    losses = [Give.apply(p, g) for p, g in pairs if g is not None]
    if losses:
        sum(losses).backward()
