# SPDX-License-Identifier: Apache-2.0
"""Random training runs: what hypothesis draws (a `Run`), and how tests play it on an optimizer.

A `Run` holds plain values only, so that a failing one can be pasted into a test; tensors come from its seed.
Played on two optimizers, it gives both the same weights, gradients, settings and edits.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
MIXED_GRADIENTS = hasattr(torch.Tensor, "grad_dtype")  # older torch: a gradient has its parameter's dtype


@dataclass(frozen=True)
class ParameterSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    gradient_dtype: torch.dtype
    gradient_layout: str
    group: int


@dataclass(frozen=True)
class StepSpec:
    gradients: tuple[str, ...]  # a kind of values for each parameter; "none": no gradient
    lr: float | None = None  # new learning rate of all groups
    betas: tuple[float, float] | None = None
    after: str = ""  # what the user does after the step


@dataclass(frozen=True)
class Run:
    parameters: tuple[ParameterSpec, ...]
    groups: tuple[dict, ...]
    settings: dict
    steps: tuple[StepSpec, ...]
    seed: int

    # Tensors out of the seed

    def new_parameters(self, dtype=None):
        """Fresh parameters; with `dtype`, the same values in that dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for spec in self.parameters:
            values = torch.randn(spec.shape, generator=generator).to(spec.dtype)
            p = torch.nn.Parameter(laid_out(values.to(dtype or spec.dtype), spec.layout))
            if MIXED_GRADIENTS:
                p.grad_dtype = None  # any
            made.append(p)
        return made

    def new_optimizer(self, optimizer_class, parameters, **changed):
        groups = [{**group, "params": []} for group in self.groups]
        for p, spec in zip(parameters, self.parameters, strict=True):
            groups[spec.group]["params"].append(p)
        return optimizer_class([group for group in groups if group["params"]], **{**self.settings, **changed})

    def set_gradients(self, index, parameters):
        generator = torch.Generator().manual_seed(self.seed * 1000 + index)
        for p, spec, kind in zip(parameters, self.parameters, self.steps[index].gradients, strict=True):
            p.grad = gradient(spec, kind, generator)

    def set_settings(self, index, optimizer):
        step = self.steps[index]
        for group in optimizer.param_groups:
            if step.lr is not None:
                group["lr"] = step.lr
            if step.betas is not None:
                group["betas"] = step.betas

    def play(self, index, parameters, optimizer):
        """One step of the run, without what the user does after it."""
        self.set_settings(index, optimizer)
        self.set_gradients(index, parameters)
        optimizer.step()

    def act(self, index, parameters, optimizer):
        """What the user does after step `index`."""
        action = self.steps[index].after
        if action in ("synchronize", "flush"):
            getattr(optimizer, action)()
        elif action == "settled":
            with optimizer.settled():
                pass
        elif action.startswith("edit"):
            generator = torch.Generator().manual_seed(self.seed * 1000 + index + 500)
            for p in parameters:
                edit(p, action, generator)


def laid_out(values, layout):
    """`values` with other strides."""
    if layout == "transposed":
        order = list(range(values.dim()))[::-1]
        return values.permute(order).contiguous().permute(order)
    if layout == "channels_last" and values.dim() in (4, 5):
        last = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.contiguous(memory_format=last)
    if layout == "gaps" and values.dim():
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 7.0, dtype=values.dtype)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    return values.contiguous()


def gradient(spec, kind, generator):
    if kind == "none":
        return None
    expanded = spec.gradient_layout == "expanded" and len(spec.shape) > 0
    g = torch.randn((1, *spec.shape[1:]) if expanded else spec.shape, generator=generator)
    if kind == "columns":  # a few large columns, as real gradients have
        g = g * torch.randn(spec.shape[-1:], generator=generator).exp()
    elif kind == "ties":
        g = g.sign()
    elif kind == "tiny":  # denormal in fp16, and squared in fp32
        g = g * 2.0**-22
    elif kind == "denormal":
        g = g * 2.0**-130
    elif kind == "huge":  # column norms overflow
        g = g * (2.0**14 if spec.gradient_dtype == FP16 else 2.0**66)
    elif kind == "zero":
        g = g * 0.0  # of both signs
    elif kind == "nonfinite":
        odd = torch.rand(g.shape, generator=generator)
        g = torch.where(odd < 0.05, torch.inf, torch.where(odd > 0.97, torch.nan, g))
    g = g.to(spec.gradient_dtype if MIXED_GRADIENTS else spec.dtype)
    return g.expand(spec.shape) if expanded else laid_out(g, spec.gradient_layout)


def edit(p, kind, generator):
    """Overwrite some or all elements, in one of the ways in which people do."""
    values = torch.randn(p.shape, generator=generator).to(p.dtype)
    some = torch.rand(p.shape, generator=generator) < 0.3
    mixed = torch.where(some, values, p.detach())
    if kind == "edit in place":
        with torch.no_grad():
            p.copy_(mixed)
    elif kind == "edit .data":
        p.data.copy_(mixed)
    elif kind == "edit storage":
        p.data = mixed
    elif kind == "edit numpy":  # no version counter sees this
        integer = torch.int16 if p.element_size() == 2 else torch.int32
        p.detach().view(integer).numpy()[...] = mixed.view(integer).numpy()


# Strategies


def shapes():
    side = st.integers(1, 40)
    small = st.integers(1, 6)
    return st.one_of(
        st.tuples(side, side),
        st.tuples(side, side),
        st.tuples(small, small, side),
        st.tuples(small, small, small, small),
        st.tuples(st.integers(1, 3), small, st.integers(1, 3), small, small),
        st.sampled_from([(130, 5), (257, 3), (1, 70), (70, 1)]),  # beyond a block of rows, a vector
        st.sampled_from([(), (1,), (17,), (40,)]),
        st.sampled_from([(0,), (0, 5), (5, 0), (2, 0, 3)]),
    )


@st.composite
def parameter_specs(draw, groups=1, dtypes=DTYPES, gradient_dtypes=None):
    dtype = draw(st.sampled_from(dtypes))
    layouts = ["contiguous", "contiguous", "transposed", "channels_last", "gaps"]
    return ParameterSpec(
        shape=draw(shapes()),
        dtype=dtype,
        layout=draw(st.sampled_from(layouts)),
        gradient_dtype=draw(st.sampled_from(gradient_dtypes or [dtype, dtype, *DTYPES])),
        gradient_layout=draw(st.sampled_from([*layouts, "expanded"])),
        group=draw(st.integers(0, groups - 1)),
    )


RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.floats(0, 1, allow_subnormal=False))
RATES = st.sampled_from([0.0, 1e-3, 1e-3, 0.01, 0.3])
BETAS = st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.3, 0.5), (0.0, 0.9), (0.5, 0.0), (0.99, 0.6)])


@st.composite
def schedules(draw):
    interval = draw(st.integers(1, 5))
    windows = draw(st.sampled_from([1, 1, 2, 3, None]))
    schedule = {
        "update_interval": interval,
        "select_interval": None if windows is None else windows * interval,
        "update_delay": draw(st.integers(0, interval)),
    }
    if draw(st.integers(0, 3)) == 0:
        schedule |= {
            "update_interval": "auto",
            "max_update_interval": interval,
            "auto_ratio": draw(st.sampled_from([0.99, 0.5, 1.0])),
            "update_delay": draw(st.integers(0, 1)),
        }
    if draw(st.integers(0, 7)) == 0:
        schedule |= {"select_interval": "epoch", "steps_per_epoch": draw(st.integers(1, 9))}
    return schedule | {
        "topk_ratio": draw(RATIOS),
        "deferred_rule": draw(st.sampled_from(["adamw", "adamw", "mean"])),
        "lookahead": draw(st.sampled_from(["auto", "auto", 0, 1.0, 2.5])),
        "full_warm_up_rounds": draw(st.sampled_from([0, 0, 1, 3])),
    }


@st.composite
def settings_of(draw):
    return draw(schedules()) | {
        "lr": draw(RATES),
        "betas": draw(BETAS),
        "eps": draw(st.sampled_from([1e-8, 1e-8, 1e-3, 0.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "maximize": draw(st.booleans()),
        "max_grad_norm": draw(st.sampled_from([None, None, 0.5, 5.0])),
        "min_offload_numel": draw(st.sampled_from([0, 0, 0, 50])),
        "host_buffer": draw(st.sampled_from(["ring", "stream"])),
        "num_threads": draw(st.integers(1, 3)),
    }


GROUP_SETTINGS = {
    "lr": RATES,
    "betas": BETAS,
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "eps": st.sampled_from([1e-8, 1e-5]),
    "maximize": st.booleans(),
    "topk_ratio": RATIOS,
    "split": st.booleans(),
}

ORDINARY = ("normal", "normal", "columns", "columns", "ties", "zero", "none")
EXTREME = (*ORDINARY, "tiny", "denormal", "huge", "nonfinite")
EDITS = ("edit in place", "edit .data", "edit storage", "edit numpy")
ACTIONS = ("",) * 8 + ("synchronize", "flush", "settled", "state", *EDITS)


@st.composite
def runs(draw, max_steps=14, kinds=EXTREME, actions=ACTIONS, settings=None, **spec):
    groups = tuple(draw(st.lists(st.fixed_dictionaries({}, optional=GROUP_SETTINGS), min_size=1, max_size=2)))
    parameters = tuple(draw(st.lists(parameter_specs(len(groups), **spec), min_size=1, max_size=4)))
    steps = st.builds(
        StepSpec,
        gradients=st.tuples(*[st.sampled_from(kinds)] * len(parameters)),
        lr=st.one_of(st.none(), st.none(), RATES),
        betas=st.one_of(st.none(), st.none(), st.none(), BETAS),
        after=st.sampled_from(actions),
    )
    return Run(
        parameters=parameters,
        groups=groups,
        settings=draw(settings_of()) if settings is None else draw(settings),
        steps=tuple(draw(st.lists(steps, min_size=min(3, max_steps), max_size=max_steps))),
        seed=draw(st.integers(0, 10**6)),
    )
