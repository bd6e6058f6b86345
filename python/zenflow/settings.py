# SPDX-License-Identifier: Apache-2.0
"""The optimizer's settings: what values they may have, and when a window selects and ends.

Not for: anything that changes during training. Messages use torch's own wording first, where AdamW has one.
"""

import dataclasses
import difflib
import math
import numbers

import torch

UNSUPPORTED_OPTIONS = {
    "amsgrad": "ZenFlow has no AMSGrad; use torch.optim.AdamW(amsgrad=True) for it",
    "capturable": "a step with host work cannot be captured in a CUDA graph; leave it out",
    "differentiable": "ZenFlow's step has no autograd; use torch.optim.AdamW(differentiable=True) for it",
    "foreach": "ZenFlow always uses its own fused kernels; leave it out",
    "fused": "ZenFlow always uses its own fused kernels; leave it out",
}


def reject_unsupported(options, known=()):
    """Raises for options of torch.optim.AdamW that are asked for and not supported, or that are not `known`."""
    for name, value in options.items():
        if name not in UNSUPPORTED_OPTIONS:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"ZenFlowOptimizer got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {UNSUPPORTED_OPTIONS[name]}")


def check_group(group):
    """Checks the values that each parameter group has for itself, and that it has no others of ours."""
    for field in dataclasses.fields(Settings):
        if field.name in group:
            raise ValueError(
                f"{field.name} is one for the whole optimizer: pass it to ZenFlowOptimizer, not in a group"
            )
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got {lr.numel()} elements")
    for name, torch_words in (
        ("lr", "Invalid learning rate"),
        ("eps", "Invalid epsilon value"),
        ("weight_decay", "Invalid weight_decay value"),
    ):
        if not _is_number(group[name]) or not 0.0 <= group[name] < math.inf:
            raise ValueError(f"{torch_words}: {group[name]} ({name} must be a number >= 0)")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(betas):
        if not _is_number(beta) or not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta} (betas must be in [0, 1))")
    if not isinstance(group["maximize"], bool):
        raise ValueError(f"maximize must be True or False, got {group['maximize']!r}")
    check_layout(group)


def check_layout(group):
    """Checks what decides which columns are selected; users may change it between steps."""
    ratio = group["topk_ratio"]
    if not _is_number(ratio) or not 0.0 <= ratio <= 1.0:
        raise ValueError(f"topk_ratio must be in [0, 1], got {ratio!r}")
    if not isinstance(group["split"], bool):
        raise ValueError(f"split must be True or False, got {group['split']!r}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the next step does, by the clock alone."""

    step: int
    warm_up: bool
    selects: bool
    ends_window: bool
    publishes: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that hold for the whole optimizer. `select_interval` and `lookahead` are resolved."""

    update_interval: int = 4
    select_interval: int | None = None
    update_delay: int = 1
    deferred_rule: str = "adamw"
    lookahead: float | str = "auto"
    full_warm_up_rounds: int = 0
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    min_offload_numel: int = 65536
    num_threads: int | None = None
    pt_reserved_cores_perc: float = 0.5
    host_buffer: str = "auto"
    offload_gradients: bool = False
    gradient_accumulation_steps: int | None = None

    def __post_init__(self):
        for name in ("update_interval", "update_delay"):
            if getattr(self, name) == "auto":
                raise ValueError(f'{name}="auto" is not available yet: give a number of steps')
        _check_integer("update_interval", self.update_interval, 1)
        _check_integer("update_delay", self.update_delay, 0)
        if self.update_delay > self.update_interval:
            raise ValueError(
                f"update_delay must be at most update_interval, got update_delay={self.update_delay} "
                f"with update_interval={self.update_interval}"
            )
        if self.select_interval is None:
            object.__setattr__(self, "select_interval", 16 * self.update_interval)
        _check_integer("select_interval", self.select_interval, 1)
        if self.select_interval % self.update_interval:
            raise ValueError(
                f"select_interval must be a multiple of update_interval, got "
                f"select_interval={self.select_interval} with update_interval={self.update_interval}"
            )
        _check_choice("deferred_rule", self.deferred_rule, ("adamw", "mean"))
        _check_choice("host_buffer", self.host_buffer, ("auto", "ring", "stream"))
        if self.lookahead == "auto":
            object.__setattr__(self, "lookahead", float(self.update_delay))
        if not _is_number(self.lookahead) or not 0.0 <= self.lookahead < math.inf:
            raise ValueError(f'lookahead must be "auto" or a number of steps >= 0, got {self.lookahead!r}')
        _check_integer("full_warm_up_rounds", self.full_warm_up_rounds, 0)
        norm = self.max_grad_norm
        if norm is not None and (not _is_number(norm) or not 0.0 < norm < math.inf):
            raise ValueError(f"max_grad_norm must be None or a number > 0, got {norm!r}")
        for name in ("skip_nonfinite", "offload_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _check_integer("min_offload_numel", self.min_offload_numel, 0)
        if self.gradient_accumulation_steps is not None:
            _check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        if self.num_threads is not None:
            _check_integer("num_threads", self.num_threads, 1)
        share = self.pt_reserved_cores_perc
        if not _is_number(share) or not 0.0 <= share <= 1.0:
            raise ValueError(f"pt_reserved_cores_perc must be in [0, 1], got {share!r}")

    def plan(self, clock):
        """What the step after `clock` does (docs/design.md, "Step and window", "Selection", "Visibility").

        clock: (steps so far, of them in the open window, step of the last selection or 0, step of the next
            publication or 0).
        """
        steps, window_step, last_selection, publish_at = clock
        step = steps + 1
        warm_up = step <= self.full_warm_up_rounds
        starts_window = not warm_up and window_step == 0
        selects = starts_window and (last_selection == 0 or step - last_selection >= self.select_interval)
        ends_window = warm_up or window_step + 1 >= self.update_interval
        at_once = ends_window and (warm_up or self.update_delay == 0)
        return Plan(step, warm_up, selects, ends_window, selects or at_once or publish_at == step)


def selected_count(topk_ratio, columns):
    """How many of a parameter's columns are selected: at least one, unless the ratio is 0."""
    if topk_ratio == 0 or columns == 0:
        return 0
    return min(columns, max(1, math.floor(topk_ratio * columns + 0.5)))


def _is_number(value):
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_integer(name, value, least):
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
