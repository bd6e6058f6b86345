# SPDX-License-Identifier: Apache-2.0
"""The optimizer's settings: what values they may have, and when a window selects and ends.

Not for: anything that changes during training. Needs no torch.
Messages use torch's own wording first, where AdamW has one.
"""

import dataclasses
import difflib
import math
import numbers
import sys

MOMENT_BYTES = {"float32": 4, "bfloat16": 2}
UNSUPPORTED_OPTIONS = {
    "amsgrad": "ZenFlow has no AMSGrad; use torch.optim.AdamW(amsgrad=True) for it",
    "capturable": "a step with host work cannot be captured in a CUDA graph; leave it out",
    "differentiable": "ZenFlow's step has no autograd; use torch.optim.AdamW(differentiable=True) for it",
    "foreach": "ZenFlow always uses its own fused kernels; leave it out",
    "fused": "ZenFlow always uses its own fused kernels; leave it out",
}


# What other optimizers call the same.
OTHER_NAMES = {"learning_rate": "lr", "topk": "topk_ratio", "clip_grad_norm": "max_grad_norm"}


def unexpected(function, name, known):
    """A TypeError as Python's own, with the name that was probably meant."""
    renamed = OTHER_NAMES.get(name)
    close = [renamed] if renamed in known else difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; help(zenflow.{function}) lists all"
    return TypeError(f"{function} got an unexpected keyword argument {name!r}{hint}")


def reject_unsupported(options, known=()):
    """Raises for options of torch.optim.AdamW that are asked for and not supported, or that are not `known`."""
    for name, value in options.items():
        if name not in UNSUPPORTED_OPTIONS:
            raise unexpected("ZenFlowOptimizer", name, known)
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
    if _is_tensor(lr) and lr.numel() != 1:
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


GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize", "topk_ratio", "split")


def likely_typos(group):
    """{a key of the user's: the key that it was probably meant to be}; groups may hold whatever users put there."""
    matches = {
        key: difflib.get_close_matches(str(key), GROUP_KEYS, n=1, cutoff=0.85) for key in group if key not in GROUP_KEYS
    }
    return {key: close[0] for key, close in matches.items() if close}


def numbers_of(group):
    """(lr, beta1, beta2, eps, weight_decay, maximize) by value; users may change them between steps. As in torch, only
    what is no number is refused then."""
    try:
        beta1, beta2 = group["betas"]
        numbers = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
        return (*map(float, numbers), group["maximize"])
    except (TypeError, ValueError, RuntimeError):
        check_group(group)  # says which, and what to do
        raise


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
    """The settings that hold for the whole optimizer. What depends on the schedule is resolved, unless that is
    measured: then `with_schedule` gives the settings that can be trained with."""

    update_interval: int | str = 4
    select_interval: int | str | None = None
    update_delay: int | str | None = None
    auto_ratio: float = 0.99
    max_update_interval: int = 16
    steps_per_epoch: int | None = None
    deferred_rule: str = "adamw"
    lookahead: float | str = "auto"
    full_warm_up_rounds: int = 0
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    min_offload_numel: int = 65536
    state_dtype: object = "float32"
    num_threads: int | None = None
    pt_reserved_cores_perc: float = 0.5
    host_buffer: str = "auto"
    offload_gradients: bool = False
    gradient_accumulation_steps: int | None = None

    def __post_init__(self):
        self._check_schedule()
        self._check_selection()
        _check_choice("deferred_rule", self.deferred_rule, ("adamw", "mean"))
        _check_choice("host_buffer", self.host_buffer, ("auto", "ring", "stream"))
        if self.lookahead == "auto":
            if not self.measured:
                object.__setattr__(self, "lookahead", float(self.update_delay))
        elif not _is_number(self.lookahead) or not 0.0 <= self.lookahead < math.inf:
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
        dtype = str(self.state_dtype).removeprefix("torch.")
        dtype = {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype)
        if dtype not in MOMENT_BYTES:
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {self.state_dtype!r}")
        object.__setattr__(self, "state_dtype", dtype)
        if self.num_threads is not None:
            _check_integer("num_threads", self.num_threads, 1)
        share = self.pt_reserved_cores_perc
        if not _is_number(share) or not 0.0 <= share <= 1.0:
            raise ValueError(f"pt_reserved_cores_perc must be in [0, 1], got {share!r}")

    def _check_schedule(self):
        _check_integer("max_update_interval", self.max_update_interval, 1)
        if not _is_number(self.auto_ratio) or not 0.0 < self.auto_ratio <= 1.0:
            raise ValueError(f"auto_ratio must be in (0, 1], got {self.auto_ratio!r}")
        if isinstance(self.update_interval, str):
            _check_choice("update_interval", self.update_interval, ("auto", "fit"), "an integer >= 1")
        else:
            _check_integer("update_interval", self.update_interval, 1)
        if self.update_delay is None:
            object.__setattr__(self, "update_delay", "auto" if self.update_interval == "fit" else 1)
        if isinstance(self.update_delay, str):
            _check_choice("update_delay", self.update_delay, ("auto",), "an integer >= 0")
        else:
            _check_integer("update_delay", self.update_delay, 0)
        if self.update_interval == "fit" and self.update_delay != "auto":
            raise ValueError(
                f'update_interval="fit" chooses update_delay too, got update_delay={self.update_delay}: leave it out, '
                "or give both as numbers"
            )
        if self.automatic and self.update_delay not in (0, 1):
            raise ValueError(f'update_delay must be 0 or 1 with update_interval="auto", got {self.update_delay!r}')
        if not self.measured and self.update_delay > self.longest_interval:
            raise ValueError(
                f"update_delay must be at most update_interval, got update_delay={self.update_delay} "
                f"with update_interval={self.update_interval}"
            )

    def _check_selection(self):
        if self.select_interval == "epoch":
            if self.steps_per_epoch is None:
                raise ValueError(
                    'select_interval="epoch" needs steps_per_epoch: how often step() is called in an epoch'
                )
            _check_integer("steps_per_epoch", self.steps_per_epoch, 1)
            return
        if self.steps_per_epoch is not None:
            raise ValueError(
                f'steps_per_epoch is for select_interval="epoch", got select_interval={self.select_interval!r}'
            )
        if self.select_interval is None:
            if self.measured:
                return
            object.__setattr__(self, "select_interval", 16 * self.longest_interval)
        if isinstance(self.select_interval, str):
            _check_choice("select_interval", self.select_interval, ("epoch",), "an integer >= 1")
        _check_integer("select_interval", self.select_interval, 1)
        if isinstance(self.update_interval, numbers.Integral) and self.select_interval % self.update_interval:
            raise ValueError(
                f"select_interval must be a multiple of update_interval, got "
                f"select_interval={self.select_interval} with update_interval={self.update_interval}"
            )

    @property
    def moment_bytes(self):
        """Of an element of a deferred column's exp_avg, or exp_avg_sq."""
        return MOMENT_BYTES[self.state_dtype]

    @property
    def automatic(self):
        """Whether gradients decide where a window ends."""
        return isinstance(self.update_interval, str) and self.update_interval == "auto"

    @property
    def measured(self):
        """Whether the schedule is yet to be measured (zenflow.fit)."""
        return self.update_interval == "fit" or self.update_delay == "auto"

    @property
    def longest_interval(self):
        """Steps in the longest window that there can be."""
        return self.max_update_interval if isinstance(self.update_interval, str) else self.update_interval

    def with_schedule(self, update_interval, update_delay):
        """The same with numbers in place of what is measured. Selections wait for the next window's begin."""
        interval = self.select_interval
        if isinstance(interval, numbers.Integral):
            interval = -(-interval // update_interval) * update_interval
        return dataclasses.replace(
            self, update_interval=update_interval, update_delay=update_delay, select_interval=interval
        )

    def plan(self, clock, votes_to_end=False):
        """What the step after `clock` does (docs/design.md, "Step and window", "Selection", "Visibility").

        clock: (steps so far, of them in the open window, step of the last selection or 0, step of the next
            publication or 0). votes_to_end: whether an automatic window ends here by its parameters' votes.
        """
        steps, window_step, last_selection, publish_at = clock
        step = steps + 1
        warm_up = step <= self.full_warm_up_rounds
        starts_window = not warm_up and window_step == 0
        selects = starts_window and (last_selection == 0 or self._selection_is_due(step, last_selection))
        ends_window = warm_up or votes_to_end or window_step + 1 >= self.longest_interval
        at_once = ends_window and (warm_up or self.update_delay == 0)
        return Plan(step, warm_up, selects, ends_window, selects or at_once or publish_at == step)

    def _selection_is_due(self, step, last_selection):
        if self.select_interval == "epoch":
            return (step - 1) // self.steps_per_epoch > (last_selection - 1) // self.steps_per_epoch
        return step - last_selection >= self.select_interval


def _is_tensor(value):
    torch = sys.modules.get("torch")  # where nobody has imported it there is no tensor, and none is needed here
    return torch is not None and isinstance(value, torch.Tensor)


def _is_number(value):
    if _is_tensor(value):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_integer(name, value, least):
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_choice(name, value, choices, or_else=None):
    if value not in choices:
        allowed = ", ".join([*([or_else] if or_else else []), *map(repr, choices)])
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
