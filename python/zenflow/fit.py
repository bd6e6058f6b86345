# SPDX-License-Identifier: Apache-2.0
"""Measures what the host update takes, and chooses the schedule that hides it.

`update_interval="fit"` tries two intervals, between and beyond which the update's time is a straight line: a part for
each window and a part for each of its gradients. `update_delay="auto"` alone tries the interval that it was given.
What a step takes is seen from the host threads: from one update's beginning, when its last gradients are there, to the
next one's. The caller's clock would not do, since a GPU's caller is ahead of it by an unknown number of steps.
Not for: changing the schedule, which the optimizer does between two windows.
"""

import itertools
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
        self._step_seconds = []  # without stall, of each window
        self._host_seconds = {interval: [] for interval in intervals}  # of each window
        self.chosen = False
        self._begin_next()

    def may_choose(self, update_interval):
        """Whether the user's settings leave room for this interval."""
        requested = self.requested
        if requested.update_interval == "fit":
            return update_interval <= requested.longest_interval
        return update_interval == requested.update_interval

    def keep(self, update_interval, update_delay):
        """Takes over a choice that was made before, in another run."""
        settings = self.requested.with_schedule(update_interval, update_delay)
        # No call between these: an interrupt falls before both of them or after.
        self.settings, self.chosen = settings, True

    def observe(self, report, fits):
        """Counts a window that was closed; returns whether `settings` are new ones.

        Args:
            report: the engine's, after the step that closed it.
            fits: whether the host has the memory for given `Settings`.
        """
        self._windows += 1
        self._time_steps(report["host_update_span"])
        if self._windows > WINDOWS_BEFORE:
            seconds = self._host_seconds[self.settings.update_interval]
            seconds.append(report["last_window"]["host_update_seconds"])
            if len(seconds) >= WINDOWS_MEASURED and not any(seconds):  # nothing is deferred
                self.keep(1 if self.requested.update_interval == "fit" else self.requested.update_interval, 1)
                return True
            if len(seconds) >= WINDOWS_MEASURED and self._step_seconds:
                self._finish_phase(fits)
                return True
        return False

    def _time_steps(self, span):
        """Takes the (begin, end) of the host update of the window before."""
        if self._last_span is None or span == self._last_span:
            self._last_span = span  # of another interval
            return
        if self._windows > 2:
            begin, end = self._last_span
            interval, between = self.settings.update_interval, span[0] - begin
            # With a delay of 1, an update that takes longer than a step makes one step of its window as long as itself.
            steps = [between / interval]
            if interval > 1:
                steps.append((between - (end - begin)) / (interval - 1))
            self._step_seconds.append(min(steps))
        self._last_span = span

    def _begin_next(self):
        interval, *waiting = self._waiting
        settings = self.requested.with_schedule(interval, min(1, interval))
        # As in keep().
        self.settings, self._waiting, self._windows, self._last_span = settings, waiting, 0, None

    def _finish_phase(self, fits):
        if self._waiting:
            self._begin_next()
            return
        requested = self.requested
        fixed = requested.update_interval != "fit"
        intervals = [requested.update_interval] if fixed else range(1, requested.longest_interval + 1)

        def fit_in_memory(pairs):
            return (pair for pair in pairs if fits(requested.with_schedule(*pair)))

        hiding = hiding_pairs(intervals, self._host_seconds_of, HEADROOM * statistics.median(self._step_seconds))
        largest = ((i, d) for i in reversed(intervals) for d in range(i, 0, -1))
        now = self.settings.update_interval, self.settings.update_delay
        self.keep(*next(fit_in_memory(itertools.chain(hiding, largest)), now))

    def _host_seconds_of(self, interval):
        """What the host update of a window of `interval` steps takes."""
        medians = {i: statistics.median(seconds) for i, seconds in self._host_seconds.items()}
        (first, base), (last, end) = min(medians.items()), max(medians.items())
        slope = max(0.0, (end - base) / (last - first)) if last > first else 0.0
        return base + slope * (interval - first)


def hiding_pairs(intervals, host_seconds, step_seconds):
    """The (update_interval, update_delay) pairs that hide the host update, smallest first; one at a time, since there
    may be very many.

    host_seconds: of the update of a window of so many steps; step_seconds: of one step of the device.
    """
    for interval in intervals:
        seconds = host_seconds(interval)
        if seconds <= interval * step_seconds:
            yield from ((interval, d) for d in range(1, interval + 1) if seconds <= d * step_seconds)
