# SPDX-License-Identifier: Apache-2.0
"""ZenFlow's semantics in plain torch: slow, single-threaded, written for reading.

What docs/design.md says and docs/arithmetic.md spells out, with whole fp32 tensors and lists of gradients in
place of rings, slots and threads. Tests drive it beside `zenflow.ZenFlowOptimizer` and compare with `==`.
It is not for training, has no state dict, and validates nothing.

Every parameter is a matrix [rows, columns] here. An update that is "in flight" has been computed already and
waits for the step at which it may be seen.
"""

import functools
import math
import operator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

NORM_BLOCK = 128  # rows whose squares are added up before they join the column's sum


# Arithmetic


def fma(a, b, c):
    """a * b + c of fp32 tensors, rounded once: exact product and sum rounded to odd in fp64, then to fp32."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    shift = total - product
    error = (product - (total - shift)) + (c - shift)  # TwoSum: product + c == total + error
    bits = total.view(torch.int64)
    inexact_and_even = torch.isfinite(total) & (error != 0) & (bits % 2 == 0)
    away_from_zero = (error > 0) == (total > 0)
    odd = bits + torch.where(away_from_zero, 1, -1)
    return torch.where(inexact_and_even, odd, bits).view(torch.float64).float()


def fp32(value):
    return torch.tensor(value, dtype=torch.float32)


def same_bits(a, b):
    """Elementwise: equal bit patterns, or both NaN."""
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())


def fold(m, v, g, beta1, beta2):
    """Moments after one more gradient; all fp32."""
    take1, keep1, take2, keep2 = fp32(1 - beta1), fp32(beta1), fp32(1 - beta2), fp32(beta2)
    d = g - m
    m = fma(take1, d, m) if take1 < 0.5 else fma(-keep1, d, g)
    return m, fma(keep2, v, (take2 * g) * g)


def move(w, m, v, counts, last, lr_sum, keep, lookahead):
    """The weight after one move, and what is shown of it, both fp32. `counts`: the updates of each column."""

    def per_column(formula):
        values = {t: formula(t) for t in set(counts)}
        return fp32([values[t] for t in counts])  # [columns]

    step = per_column(lambda t: lr_sum / (1 - last.beta1**t))
    root = per_column(lambda t: 1 / math.sqrt(1 - last.beta2**t))
    ahead = per_column(lambda t: lookahead * last.lr / (1 - last.beta1**t))
    decay = fp32(1 - keep)

    # fp64 and one rounding give IEEE's fp32 root and quotient; torch's own fp32 sqrt may be off by one ulp.
    q = (m.double() / fma(root, v.double().sqrt().float(), fp32(last.eps)).double()).float()
    decayed = decay * w if decay != 0 else torch.zeros_like(w)
    moved = torch.where((step == 0) & (decay == 0), w, w - fma(step, q, decayed))
    return moved, torch.where(ahead == 0, moved, fma(-ahead, q, moved))


def column_norms(gradient):
    """Squared norms of an fp32 matrix's columns, added up in the order that all implementations keep."""
    total = torch.zeros(gradient.shape[1])
    for block in gradient.split(NORM_BLOCK):
        partial = torch.zeros(gradient.shape[1])
        for row in block:
            partial = fma(row, row, partial)
        total = total + partial
    return total


def squared_norm(gradient, mask=None):
    """A gradient's squared norm in double, or that of the columns in `mask`: 256 interleaved sums of its columns', then
    their sum."""
    sums = [0.0] * 256
    for j, norm in enumerate(column_norms(as_matrix(gradient).float()).tolist()):
        if mask is None or mask[j]:
            sums[j % 256] += norm
    return added(sums)


def root_mean_square(gradient, mask):
    """Of the columns in `mask`, in double."""
    rows = as_matrix(gradient).shape[0]
    return math.sqrt(squared_norm(gradient, mask) / (rows * int(mask.sum())))


def added(numbers):
    """Their sum, one after the other; the sum() of newer Pythons compensates its errors."""
    return functools.reduce(operator.add, numbers, 0.0)


def largest(norms, ratio):
    """Mask of the selected columns: finite before non-finite, larger first, lower index first."""
    k = math.floor(ratio * len(norms) + 0.5)
    if ratio > 0:
        k = max(k, 1)

    def rank(item):
        j, norm = item
        return (0, -norm, j) if math.isfinite(norm) else (1, 0, j)

    order = [j for j, _ in sorted(enumerate(norms.tolist()), key=rank)]
    mask = torch.zeros(len(norms), dtype=torch.bool)
    mask[order[:k]] = True
    return mask


def matrix_shape(shape):
    if len(shape) < 2:
        return 1, math.prod(shape)
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


def as_matrix(tensor):
    """A contiguous copy [rows, columns] in logical order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(matrix_shape(tensor.shape))


# State


@dataclass
class Gradient:
    """A gradient with the settings of its step."""

    value: torch.Tensor  # fp32 [rows, columns], clipped, negated for maximize
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass
class ParameterState:
    """All [rows, columns] but the counts; `last_written` and `pending` have the parameter's dtype."""

    master: torch.Tensor
    exp_avg: torch.Tensor  # of deferred columns: without the open window
    exp_avg_sq: torch.Tensor
    last_written: torch.Tensor  # the bits that the parameter got from us
    pending: torch.Tensor  # what the update in flight will write into deferred columns
    column_steps: torch.Tensor  # AdamW updates of each column, int64 [columns]
    step: int = 0  # gradients so far
    selected: torch.Tensor | None = None  # bool [columns]; None: nothing is deferred yet
    window: list[Gradient] = field(default_factory=list)
    in_flight: bool = False

    @property
    def deferred(self):
        return self.column_steps < 0 if self.selected is None else ~self.selected


class ReferenceZenFlow:
    """Same arguments and methods as `zenflow.ZenFlowOptimizer`, as far as results depend on them."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        *,
        topk_ratio=0.1,
        update_interval=4,
        select_interval=None,
        update_delay=1,
        auto_ratio=0.99,
        max_update_interval=16,
        steps_per_epoch=None,
        deferred_rule="adamw",
        lookahead="auto",
        full_warm_up_rounds=0,
        max_grad_norm=None,
        min_offload_numel=65536,
        num_threads=None,
        pt_reserved_cores_perc=0.5,
        host_buffer="auto",
        maximize=False,
    ):
        params = list(params)
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.defaults |= {"maximize": maximize, "topk_ratio": topk_ratio, "split": True}
        self.param_groups = []
        for group in groups:
            self.add_param_group(group)
        self.automatic = update_interval == "auto"
        self.update_interval = max_update_interval if self.automatic else update_interval
        self.auto_ratio = auto_ratio
        self.select_interval = 16 * self.update_interval if select_interval is None else select_interval
        self.steps_per_epoch = steps_per_epoch
        self.update_delay = update_delay
        self.rule = deferred_rule
        self.lookahead = float(update_delay if lookahead == "auto" else lookahead)
        self.warm_up = full_warm_up_rounds
        self.max_grad_norm = max_grad_norm
        self.min_offload_numel = min_offload_numel
        self.state: dict[torch.Tensor, ParameterState] = {}
        self.steps = 0
        self.position = 0  # steps of the open window so far
        self.sides = {}  # of its steps but the last: [(selected, deferred)] root mean square gradients by parameter
        self.last_select = None  # number of the last selection step
        self.due = None  # number of the step that makes the update in flight visible

    # What users call

    def add_param_group(self, group):
        self.param_groups.append(self.defaults | group | {"params": list(group["params"])})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_for_edits()
        s = self.steps = self.steps + 1
        warm = s <= self.warm_up
        gradients = self._gradients()

        selecting = not warm and self.position == 0
        selecting &= self.last_select is None or self._selection_is_due(s)
        voted_to_end = self.automatic and self._vote()
        if selecting:
            self._publish()
            self.last_select = s
        for p, (group, gradient) in gradients.items():
            state = self._state(p)
            state.step += 1
            if warm or not self._splits(p, group):
                self._update_now(p, torch.ones_like(state.column_steps, dtype=torch.bool), gradient)
                continue
            if selecting or state.selected is None:
                # Hand-over moves nothing here: state is full-shaped, and the update that follows writes the
                # newly selected columns from their settled masters.
                state.selected = largest(column_norms(as_matrix(p.grad).float()), group["topk_ratio"])
            self._update_now(p, state.selected, gradient)
            state.window.append(gradient)
            if self.automatic and state.selected.any() and state.deferred.any():
                sides = root_mean_square(p.grad, state.selected), root_mean_square(p.grad, state.deferred)
                self.sides.setdefault(p, []).append(sides)

        if s == self.due:
            self._publish()
        if not warm:
            self.position += 1
        if self.position == self.update_interval or voted_to_end:
            self._close_window()
            self.due = s + self.update_delay
            if self.update_delay == 0:
                self._publish()
        return loss

    @torch.no_grad()
    def synchronize(self):
        self._look_for_edits()
        for p, state in self.state.items():
            settled = state.master.to(p.dtype)
            state.last_written = torch.where(state.deferred, settled, state.last_written)
            state.in_flight = False
            self._write(p)
        self.due = None

    @torch.no_grad()
    def flush(self):
        self._look_for_edits()
        self._close_window()
        self.synchronize()

    @contextmanager
    def settled(self):
        with torch.no_grad():
            self._look_for_edits()
            shown = {}
            for p, state in self.state.items():
                shown[p] = torch.where(state.deferred, state.master.to(p.dtype), state.last_written)
                p.copy_(shown[p].view(p.shape))
        try:
            yield
        finally:
            with torch.no_grad():
                for p, state in self.state.items():
                    live = as_matrix(p)
                    kept = torch.where(same_bits(live, shown[p]), state.last_written, live)
                    p.copy_(kept.view(p.shape))

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # What tests look at

    @torch.no_grad()
    def masters(self):
        self._look_for_edits()
        return {p: state.master.view(p.shape) for p, state in self.state.items()}

    def moments(self):
        """exp_avg and exp_avg_sq with all gradients folded in; for "mean", those of closed windows."""
        result = {}
        for p, state in self.state.items():
            m, v = state.exp_avg, state.exp_avg_sq
            for g in state.window if self.rule == "adamw" else ():
                folded = fold(m, v, g.value, g.beta1, g.beta2)
                m, v = torch.where(state.deferred, folded[0], m), torch.where(state.deferred, folded[1], v)
            result[p] = m.view(p.shape), v.view(p.shape)
        return result

    def selection(self, p):
        """Indices of p's selected columns, sorted; none before the first selection."""
        selected = self.state[p].selected
        return [] if selected is None else selected.nonzero().flatten().tolist()

    # One verb each

    def _selection_is_due(self, s):
        if self.select_interval == "epoch":
            return (s - 1) // self.steps_per_epoch != (self.last_select - 1) // self.steps_per_epoch
        return s - self.last_select >= self.select_interval

    def _vote(self):
        """Whether enough parameters want the open window to end with the coming step."""
        votes = 0
        for sides in self.sides.values():
            selected, deferred = added(q for q, _ in sides), added(r for _, r in sides)
            votes += deferred >= selected / len(sides)
        return bool(self.sides) and votes >= self.auto_ratio * len(self.sides)

    def _splits(self, p, group):
        return p.dim() >= 2 and p.numel() >= self.min_offload_numel and group["split"]

    def _state(self, p):
        if p not in self.state:
            live = as_matrix(p)
            m, v = torch.zeros(2, *live.shape)
            counts = torch.zeros(live.shape[1], dtype=torch.int64)
            self.state[p] = ParameterState(live.float(), m, v, live.clone(), live.clone(), counts)
        return self.state[p]

    def _gradients(self):
        """{parameter: (group, gradient)} of this step, scaled."""
        found = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None and p.numel()]
        coefficient = 1.0
        if self.max_grad_norm is not None:
            total = added(squared_norm(p.grad) for p, _ in found)
            if math.isfinite(total):
                coefficient = min(1.0, self.max_grad_norm / (math.sqrt(total) + 1e-6))
        gradients = {}
        for p, group in found:
            scale = fp32(-coefficient if group["maximize"] else coefficient)
            settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
            gradients[p] = group, Gradient(as_matrix(p.grad).float() * scale, *map(float, settings))
        return gradients

    def _look_for_edits(self):
        for p, state in self.state.items():
            live = as_matrix(p)
            # after model.to(dtype), what we wrote is there converted
            state.last_written, state.pending = state.last_written.to(p.dtype), state.pending.to(p.dtype)
            edited = ~same_bits(live, state.last_written)
            state.master[edited] = live.float()[edited]
            state.last_written[edited] = live[edited]
            state.pending[edited] = live[edited]

    def _update(self, p, columns, gradients, lookahead):
        """Folds `gradients` into moments of `columns` (a mask), moves masters once; returns what to show."""
        state = self.state[p]
        w, m, v = state.master[:, columns], state.exp_avg[:, columns], state.exp_avg_sq[:, columns]
        lr_sum, keep = 0.0, 1.0
        for g in gradients:
            m, v = fold(m, v, g.value[:, columns], g.beta1, g.beta2)
            lr_sum += g.lr
            keep *= 1 - g.lr * g.weight_decay
        state.column_steps[columns] += 1
        counts = state.column_steps[columns].tolist() if self.rule == "mean" else [state.step] * w.shape[1]
        w, shown = move(w, m, v, counts, gradients[-1], lr_sum, keep, lookahead)
        state.master[:, columns], state.exp_avg[:, columns], state.exp_avg_sq[:, columns] = w, m, v
        return shown.to(p.dtype)

    def _update_now(self, p, columns, gradient):
        self.state[p].last_written[:, columns] = self._update(p, columns, [gradient], 0.0)
        self._write(p)

    def _close_window(self):
        """The host update of all parameters that had a gradient in the window; its result stays in flight."""
        for p, state in self.state.items():
            if state.window:
                gradients = state.window
                if self.rule == "mean":
                    gradients = [self._mean(gradients)]
                state.pending[:, state.deferred] = self._update(p, state.deferred, gradients, self.lookahead)
                state.in_flight = True
                state.window = []
        self.position = 0
        self.sides = {}

    @staticmethod
    def _mean(gradients):
        total, last = torch.zeros_like(gradients[0].value), gradients[-1]
        for g in gradients:
            total = total + g.value
        mean = total / fp32(float(len(gradients)))
        return Gradient(mean, last.lr, last.beta1, last.beta2, last.eps, last.weight_decay)

    def _publish(self):
        """What is in flight becomes visible, with its look-ahead."""
        for p, state in self.state.items():
            if state.in_flight:
                state.last_written = torch.where(state.deferred, state.pending, state.last_written)
                state.in_flight = False
                self._write(p)
        self.due = None

    def _write(self, p):
        # Edits have been looked for, so this changes no element but those that we mean to write.
        p.copy_(self.state[p].last_written.view(p.shape))
