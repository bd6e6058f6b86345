# SPDX-License-Identifier: Apache-2.0
"""Measures what the host update takes, and chooses the schedule that hides it.

`update_interval="fit"` tries two intervals, between and beyond which the update's time is a straight line: a part for
each window and a part for each of its gradients. `update_delay="auto"` alone tries the interval that it was given.
Not for: changing the schedule, which the optimizer does between two windows.
"""

import statistics

TRIED_INTERVALS = (2, 6)
WINDOWS_BEFORE = 2  # an update is counted in the window after its own, and the first one touches new memory
WINDOWS_MEASURED = 3
HEADROOM = 0.9  # share of the steps' time that an update may take: the rest is for what was not measured


class ScheduleFit:
    """The measuring phase of one optimizer.

    Args:
        requested: its `Settings`, with `measured` true.

    Attributes:
        settings: to train with now.
        chosen: whether they are the choice, which no longer changes.
    """

    def __init__(self, requested):
        self.requested = requested
        fixed = requested.update_interval != "fit"
        most = requested.longest_interval
        intervals = (requested.update_interval,) if fixed else sorted({min(i, most) for i in TRIED_INTERVALS})
        self._waiting = list(intervals)
        self._step_seconds = []  # without stall
        self._host_seconds = {interval: [] for interval in intervals}  # of each window
        self._last = None  # when the last step began, and the stall in it
        self._stall = 0.0  # since start
        self.chosen = False
        self._begin_next()

    def keep(self, update_interval, update_delay):
        """Takes over a choice that was made before, in another run."""
        self.settings = self.requested.with_schedule(update_interval, update_delay)
        self.chosen = True

    def observe(self, began, report, closed_window, fits):
        """Counts one step; returns whether `settings` are new ones.

        Args:
            began: when the step began, in seconds of a steady clock.
            report: the engine's, after the step.
            closed_window: whether the step ended a window.
            fits: whether the host has the memory for given `Settings`.
        """
        if self._last is not None:
            last_began, last_stall = self._last
            self._step_seconds.append(began - last_began - last_stall)
        total = report["total"]["stall_seconds"]
        self._last = began, total - self._stall
        self._stall = total
        if not closed_window:
            return False
        self._windows += 1
        if self._windows > WINDOWS_BEFORE:
            seconds = self._host_seconds[self.settings.update_interval]
            seconds.append(report["last_window"]["host_update_seconds"])
            if len(seconds) == WINDOWS_MEASURED:
                self._finish_phase(fits)
                return True
        return False

    def _begin_next(self):
        interval = self._waiting.pop(0)
        self.settings = self.requested.with_schedule(interval, min(1, interval))
        self._windows = 0

    def _finish_phase(self, fits):
        if self._waiting:
            self._begin_next()
            return
        requested = self.requested
        fixed = requested.update_interval != "fit"
        intervals = [requested.update_interval] if fixed else range(1, requested.longest_interval + 1)
        pairs = [(i, d) for i in intervals for d in range(1, i + 1) if fits(requested.with_schedule(i, d))]
        hiding = smallest_hiding(pairs, self._host_seconds_of, HEADROOM * statistics.median(self._step_seconds))
        now = self.settings.update_interval, self.settings.update_delay
        self.keep(*(hiding or max(pairs, default=now)))

    def _host_seconds_of(self, interval):
        """What the host update of a window of `interval` steps takes."""
        medians = {i: statistics.median(seconds) for i, seconds in self._host_seconds.items()}
        (first, base), (last, end) = min(medians.items()), max(medians.items())
        slope = max(0.0, (end - base) / (last - first)) if last > first else 0.0
        return base + slope * (interval - first)


def smallest_hiding(pairs, host_seconds, step_seconds):
    """The first of the (update_interval, update_delay) pairs that hides the host update; None if none does.

    host_seconds: of the update of a window of so many steps; step_seconds: of one step of the device.
    """
    return next((pair for pair in pairs if host_seconds(pair[0]) <= pair[1] * step_seconds), None)
