# SPDX-License-Identifier: Apache-2.0
"""Small parameters that are split all the same, and gradients that depend on the step's number alone."""

import torch
from torch import nn

from compare import assert_all_same, assert_same_state, parameters_of
from reference import ReferenceZenFlow
from zenflow import ZenFlowOptimizer


def zenflow_of(*parameters, optimizer_class=ZenFlowOptimizer, **settings):
    """On small parameters, which are split, and one thread unless told otherwise."""
    return optimizer_class(list(parameters), **{"min_offload_numel": 0, "num_threads": 1, **settings})


def random_parameter(*shape, dtype=torch.float32, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def random_gradient(p, step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer, steps, start=0):
    """Steps with gradients that depend on the step's number alone."""
    for step in range(start, start + steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = random_gradient(p, step)
        optimizer.step()


class Beside:
    """One training on a ZenFlowOptimizer and on the reference. `each` does something to both; steps are compared.

    Args:
        groups: lists of shapes, or dicts with such a list as "params".
    """

    def __init__(self, *groups, **settings):
        classes = ZenFlowOptimizer, ReferenceZenFlow
        self.optimizers = [self._make(optimizer_class, groups, settings) for optimizer_class in classes]
        self.step = 0

    @staticmethod
    def _make(optimizer_class, groups, settings):
        made, seed = [], 0
        for group in groups:
            group = dict(group) if isinstance(group, dict) else {"params": group}
            group["params"] = [random_parameter(*shape, seed=seed + i) for i, shape in enumerate(group["params"])]
            seed += len(group["params"])
            made.append(group)
        return optimizer_class(made, **{"min_offload_numel": 0, "num_threads": 1, **settings})

    def each(self, action):
        for optimizer in self.optimizers:
            with torch.no_grad():
                action(optimizer)

    def train(self, steps, without=()):
        """`without`: places, among all parameters, of those that get no gradient."""
        for _ in range(steps):
            for optimizer in self.optimizers:
                for i, p in enumerate(parameters_of(optimizer)):
                    p.grad = None if i in without else random_gradient(p, self.step)
                optimizer.step()
            self.step += 1
            self.compare()

    def compare(self):
        ours, theirs = self.optimizers
        assert_all_same(parameters_of(ours), parameters_of(theirs), f"after step {self.step}")

    def finish(self):
        """Compares state, then what flush() writes."""
        assert_same_state(*self.optimizers, "at the end")
        self.each(lambda optimizer: optimizer.flush())
        self.compare()
