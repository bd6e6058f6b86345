# SPDX-License-Identifier: Apache-2.0
"""The one place where tensors become addresses: checks of parameters and gradients, and the engine's rows.

Not for: deciding what a step does.
"""

import contextlib

import torch
from torch.nn.parameter import is_lazy

from zenflow import devices
from zenflow.sizes import matrix_shape

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STAGED = -1  # in a row, in place of a dtype: the gradient is the one that the engine has staged
_DTYPE_NAMES = "float32, bfloat16 or float16"


def check_parameter(p, name):
    """Raises if p cannot be optimized here, whatever its gradients."""
    if p.is_complex():
        raise ValueError(f"{name} is complex ({p.dtype}): use torch.view_as_real(p), or torch.optim.AdamW for it")
    if p.dtype not in DTYPE_CODES:
        raise ValueError(f"{name} has dtype {p.dtype}: ZenFlow updates {_DTYPE_NAMES}; use torch.optim.AdamW for it")
    if p.layout is not torch.strided:
        raise ValueError(f"{name} has layout {p.layout}: ZenFlow updates dense tensors; use torch.optim.SparseAdam")
    if p.device.type not in (*devices.TYPES, "meta"):
        raise RuntimeError(
            f"{name} is on {p.device}: ZenFlow updates parameters on the CPU and on CUDA GPUs; use model.to('cpu'), or "
            "torch.optim.AdamW for it"
        )
    if p.device.type != "meta" and (reason := devices.why_not(devices.device_of(p))):
        raise RuntimeError(f"{name} is on {p.device}, and {reason}")
    if is_lazy(p):  # without a shape until its module's first forward
        return
    if p.is_neg() or any(step == 0 and size > 1 for size, step in zip(p.shape, p.stride(), strict=True)):
        raise RuntimeError(f"{name} is an expanded or negated view, which cannot be written in place: clone() it")


def check_step(p, gradient, name):
    """Raises if this step's gradient cannot be applied to p. Nothing has changed then."""
    check_parameter(p, name)
    if p.device.type == "meta" or gradient.device.type == "meta":
        raise RuntimeError(f"{name} is a meta tensor without data: materialise the model before step()")
    if gradient.is_sparse or gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{name} has a sparse gradient ({gradient.layout}): ZenFlow does not support sparse gradients; "
            "use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter"
        )
    if gradient.dtype not in DTYPE_CODES:
        raise RuntimeError(f"{name} has a gradient of dtype {gradient.dtype}: ZenFlow takes {_DTYPE_NAMES}")
    if gradient.is_neg():
        raise RuntimeError(f"{name} has a gradient that is a negated view: assign gradient.resolve_neg()")
    if gradient.device != p.device:
        raise RuntimeError(f"{name} is on {p.device} but its gradient is on {gradient.device}: move one of them")
    if gradient.shape != p.shape:
        raise RuntimeError(f"{name} has shape {tuple(p.shape)} but its gradient {tuple(gradient.shape)}")


def parameter_name(groups, parameter):
    """For messages: the name that the user gave, or the place in the groups."""
    for i, group in enumerate(groups):
        for j, p in enumerate(group["params"]):
            if p is parameter:
                return group["param_names"][j] if "param_names" in group else f"parameter {j} of group {i}"
    return "a parameter"


def parameter_position(groups, parameter):
    """Its number in the order of groups; 0 for others."""
    parameters = (p for group in groups for p in group["params"])
    return next((i for i, p in enumerate(parameters) if p is parameter), 0)


def check_weight(p, record, groups):
    """Raises if p is no longer the tensor that its state was made for; moves are followed before."""
    if not record.is_for(p):
        raise RuntimeError(
            f"{parameter_name(groups, p)} had shape {tuple(record.shape)} and {record.dtype} on "
            f"{_device_name(record.device)}, and now has {tuple(p.shape)}, {p.dtype} on {p.device}: change it back, or "
            "make a new optimizer"
        )


def _device_name(device):
    return "the CPU" if device is None else f"cuda:{device}"


def all_finite(gradients):
    """Whether no gradient holds an Inf or NaN."""
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def is_plain(p, gradient):
    """Whether check_step has nothing to find; a few attribute reads, for the step's inner loop."""
    return (
        gradient.dtype in DTYPE_CODES
        and p.dtype in DTYPE_CODES
        and gradient.layout is torch.strided
        and gradient.device == p.device
        and (p.is_cpu or p.is_cuda)
        and gradient.shape == p.shape
        and not gradient.is_neg()
    )


def strides_of(tensor):
    """None for a contiguous tensor, else its strides in elements."""
    return None if tensor.is_contiguous() else tensor.stride()


def address_of(tensor):
    """data_ptr(); raises for a tensor with elements whose memory is elsewhere or gone."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise RuntimeError(
            f"a parameter or gradient of shape {tuple(tensor.shape)} has no memory of its own: this version does not "
            f"take DTensor and other wrappers (it is a {type(tensor).__name__}), nor tensors whose storage was freed"
        )
    return address


def addresses(tensors):
    """Data pointers of contiguous CPU tensors by name; 0 for None."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def same_bits(a, b):
    """Elementwise: equal bit patterns; any NaN equals any NaN."""
    integer = torch.int32 if a.element_size() == 4 else torch.int16
    return (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())


try:
    torch.autograd.graph.increment_version([])
    _increment_versions = torch.autograd.graph.increment_version
except (TypeError, IndexError):  # torch before 2.5 takes one tensor at a time

    def _increment_versions(tensors):
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


class Record:
    """What the optimizer remembers of one parameter: its place in the engine, the memory lent to it, its last known
    state."""

    __slots__ = (
        "address",
        "blocks",
        "columns",
        "copy",
        "device",
        "dtype",
        "index",
        "rows",
        "shape",
        "split",
        "step",
        "strides",
        "version",
    )

    def __init__(self, index, p, split, step, dtype):
        self.index = index
        self.split = split
        self.shape = p.shape
        self.dtype = dtype
        self.device = devices.device_of(p)
        self.copy = None  # of a weight on a GPU that is not contiguous, for the length of a call
        self.rows, self.columns = matrix_shape(p.shape)
        self.step = step  # 0-d float32 that the engine counts in
        self.blocks = []  # (master, exp_avg, exp_avg_sq) of selected columns, [rows, width] fp32: in use, lent for next
        self.address = self.version = self.strides = None

    def is_for(self, p):
        """Whether p is still what its state was made for."""
        return (
            p.shape == self.shape
            and p.dtype is self.dtype
            and (p.is_cpu or p.is_cuda)
            and devices.device_of(p) == self.device
        )

    def weight_row(self, p):
        """(index, address, strides, suspect): suspect if version or storage changed since remember()."""
        address, strides = address_of(p), strides_of(p)
        suspect = p._version != self.version or address != self.address or strides != self.strides
        self.copy = None
        if self.device is not None and strides is not None:
            self.copy = p.detach().contiguous()
            address, strides = address_of(self.copy), None
        return (self.index, address, strides, suspect)

    def gradient_of(self, gradient):
        """The gradient as the engine takes it: contiguous on a GPU, any strides on the CPU."""
        return gradient if self.device is None else gradient.contiguous()

    def copy_back(self, p):
        """Takes over what the engine wrote into the copy."""
        if self.copy is not None:
            p.copy_(self.copy)
            self.copy = None

    def forget(self):
        """Makes the next call look for edits."""
        self.version = None

    def remember(self, p):
        """Takes p's version and storage as of our own last write."""
        self.version, self.address, self.strides = p._version, p.data_ptr(), strides_of(p)


def mark_written(written, seen, records):
    """Bumps the versions of what the engine wrote, as in-place operations do, and remembers all that it has seen."""
    for p in written:
        records[p].copy_back(p)
    _increment_versions(written)
    for p in seen:
        records[p].copy = None
        records[p].remember(p)


@contextlib.contextmanager
def engine_call(parameters, records):
    """Around a call of the engine with rows of these weights, and what is done about it: the copies that it worked on
    go; if something is raised, they are copied back, since the engine may count on what it had written by then."""
    try:
        yield
        for p in parameters:
            records[p].copy = None
    except BaseException:
        with torch.no_grad():
            for p in parameters:
                records[p].copy_back(p)
        raise
