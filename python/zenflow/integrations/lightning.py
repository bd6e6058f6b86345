# SPDX-License-Identifier: Apache-2.0
"""ZenFlowCallback for Lightning: evaluates settled masters, flushes at the end."""

import contextlib

from lightning.pytorch import Callback

from zenflow.integrations import unwrapped


class ZenFlowCallback(Callback):
    """For a `lightning.pytorch.Trainer` whose module has ZenFlowOptimizers, one or more, or others beside them.

        Trainer(callbacks=[ZenFlowCallback()])

    Validation, test and prediction see the settled masters; training goes on as if there had been no evaluation, also
    after one that failed. The last step of the schedule closes the open window, before its validation and its
    checkpoint; a training that ends earlier closes it at the end. Other checkpoints hold the training weights, from
    which training resumes with the same bits.

    Raises:
        TypeError: when training begins, if the module has no ZenFlowOptimizer.
    """

    def __init__(self):
        self._settled = contextlib.ExitStack()

    def on_train_start(self, trainer, pl_module):
        if not _optimizers(trainer):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise TypeError(
                f"ZenFlowCallback is for a module with a ZenFlowOptimizer, but configure_optimizers() gave {found}: "
                "return a ZenFlowOptimizer there, or leave the callback out"
            )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if _is_last_step(trainer):
            _flush(trainer)

    def on_train_end(self, trainer, pl_module):
        _flush(trainer)

    def on_validation_start(self, trainer, pl_module):
        self._show_settled(trainer)

    def on_validation_end(self, trainer, pl_module):
        self._settled.close()

    def on_test_start(self, trainer, pl_module):
        self._show_settled(trainer)

    def on_test_end(self, trainer, pl_module):
        self._settled.close()

    def on_predict_start(self, trainer, pl_module):
        self._show_settled(trainer)

    def on_predict_end(self, trainer, pl_module):
        self._settled.close()

    def on_exception(self, trainer, pl_module, exception):
        self._settled.close()

    def _show_settled(self, trainer):
        for optimizer in _optimizers(trainer):
            self._settled.enter_context(optimizer.settled())


def _optimizers(trainer):
    return [found for found in map(unwrapped, trainer.optimizers) if found is not None]


def _flush(trainer):
    for optimizer in _optimizers(trainer):
        optimizer.flush()


def _is_last_step(trainer):
    """As far as the schedule says; who stops earlier does so after this."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
