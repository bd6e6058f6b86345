# SPDX-License-Identifier: Apache-2.0
"""OffloadedGradient: what stands in p.grad for a gradient that left during backward (offload.py).

A tensor without storage. As long as it is in p.grad, the gradient counts. Whatever torch, or anybody else, does with it
brings the gradient back first, bit for bit, into a real tensor that it holds from then on.
"""

import torch
from torch.utils._pytree import tree_map

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_MOVE = torch.ops.aten._to_copy.default


class Staged:
    """One gradient in the engine: there until a step takes it or another one takes its place.

    Attributes:
        batch: the micro-batch that brought it. plan: of the step that it was staged for.
        published: whether its parameter's deferred columns were published in the same backward.
    """

    __slots__ = ("batch", "index", "plan", "published", "store", "warn")

    def __init__(self, store, index, plan, batch, warn):
        self.store, self.index, self.plan, self.batch, self.warn = store, index, plan, batch, warn
        self.published = False

    def is_there(self):
        return self.store is not None and self.store.engine.staged(self.index)

    def forget(self):
        """It is no longer there, and keeps nobody's memory."""
        self.store = None


class OffloadedGradient(torch.Tensor):
    """Stands for `gradient`, which the engine has; see the module."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, gradient, staged):
        like = gradient if gradient.is_contiguous() else torch.empty_like(gradient, device="meta")  # expanded: dense
        return torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, strides=like.stride(), dtype=gradient.dtype, device=gradient.device
        )

    def __init__(self, gradient, staged):
        self.staged = staged
        self.held = None  # the gradient, once it is back
        self.zeroed = False  # by zero_grad(set_to_none=False): nothing is held that somebody had

    def is_staged(self):
        return self.held is None and self.staged.is_there()

    def is_applied(self):
        return self.held is None and not self.staged.is_there()

    def bring_back(self):
        """The gradient as a real tensor, whose changes count.

        Raises:
            RuntimeError: a step has applied it, and its memory is in use again.
        """
        if self.held is None:
            if self.is_applied():
                raise RuntimeError(
                    "this gradient left during backward (offload_gradients=True) and step() has applied it: look at it "
                    "before step(), and call zero_grad() before the next backward"
                )
            with torch.inference_mode(False):
                packed = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                self.staged.store.use_current_streams()
                self.staged.store.engine.unstage(self.staged.index, packed.data_ptr())
                held = packed
                if self.stride() != packed.stride():
                    held = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
                    held.copy_(packed)
            self.held = held
            self.staged.forget()
        return self.held

    def _used(self):
        """bring_back() for somebody outside: says once what it costs. Within backward offload.py knows better."""
        if self.is_staged() and torch._C._current_graph_task_id() < 0:
            self.staged.warn()
        return self.bring_back()

    def _zero(self):
        self._discard()
        if self.held is None:
            with torch.inference_mode(False):
                self.held = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        self.held.zero_()
        self.zeroed = True
        return self

    def _discard(self):
        if self.is_staged():
            self.staged.store.use_current_streams()
            self.staged.store.engine.discard_staged(self.staged.index)
        self.staged.forget()

    def _moved(self, dtype=None, device=None, **_):
        like = torch.empty((), dtype=dtype or self.dtype, device=device or self.device)
        return OffloadedGradient(like.expand(self.shape), self.staged)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _UNSCALE:
            raise RuntimeError(
                "torch.amp.GradScaler cannot unscale gradients that have left during backward: train in bfloat16, "
                "which needs no scaler, or use offload_gradients=False"
            )
        if func is torch.ops.aten.zero_.default:
            return args[0]._zero()
        if func is _MOVE and args[0].is_applied():  # with its model, which is free to move; still nothing to see
            return args[0]._moved(**kwargs)
        standing = {}

        def real(value):
            if not isinstance(value, OffloadedGradient):
                return value
            held = value._used()
            standing[id(held)] = value
            return held

        args, kwargs = tree_map(real, (args, kwargs or {}))
        # In-place operations return the tensor that they were called on.
        return tree_map(lambda value: standing.get(id(value), value), func(*args, **kwargs))

    @property
    def data(self):
        return self._used().detach()

    @data.setter
    def data(self, value):  # as model.to(dtype) does
        if value is self:
            return
        held = value
        if isinstance(value, OffloadedGradient):
            held = None if value.is_applied() else value.bring_back()
        self._discard()
        self.held = held
        torch.Tensor.data.__set__(self, value if held is None else held)


def in_memory(gradient):
    """What p.grad holds, for an optimizer whose own hooks take none: one that another's took comes back."""
    return gradient.bring_back() if type(gradient) is OffloadedGradient else gradient


def _delegate(name):
    def method(self, *args, **kwargs):
        return getattr(self._used(), name)(*args, **kwargs)

    setattr(OffloadedGradient, name, method)


# What asks for memory without an operation of torch.
for _name in (
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "__repr__",
    "data_ptr",
    "numpy",
    "storage",
    "tolist",
    "untyped_storage",
):
    _delegate(_name)
