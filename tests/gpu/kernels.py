# SPDX-License-Identifier: Apache-2.0
"""The device's kernels, called with tensors: the one place that makes zenflow._C.kernels' arguments.

Tensors are contiguous, on the device, and kept alive by the caller until the stream is done; None is a null pointer.
A `stream` is torch's integer handle.
"""

from dataclasses import dataclass

import torch

from zenflow import _C
from zenflow.tensors import DTYPE_CODES, address_of


@dataclass(frozen=True)
class Rule:
    """An update of AdamW: its settings, its number, and what the gradient is multiplied by."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    step: int = 1
    scale: float = 1.0

    def fields(self):
        hyper = (self.lr, *self.betas, self.eps, self.weight_decay)
        return {"hyper": hyper, "step": self.step, "scale": self.scale}


@dataclass
class Columns:
    """Where a split parameter's columns are, on the device."""

    slot_columns: torch.Tensor  # int32 [slots]
    device_columns: torch.Tensor  # int32 [width]
    place: torch.Tensor  # int32 [slots + width]


@dataclass
class State:
    """A weight and the fp32 state of some of its columns."""

    weight: torch.Tensor  # [rows, columns]
    master: torch.Tensor  # [rows, width], as the others
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def fields(self):
        return {
            "weight": _address(self.weight),
            "weight_dtype": DTYPE_CODES[self.weight.dtype],
            "master": _address(self.master),
            "exp_avg": _address(self.exp_avg),
            "exp_avg_sq": _address(self.exp_avg_sq),
        }


def _address(tensor):
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels take contiguous tensors"
    return address_of(tensor)


def _matrix(tensor):
    return {"rows": tensor.shape[0], "columns": tensor.shape[1]}


def _norm_tasks(gradients, norms):
    return [
        {"gradient": _address(g), "dtype": DTYPE_CODES[g.dtype], **_matrix(g), "norms": _address(n)}
        for g, n in zip(gradients, norms, strict=True)
    ]


def column_norms_scratch(gradients, norms):
    """Floats that column_norms needs."""
    return _C.kernels.column_norms_scratch(tasks=_norm_tasks(gradients, norms))


def column_norms(gradients, norms, scratch, stream):
    """norms[t][j] = squared norm of column j of gradients[t]."""
    _C.kernels.column_norms(tasks=_norm_tasks(gradients, norms), scratch=_address(scratch), stream=stream)


def squared_norms(gradients, norms, squared, stream):
    """squared[t] = sum of norms[t], fp64; the gradients' shapes alone are used."""
    _C.kernels.squared_norms(tasks=_norm_tasks(gradients, norms), squared=_address(squared), stream=stream)


def side_norms(norms, places, sides, stream):
    """sides[t] = sums of norms[t] where places[t] is negative, and where it is not, fp64."""
    tasks = [
        {"norms": _address(n), "place": _address(p), "columns": n.numel(), "sides": _address(s)}
        for n, p, s in zip(norms, places, sides, strict=True)
    ]
    _C.kernels.side_norms(tasks=tasks, stream=stream)


def clip_coefficient(squared, max_norm, norm, coefficient, stream):
    _C.kernels.clip_coefficient(
        squared=_address(squared),
        count=len(squared),
        max_norm=max_norm,
        norm=_address(norm),
        coefficient=_address(coefficient),
        stream=stream,
    )


def top_k(norms, selected, stream):
    """selected[t] = the len(selected[t]) first columns of norms[t], ascending."""
    tasks = [
        {"norms": _address(n), "columns": len(n), "k": len(s), "selected": _address(s)}
        for n, s in zip(norms, selected, strict=True)
    ]
    _C.kernels.top_k(tasks=tasks, stream=stream)


def build_place(columns, stream):
    _C.kernels.build_place(
        slot_columns=_address(columns.slot_columns),
        slots=len(columns.slot_columns),
        device_columns=_address(columns.device_columns),
        width=len(columns.device_columns),
        place=_address(columns.place),
        stream=stream,
    )


def _selective_task(gradient, columns, packed, state, rule, coefficient, corrections, kept):
    step, root = corrections or (None, None)
    nothing = dict.fromkeys(("weight", "weight_dtype", "master", "exp_avg", "exp_avg_sq"), 0)
    return {
        "gradient": _address(gradient),
        "gradient_dtype": DTYPE_CODES[gradient.dtype],
        **_matrix(gradient),
        "place": _address(columns.place),
        "packed": _address(packed),
        "packed_dtype": DTYPE_CODES[packed.dtype],
        "slots": len(columns.slot_columns),
        **(nothing if state is None else state.fields()),
        "width": len(columns.device_columns),
        **rule.fields(),
        "coefficient": _address(coefficient),
        "column_step": _address(step),
        "column_root": _address(root),
        "kept": _address(kept),
    }


def selective_adam(gradient, columns, packed, state, rule, stream, *, coefficient=None, corrections=None):
    """AdamW of the selected columns; the deferred ones into `packed`. corrections: (step, root), fp32 [width] each."""
    task = _selective_task(gradient, columns, packed, state, rule, coefficient, corrections, None)
    _C.kernels.selective_adam(task=task, stream=stream)


def split_gradient(gradient, columns, packed, kept, stream):
    """The deferred columns into `packed`, the selected ones into `kept`."""
    task = _selective_task(gradient, columns, packed, None, Rule(), None, None, kept)
    _C.kernels.selective_adam(task=task, stream=stream)


def unpack(gradient, columns, packed, kept, stream):
    """The inverse of split_gradient."""
    task = _selective_task(gradient, columns, packed, None, Rule(), None, None, kept)
    _C.kernels.unpack(task=task, gradient=_address(gradient), stream=stream)


def adam_task(gradient, state, rule, *, device_columns=None, corrections=None):
    """For adam(): a whole parameter, or with device_columns the kept gradient of a split one's selected columns."""
    step, root = corrections or (None, None)
    return {
        "gradient": _address(gradient),
        "gradient_dtype": DTYPE_CODES[gradient.dtype],
        "rows": gradient.shape[0],
        "width": gradient.shape[1],
        "columns": state.weight.shape[1],
        "device_columns": _address(device_columns),
        **state.fields(),
        **rule.fields(),
        "column_step": _address(step),
        "column_root": _address(root),
    }


def adam(tasks, stream, *, coefficient=None):
    _C.kernels.adam(tasks=tasks, coefficient=_address(coefficient), stream=stream)


def scatter(upload, weight, columns, stream, *, first_row=0, checksums=None):
    """upload, [rows, slots], into the deferred columns of rows first_row ... of the weight."""
    task = {
        "upload": _address(upload),
        "weight": _address(weight),
        "dtype": DTYPE_CODES[weight.dtype],
        "first_row": first_row,
        "rows": upload.shape[0],
        "columns": weight.shape[1],
        "place": _address(columns.place),
        "slots": len(columns.slot_columns),
        "checksums": _address(checksums),
    }
    _C.kernels.scatter(task=task, stream=stream)


def _moved_columns(matrix, indices):
    return {
        "matrix": _address(matrix),
        "item_bytes": matrix.element_size(),
        "rows": matrix.shape[0],
        "stride": matrix.shape[1],
        "columns": _address(indices),
        "count": len(indices),
    }


def gather_columns(matrix, indices, out, stream):
    """out = matrix[:, indices]"""
    _C.kernels.gather_columns(**_moved_columns(matrix, indices), out=_address(out), stream=stream)


def scatter_columns(matrix, indices, source, stream):
    """matrix[:, indices] = source"""
    _C.kernels.scatter_columns(**_moved_columns(matrix, indices), source=_address(source), stream=stream)


def column_checksums(weight, columns, checksums, stream):
    """checksums, 64-bit [slots], of the deferred columns."""
    _C.kernels.column_checksums(
        weight=_address(weight),
        dtype=DTYPE_CODES[weight.dtype],
        **_matrix(weight),
        place=_address(columns.place),
        slots=len(columns.slot_columns),
        checksums=_address(checksums),
        stream=stream,
    )


def adopt_edits(weight, columns, expected, found, last_written, pending, master, stream):
    """The last three are in page-locked host memory."""
    task = {
        "weight": _address(weight),
        "dtype": DTYPE_CODES[weight.dtype],
        **_matrix(weight),
        "slot_columns": _address(columns.slot_columns),
        "place": _address(columns.place),
        "slots": len(columns.slot_columns),
        "expected": _address(expected),
        "found": _address(found),
        "last_written": _address(last_written),
        "pending": _address(pending),
        "master": _address(master),
    }
    _C.kernels.adopt_edits(task=task, stream=stream)
