# SPDX-License-Identifier: Apache-2.0
"""A model that is nothing but time and gradients: each layer keeps the device busy and has one parameter.

Backward is autograd's own: every parameter gets its gradient, and its hooks fire, once the device has been given that
layer's part of the work; so gradients can leave while the layers before are still at it.
"""

import torch

import paced_device
from stall_methods import FORWARD_SHARE

ROWS, COLUMNS = 1024, 4096


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parameter, model):
        ctx.model = model
        paced_device.work(model.layer_seconds * FORWARD_SHARE)
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        paced_device.work(ctx.model.layer_seconds * (1 - FORWARD_SHARE))
        return upstream, ctx.model.gradient.detach(), None


class PacedModel:
    """
    Args:
        elements: parameters in all, rounded to whole layers of [1024, 4096], in bfloat16.

    Attributes:
        layer_seconds: device time of a layer, forward and backward.
    """

    def __init__(self, elements):
        self.layers = max(1, round(elements / (ROWS * COLUMNS)))
        weight, gradient = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.parameters = [torch.nn.Parameter(paced_device.adopt(weight.clone())) for _ in range(self.layers)]
        self.gradient = paced_device.adopt(gradient.clone())  # of all layers: real numbers, but no memory of the host
        self.layer_seconds = 0.0
        self._start = torch.zeros((), requires_grad=True)

    @property
    def elements(self):
        return sum(p.numel() for p in self.parameters)

    def run(self, device_seconds):
        """Queues forward and backward that take so long on the device."""
        self.layer_seconds = device_seconds / self.layers
        x = self._start
        for p in self.parameters:
            x = _Layer.apply(x, p, self)
        x.backward()
        self._start.grad = None
