# SPDX-License-Identifier: Apache-2.0
"""Which of a step's backward passes a gradient comes from.

A hook cannot ask for that: each pass has a number of its own, but so has every pass within it (reentrant checkpointing
runs one for each segment). Those are told apart by the Python frames around them.
"""

import contextlib
import sys

import torch

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


class MicroBatches:
    """Counts the backward passes since the last step.

    If a pass is seen only from within passes that are nested in it, the next one may be taken for the same: then the
    count is too low, never too high. On a GPU the frames around a nested pass are missing where it continues on another
    GPU's thread; then the count may be too high.

    Args:
        announced: how many passes make up a step; None: one, and further ones add to it.
    """

    def __init__(self, announced):
        self.announced = announced
        self._suspended = 0
        self.restart()

    def restart(self):
        """The next pass is the first one of a step."""
        self.number = 0
        self._task = self._nested = None
        self._open = False  # whether a pass is known to run

    def enter(self):
        """To be called in a hook. Whether it is the first one of a pass."""
        task = torch._C._current_graph_task_id()
        if task in (self._task, self._nested):
            return False
        nested = _is_nested()
        begins = not self._open or not (nested or self._task is None)
        if nested:
            self._nested = task
        else:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._leave(task))
        if begins:
            self._open = True
            self._task = None if nested else task
            self.number += 1
        return begins

    def _leave(self, task):
        if self._task == task:
            self._open = False

    def is_past_the_last(self):
        return self.announced is not None and self.number > self.announced

    def waits(self):
        """Whether more gradients are to be added before the step."""
        return self._suspended > 0 or (self.announced is not None and self.number < self.announced)

    @contextlib.contextmanager
    def suspended(self):
        """Passes within are not a step's last."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1


def _is_nested():
    """Whether the running pass was started in another one's backward function."""
    frame, within = sys._getframe(1), False
    while frame is not None:
        if within and frame.f_code in (_ENGINE, _FUNCTION):
            return True
        within = within or frame.f_code is _ENGINE
        frame = frame.f_back
    return False
