# SPDX-License-Identifier: Apache-2.0
"""The bounds within which an optimizer, of any class, counts as AdamW (docs/design.md)."""

import torch

LR, DECAY = 1e-3, 1e-2
SHAPES = [(24, 40), (3, 5, 16), (6, 4, 3, 3), (33,), ()]
ONE_STEP = 8 * 2.0**-24


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step, seed=0):
    """A steady part and noise, so that weights drift as they do in training."""
    steady = torch.Generator().manual_seed(seed + 77)
    noise = torch.Generator().manual_seed(1000 * seed + step)
    return [0.3 * torch.randn(s, generator=steady) + torch.randn(s, generator=noise) for s in SHAPES]


def set_gradients(parameters, step):
    for p, g in zip(parameters, gradients(step), strict=True):
        p.grad = g.to(p.dtype)


def torch_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, foreach=False, fused=False)


def assert_each_step_is_adamws(optimizer_class, moments, steps=30, **settings):
    """From every state that is reached, one step within 8 * 2**-24 * (|w| + lr) of torch's, elementwise.

    `moments(optimizer)` lists (exp_avg, exp_avg_sq) of the parameters.
    """
    ours, theirs = start(), start()
    optimizer = optimizer_class(ours, lr=LR, weight_decay=DECAY, min_offload_numel=0, **settings)
    adamw = torch_adamw(theirs)
    for step in range(steps):
        before = [p.detach().clone() for p in ours]
        if step:  # torch sets out from where we are
            for p, q, (m, v) in zip(ours, theirs, moments(optimizer), strict=True):
                q.data.copy_(p.data)
                adamw.state[q]["exp_avg"].copy_(m)
                adamw.state[q]["exp_avg_sq"].copy_(v)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        adamw.step()
        for w, p, q in zip(before, ours, theirs, strict=True):
            excess = (p - q).abs() - ONE_STEP * (w.abs() + LR)
            assert excess.max() <= 0, f"step {step + 1}: {excess.max():.3g} beyond the bound"


def assert_200_steps_stay_adamws(optimizer_class, **settings):
    """No farther from float64 AdamW than 1.5 times torch's own fp32 AdamW, maximum over elements."""
    ours, theirs = start(), start()
    exact = [torch.nn.Parameter(p.detach().double()) for p in theirs]
    optimizers = [
        optimizer_class(ours, lr=LR, weight_decay=DECAY, min_offload_numel=0, **settings),
        torch_adamw(theirs),
        torch_adamw(exact),
    ]
    for step in range(200):
        for parameters, optimizer in zip((ours, theirs, exact), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step()

    def distance(parameters):
        return max(
            (p.detach().double() - e.detach()).abs().max().item() for p, e in zip(parameters, exact, strict=True)
        )

    assert distance(ours) <= 1.5 * distance(theirs)
