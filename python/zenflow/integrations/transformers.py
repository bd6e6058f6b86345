# SPDX-License-Identifier: Apache-2.0
"""ZenFlowCallback for Hugging Face's Trainer: evaluates settled masters, flushes at the end.

Trainer has no event before an evaluation, nor one when an evaluation fails, so the callback is given the trainer and
goes around its `evaluation_loop`.
"""

import contextlib
import functools
import math
import weakref
from pathlib import Path

import torch
from transformers import TrainerCallback

from zenflow.integrations import unwrapped


class ZenFlowCallback(TrainerCallback):
    """For a Trainer, or any class derived from it, whose optimizer is a ZenFlowOptimizer.

        trainer.add_callback(ZenFlowCallback(trainer))

    `evaluate()` and `predict()` see the settled masters; training goes on as if there had been no evaluation, also
    after one that failed. The last step of the schedule closes the open window, before its evaluation and its
    checkpoint; a training that ends earlier closes it at the end. Other checkpoints hold the training weights, from
    which training resumes with the same bits. With `load_best_model_at_end` the model ends with the weights that were
    evaluated, if the checkpoint has the optimizer's state, and the optimizer with the state that belongs to them.

    With `offload_gradients=True`, Trainer's look at the norm of all gradients, for its log, would bring them all back:
    it logs the optimizer's norm of the step before instead, or none where the optimizer has no `max_grad_norm`.

    Args:
        trainer: the Trainer to add it to.

    Raises:
        TypeError: `trainer` is no Trainer; when training begins, the trainer's optimizer is another one.
    """

    def __init__(self, trainer):
        if not hasattr(trainer, "evaluation_loop"):
            raise TypeError(
                f"ZenFlowCallback takes the Trainer that it is added to, got {type(trainer).__name__}: make "
                "the Trainer, then trainer.add_callback(ZenFlowCallback(trainer))"
            )
        self._trainer = weakref.ref(trainer)
        trainer.evaluation_loop = _settled_loop(trainer)

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        zenflow_optimizer = _checked(optimizer)
        if zenflow_optimizer._settings.offload_gradients:
            self._keep_gradients_away(zenflow_optimizer)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step >= state.max_steps:
            _checked(optimizer).flush()

    def on_train_end(self, args, state, control, optimizer=None, **kwargs):
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _load_best(_checked(optimizer), Path(state.best_model_checkpoint) / "optimizer.pt")
        else:
            _checked(optimizer).flush()

    def _keep_gradients_away(self, optimizer):
        accelerator = self._trainer().accelerator
        clip = type(accelerator).clip_grad_norm_

        @functools.wraps(clip)
        def clip_grad_norm_(parameters, max_norm, norm_type=2):
            if max_norm == math.inf:
                return optimizer.stats().global_grad_norm
            return clip(accelerator, parameters, max_norm, norm_type)

        accelerator.clip_grad_norm_ = clip_grad_norm_


def _settled_loop(trainer):
    loop, reference = type(trainer).evaluation_loop, weakref.ref(trainer)

    @functools.wraps(loop)
    def evaluation_loop(*args, **kwargs):
        trainer = reference()
        optimizer = unwrapped(trainer.optimizer)
        with contextlib.nullcontext() if optimizer is None else optimizer.settled():
            return loop(trainer, *args, **kwargs)

    return evaluation_loop


def _checked(optimizer):
    found = unwrapped(optimizer)
    if found is None:
        inner = getattr(optimizer, "optimizer", optimizer)
        raise TypeError(
            f"ZenFlowCallback is for a Trainer with a ZenFlowOptimizer, but this one has {type(inner).__name__}: "
            "pass optimizers=(ZenFlowOptimizer(...), scheduler) to the Trainer, or leave the callback out"
        )
    return found


def _load_best(optimizer, path):
    """Its model was loaded as a checkpoint has it: the training weights. No gradient since then counts."""
    if path.is_file():
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        optimizer.synchronize()
