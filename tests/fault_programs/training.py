# SPDX-License-Identifier: Apache-2.0
"""The training that programs disturb, and what must hold of it.

Gradients depend on the step's number alone: whatever disturbs a run, its bits can be compared with those of an
undisturbed one.
"""

import os

import torch
from torch import nn

from backward import backward_of
from reference import same_bits
from zenflow import ZenFlowOptimizer

SCHEDULE = {"update_interval": 3, "select_interval": 6, "update_delay": 1, "topk_ratio": 0.2, "min_offload_numel": 64}


class Training:
    """A few parameters, split and whole, of several dtypes, with an optimizer; `steps` counts committed steps."""

    def __init__(self, scale=1, **settings):
        def parameter(*shape, dtype=torch.float32):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.parameters)))
            self.parameters.append(nn.Parameter(values.to(dtype)))

        self.parameters = []
        parameter(12 * scale, 40 * scale)
        parameter(9 * scale, 30 * scale, dtype=torch.bfloat16)
        parameter(40 * scale)
        self.optimizer = ZenFlowOptimizer(
            self.parameters, lr=1e-2, **{**SCHEDULE, "num_threads": 2 if scale == 1 else 1, **settings}
        )

    @property
    def steps(self):
        store = self.optimizer._store
        return store.engine.clock[0] if store else 0

    def backward(self, step=None):
        """The gradients of a step, by default the next one."""
        generator = torch.Generator().manual_seed(1000 + (self.steps if step is None else step))
        gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters]
        self.optimizer.zero_grad()
        with torch.enable_grad():  # a signal may have cut torch's own no_grad around step() in two
            backward_of(zip(self.parameters, gradients, strict=True))

    def train(self, steps=1):
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
        return self

    def train_to(self, step):
        return self.train(step - self.steps)

    def until_in_flight(self):
        """Steps until a host update is in flight: a window has closed, and the background thread has not finished."""
        for _ in range(200):
            before = self.optimizer.stats().total.host_update_seconds
            self.train()
            closed = self.steps % SCHEDULE["update_interval"] == 0
            if closed and self.optimizer.stats().total.host_update_seconds == before:
                return self
        raise AssertionError("200 steps, and every host update was finished when step() returned")


def flattened(value, path=""):
    """{path: tensor or plain value} of nested dicts and lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in flattened(inner, f"{path}/{key}").items()}
    return {path: value}


def snapshot(training):
    """All that training goes on from, copied. A state that has seen no step is no state."""
    shown = {i: float(training.optimizer.state[p]["step"]) for i, p in enumerate(training.parameters) if training.steps}
    saved = training.optimizer.state_dict()
    if training.steps == 0:
        saved = {"state": {}, "param_groups": [p for p in training.optimizer.param_groups[0] if p != "params"]}
    weights = [p.detach().clone() for p in training.parameters]
    return flattened({"weights": weights, "saved": saved, "shown": shown})


def check_same(actual, expected, what):
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual.keys() ^ expected.keys())}"
    for path, value in actual.items():
        wanted = expected[path]
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16):
            assert same_bits(value, wanted).all(), f"{what}: {path} differs in {(~same_bits(value, wanted)).sum()}"
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, wanted), f"{what}: {path}"
        else:
            assert value == wanted, f"{what}: {path} is {value}, expected {wanted}"


def check_undisturbed(training, more=8, what="", **settings):
    """At a step boundary of an undisturbed run, now and after some steps more."""
    twin = Training(**settings).train(training.steps)
    check_same(snapshot(training), snapshot(twin), f"{what} at step {twin.steps}")
    check_same(snapshot(training.train(more)), snapshot(twin.train(more)), f"{what} {more} steps later")


def threads():
    return len(os.listdir("/proc/self/task"))
