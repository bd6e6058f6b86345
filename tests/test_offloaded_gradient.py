# SPDX-License-Identifier: Apache-2.0
"""Whatever is done with a gradient that left during backward is done with its bits, and counts."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backward import Give
from compare import assert_same
from strategies import BF16, DTYPES, FP16, FP32, MIXED_GRADIENTS, parameter_specs
from strategies import gradient as gradient_of
from zenflow import ZenFlowOptimizer
from zenflow.offloaded_gradient import OffloadedGradient


def left(gradient, **settings):
    """A parameter whose gradient has left, and its optimizer."""
    p = nn.Parameter(torch.ones(gradient.shape, dtype=gradient.dtype))
    optimizer = ZenFlowOptimizer([p], offload_gradients=True, min_offload_numel=0, num_threads=1, **settings)
    Give.apply(p, gradient).backward()
    assert isinstance(p.grad, OffloadedGradient) and p.grad.is_staged()
    return p, optimizer


def some_gradient(*shape, dtype=FP32):
    return torch.randn(shape or (6, 9), generator=torch.Generator().manual_seed(3)).to(dtype)


@given(
    parameter_specs(),
    st.sampled_from(["normal", "columns", "tiny", "denormal", "huge", "zero", "nonfinite"]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    st.sampled_from([0, 1]),
    st.integers(0, 5),
    st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
)
def test_it_comes_back_with_every_bit_at_every_step(spec, kind, ratio, warm_up, steps, dtypes):
    """Through hand-overs and lanes of other dtypes too."""
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(spec.shape, generator=generator).to(spec.dtype))
    if MIXED_GRADIENTS:
        p.grad_dtype = None
    schedule = {"update_interval": 2, "select_interval": 2, "topk_ratio": ratio, "full_warm_up_rounds": warm_up}
    optimizer = ZenFlowOptimizer([p], offload_gradients=True, min_offload_numel=0, num_threads=1, **schedule)
    for step in range(steps + 1):
        g = gradient_of(spec, "columns" if step < steps else kind, generator)
        if MIXED_GRADIENTS:
            g = g.to(dtypes[step])
        optimizer.zero_grad()
        Give.apply(p, g).backward()
        if step < steps:
            optimizer.step()
    assert isinstance(p.grad, OffloadedGradient) == (p.dim() > 1 and p.numel() > 0)
    found = p.grad.bring_back() if isinstance(p.grad, OffloadedGradient) else p.grad
    assert_same(found, g, "the gradient")


READING = {
    "norm": lambda g: g.norm(),
    "compared": lambda g: torch.equal(g, g),
    "printed": lambda g: f"{g}",
    "representation": repr,
    "copied": lambda g: g.clone(),
    "indexed": lambda g: g[1, 2:4],
    "listed": lambda g: list(g),
    "added": lambda g: 1 + g,
    "multiplied": lambda g: g @ g.T,
    "detached": lambda g: g.detach(),
    "data": lambda g: g.data,
    "converted": lambda g: g.to(BF16),
    "stacked": lambda g: torch.stack([g, g]),
    "copied into another": lambda g: torch.zeros(g.shape).copy_(g),
    "foreach": lambda g: torch._foreach_norm([g, g]),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "array": lambda g: torch.from_numpy(g.__array__()),
    "list": lambda g: g.tolist(),
    "deep copy": copy.deepcopy,
    "pickled": lambda g: pickle.loads(pickle.dumps(g)),
    "dlpack": torch.from_dlpack,
    "storage": lambda g: list(g.untyped_storage()),
    "compiled": lambda g: torch.compile(lambda x: x * 2, backend="eager")(g),
}


@pytest.mark.parametrize("name", READING)
def test_whatever_reads_it_sees_the_gradient(name):
    gradient = some_gradient()
    p, _ = left(gradient)
    with pytest.warns(UserWarning, match="was brought back"):
        found = READING[name](p.grad)
    expected = READING[name](gradient)
    if isinstance(expected, torch.Tensor):
        assert_same(found, expected, name)
    elif isinstance(expected, (list, tuple)) and isinstance(expected[0], torch.Tensor):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    else:
        assert found == expected


def test_a_file_of_it_holds_an_ordinary_tensor():
    gradient = some_gradient()
    p, _ = left(gradient)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="was brought back"):
        torch.save(p.grad, file)
    file.seek(0)
    assert torch.equal(torch.load(file), gradient)


def assign_item(g):
    g[0] = 5


def assign_data(g):
    g.data = g.data * 2


def operators(g):
    g += 1
    g *= 2


WRITING = {
    "mul_": lambda g: g.mul_(0.5),
    "add_": lambda g: g.add_(g, alpha=2),
    "data": lambda g: g.data.clamp_(-0.1, 0.1),
    "item": assign_item,
    "assigned data": assign_data,
    "operators": operators,
    "copy_": lambda g: g.copy_(torch.ones(g.shape)),
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(2),
    "row": lambda g: g[2].add_(1),
    "out": lambda g: torch.add(g, 1, out=g),
    "foreach": lambda g: torch._foreach_mul_([g], 3.0),
    "clipped by value": lambda g: g.clamp_(-0.5, 0.5),
    "numpy": lambda g: g.numpy().fill(3),
}


@pytest.mark.filterwarnings("ignore:zenflow")
@pytest.mark.parametrize("name", WRITING)
def test_whatever_writes_it_takes_effect(name):
    gradient = some_gradient()
    p, optimizer = left(gradient, topk_ratio=1.0, betas=(0.0, 0.0))
    WRITING[name](p.grad)
    WRITING[name](gradient)
    assert_same(p.grad.bring_back(), gradient, name)
    assert not p.grad.is_staged()
    optimizer.step()
    assert optimizer.state[p]["step"] == 1
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert_same(moments, gradient, "what step() took")


@pytest.mark.filterwarnings("ignore:zenflow")
def test_in_place_operations_return_what_they_were_called_on():
    p, _ = left(some_gradient())
    gradient = p.grad
    assert gradient.mul_(2) is gradient and gradient.zero_() is gradient
    assert gradient.mul(2) is not gradient and type(gradient.mul(2)) is torch.Tensor
    assert p.grad is gradient


@pytest.mark.filterwarnings("ignore:zenflow")
@pytest.mark.parametrize("use", [torch.sum, repr], ids=["operation", "method"])
def test_what_comes_back_in_inference_mode_is_an_ordinary_tensor_outside(use):
    gradient = some_gradient()
    p, _ = left(gradient)
    with torch.inference_mode():
        assert use(p.grad) == use(gradient)
    Give.apply(p, gradient).backward()
    p.grad.mul_(2)
    assert torch.equal(p.grad, 4 * gradient)


def test_metadata_costs_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p, _ = left(some_gradient(dtype=FP16))
        g = p.grad
        assert (g.shape, g.dtype, g.device, g.layout) == (p.shape, FP16, p.device, torch.strided)
        assert g.is_contiguous() and g.numel() == p.numel() and g.dim() == 2 and len(g) == 6
        assert not g.requires_grad and not g.is_sparse and not g.is_neg() and g.element_size() == 2
        assert g.is_staged()


def test_strides_are_those_that_the_gradient_had():
    p = nn.Parameter(torch.ones(6, 9).t())
    optimizer = ZenFlowOptimizer([p], offload_gradients=True, min_offload_numel=0)
    (p * 2).sum().backward()
    assert p.grad.is_staged() and p.grad.stride() == p.stride() == p.grad.bring_back().stride()
    optimizer.step()
