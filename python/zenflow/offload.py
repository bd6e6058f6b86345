# SPDX-License-Identifier: Apache-2.0
"""Gradients that leave during backward: what `offload_gradients=True` does between two steps.

A hook on each parameter that can be split hands its gradient to the engine and leaves an OffloadedGradient in p.grad:
whatever is in p.grad at step() counts, as with any torch optimizer, and nothing else does. What users see of it is in
docs/offload-gradients.md.
Not for: what a step does with a gradient (optimizer.py).
"""

import threading
import warnings
import weakref

import torch
from torch.nn.parameter import is_lazy

from zenflow import devices
from zenflow.micro_batches import MicroBatches
from zenflow.offloaded_gradient import OffloadedGradient, Staged
from zenflow.sizes import selected_count
from zenflow.store import splits
from zenflow.tensors import DTYPE_CODES, address_of, engine_call, is_plain, mark_written, strides_of


class GradientOffload:
    """The hooks of one optimizer, which it owns; they vanish with it.

    Args:
        optimizer: a ZenFlowOptimizer, whose settings and groups are read.
    """

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)
        settings = self._settings
        self._batches = MicroBatches(settings.gradient_accumulation_steps)
        self._measures = settings.max_grad_norm is not None or settings.skip_nonfinite or settings.automatic
        self._hooks = {}  # by parameter
        self._followed = None  # what they were made for
        self._staged = {}  # by parameter, weakly: what the engine holds since the last step
        self._groups = {}  # by parameter, as of this backward
        self._fired = set()  # parameters with a gradient since the last step
        self._observed = set()  # and in an earlier one
        self._in_parts = set()  # parameters whose gradient came more than once before a step
        self._owes_join = False  # weights are on their way, and nothing of the caller's waits for them
        self._warn = _Warning()
        self._lock = threading.RLock()  # a GPU's backward has a thread of its own
        weakref.finalize(self, _remove, self._hooks).atexit = False

    @property
    def _settings(self):
        return self._optimizer()._settings  # they change where a schedule is measured

    # What the optimizer calls

    def follow(self):
        """Has a hook on each parameter of the optimizer that can be split, and on no other."""
        parameters = [p for group in self._optimizer().param_groups for p in group["params"]]
        followed = [(id(p), p.requires_grad, type(p)) for p in parameters]
        if followed == self._followed:
            return
        self._followed = followed
        wanted = {
            p
            for p in parameters
            if p.requires_grad and p.is_leaf and not is_lazy(p) and splits(p, True, self._settings)
        }
        for p in wanted - self._hooks.keys():
            self._hooks[p] = p.register_post_accumulate_grad_hook(_hook_of(weakref.ref(self)))
        for p in self._hooks.keys() - wanted:
            self._hooks.pop(p).remove()
            for known in (self._fired, self._observed, self._in_parts):
                known.discard(p)

    def accumulating(self):
        """A context in which gradients stay in p.grad."""
        return self._batches.suspended()

    def restart(self):
        """The next backward is the first one of a step."""
        if self._owes_join:  # backward failed
            self._join_publications()
        self._batches.restart()
        self._observed |= self._fired
        self._fired.clear()

    def gradient_of(self, p):
        """What a step finds in p.grad: None, a real tensor, or an OffloadedGradient that is staged in p's own engine.

        Raises RuntimeError if the gradient was applied by an earlier step.
        """
        gradient = p.grad
        if type(gradient) is not OffloadedGradient:
            return gradient
        return gradient if self._holds(p, gradient) else gradient.bring_back()

    def all_finite(self, gradients, store):
        """Whether no gradient holds an Inf or NaN; squares that overflow in a column's norm are no proof of one."""
        if store is not None:
            store.use_current_streams()
        return all(
            (isinstance(g, OffloadedGradient) and g.is_staged() and g.staged.store.engine.staged_finite(g.staged.index))
            or bool(torch.isfinite(g.bring_back() if isinstance(g, OffloadedGradient) else g).all())
            for g in gradients
        )

    def bring_back(self, keep=lambda p, staged: False):
        """Brings back what is staged, but for what to `keep`: the engine's state is about to change under it."""
        for p, reference in list(self._staged.items()):
            gradient = reference()
            if gradient is not None and gradient.is_staged() and not keep(p, gradient.staged):
                gradient.bring_back()

    def follow_changes(self):
        """Brings back what was staged for parameters that are about to get another state."""
        self.bring_back(lambda p, staged: staged.store.record_of(p).is_for(p))

    def fit(self, parameters, plan, store):
        """(p, group index, gradient) triples of a step, with what was staged for another kind of step brought back."""
        groups = self._optimizer().param_groups

        def fits(p, group, staged):
            if (staged.plan.warm_up, staged.plan.selects) != (plan.warm_up, plan.selects):
                return False
            if plan.warm_up or not (plan.selects or not store.engine.has_selection(staged.index)):
                return True
            wanted = selected_count(groups[group]["topk_ratio"], store.records[p].columns)
            return store.engine.next_width(staged.index) == wanted

        kept, fitted = set(), []
        for p, group, gradient in parameters:
            if isinstance(gradient, OffloadedGradient):
                if gradient.held is None and fits(p, group, gradient.staged):
                    kept.add(p)
                else:
                    gradient = gradient.bring_back()
            fitted.append((p, group, gradient))
        self.bring_back(lambda p, staged: p in kept)  # what is no longer in p.grad, but in somebody's hands
        return fitted

    def taken(self):
        """A step is over, and what was staged is in its state."""
        for reference in self._staged.values():
            gradient = reference()
            if gradient is not None:
                gradient.staged.forget()
        self._staged.clear()
        self.restart()
        self.follow()

    # What happens in backward

    @torch.no_grad()
    def _receive(self, p):
        with self._lock:
            if self._batches.enter():
                self._begin(p)
            gradient = p.grad
            self._fired.add(p)
            if isinstance(gradient, OffloadedGradient):
                p.grad = gradient.bring_back()
                if gradient.staged.warn is not self._warn:
                    return  # another optimizer has p too: both find it in p.grad
                if not gradient.zeroed:
                    return self._receive_again(p, gradient.staged)
                gradient = p.grad
            if not self._batches.waits() and p not in self._in_parts and self._may_leave(p, gradient):
                self._stage(p, gradient)

    def _begin(self, p):
        """First gradient of a backward pass."""
        self._groups = {p: group for group in self._optimizer().param_groups for p in group["params"]}
        if _processes() > 1:
            raise RuntimeError(
                "offload_gradients=True does not work with several processes: gradients would leave before they are "
                "averaged. Use offload_gradients=False"
            )
        if devices.is_capturing():
            raise RuntimeError(
                "a backward in which gradients leave cannot be captured in a CUDA graph: part of that runs on the "
                "host. Use offload_gradients=False"
            )
        others = [q for q in self._hooks if q is not p]
        if others and all(q.grad is None for q in others):  # somebody threw away what came before
            self._batches.number = 1
        if self._batches.is_past_the_last():
            raise RuntimeError(
                f"backward number {self._batches.number} since the last step, but gradient_accumulation_steps="
                f"{self._batches.announced}: call step() before, or zero_grad() to start anew, or announce more"
            )

    def _receive_again(self, p, staged):
        """More was added to a gradient that had left: it stays in p.grad until step(), now and from now on."""
        self._in_parts.add(p)
        if staged.batch != self._batches.number:
            return self._warn()
        if staged.published:
            raise RuntimeError(
                f"{self._optimizer()._name(p)} got a second gradient in one backward, which it never had before, and "
                "its deferred weights were already published in between: call zero_grad() and repeat this step"
            )

    def _may_leave(self, p, gradient):
        """Whether nothing keeps the gradient here; what cannot be used at all is for step() to complain of."""
        return (
            p in self._groups
            and type(gradient) is torch.Tensor
            and not gradient.requires_grad
            and is_plain(p, gradient)
        )

    def _stage(self, p, gradient):
        store, group = self._optimizer()._store_in_backward(), self._groups[p]
        if store is None:
            return
        record = store.prepare(p, splits(p, group["split"], self._settings), group["topk_ratio"])
        if not record.split or not record.is_for(p):
            return
        engine, plan = store.engine, self._settings.plan(store.engine.clock)
        if not plan.warm_up and (plan.selects or not engine.has_selection(record.index)):
            store.lend_blocks([(p, group["topk_ratio"])])
        before = self._staged.get(p, lambda: None)()
        if before is not None:
            if before.is_staged():  # no longer in p.grad, but in somebody's hands
                before.bring_back()
            before.staged.forget()

        readable = record.gradient_of(gradient)
        row = (record.index, 0, None, False, address_of(readable), DTYPE_CODES[readable.dtype], strides_of(readable), 0)
        store.use_current_streams()
        engine.stage(row, plan.warm_up, plan.selects, self._measures)
        staged = Staged(store, record.index, plan, self._batches.number, self._warn)
        offloaded = OffloadedGradient(gradient, staged)
        self._staged[p] = weakref.ref(offloaded)  # before p.grad: an interrupt leaves nothing there that is not known
        p.grad = offloaded
        # Weights change only for parameters that are known to have one gradient per step: this was p's last use. Nor
        # where the coming step may be another optimizer's: one that took over our state, while somebody still has us.
        if engine.clock[3] == plan.step and not plan.selects and p in self._observed and not store.shares(p):
            row = (*record.weight_row(p), 0, 0, None, 0)
            with engine_call([p], {p: record}):
                staged.published = engine.publish_early(row)
                if staged.published:
                    mark_written([p], [p], {p: record})
            if staged.published and not self._owes_join:
                self._owes_join = True
                torch.autograd.Variable._execution_engine.queue_callback(self._join_publications)

    def _join_publications(self):
        """At the end of backward: what the caller does next comes after the weights that are on their way."""
        with self._lock:
            self._owes_join = False
            optimizer = self._optimizer()
            if optimizer is not None and optimizer._store is not None:
                optimizer._store.use_current_streams()
                optimizer._store.engine.join_publications()

    def _holds(self, p, gradient):
        mine = self._staged.get(p)
        return mine is not None and mine() is gradient and gradient.is_staged()


class _Warning:
    """Says once that a gradient came back, and what to do instead."""

    def __init__(self):
        self._given = False

    def __call__(self):
        if self._given:
            return
        self._given = True
        warnings.warn(
            "zenflow: a gradient that had left during backward (offload_gradients=True) was brought back, because it "
            "was used or added to before step(). Results are right, but that is slow and takes the memory that the "
            "mode saves. To clip, pass max_grad_norm= to the optimizer; to accumulate, gradient_accumulation_steps=, "
            "or run all backward passes but the last in `with optimizer.accumulate():`. "
            "docs/frameworks.md says what to set in Trainer, Accelerate and Lightning",
            stacklevel=2,
        )


def _processes():
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _hook_of(reference):
    def receive(p):
        offload = reference()
        if offload is not None:
            offload._receive(p)

    return receive


def _remove(hooks):
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
