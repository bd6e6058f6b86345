# SPDX-License-Identifier: Apache-2.0
"""Schedules that decide for the user: update_interval="auto" and "fit", update_delay="auto", select_interval="epoch".

That "auto" is the reference's, bit for bit, is in test_equalities.py.
"""

import contextlib
import copy
import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compare import assert_same
from fault_programs.interrupts import InterruptAt
from small_model import LENGTH, WORDS, small_model
from zenflow import ZenFlowOptimizer
from zenflow.fit import HEADROOM, TRIED_INTERVALS, WINDOWS_BEFORE, WINDOWS_MEASURED, ScheduleFit
from zenflow.settings import Settings

ROWS, COLUMNS = 8, 20
FIT_STEPS = (WINDOWS_BEFORE + WINDOWS_MEASURED) * sum(TRIED_INTERVALS)


def one_parameter(shape=(ROWS, COLUMNS), **settings):
    p = torch.nn.Parameter(torch.ones(shape))
    return p, ZenFlowOptimizer([p], lr=1e-3, min_offload_numel=0, **settings)


def windows(optimizer, p, gradients):
    """Lengths of the windows that these gradients make."""
    lengths, since = [], 0
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()
        since += 1
        if optimizer.state_dict()["param_groups"][0]["zenflow_window_step"] == 0:
            lengths.append(since)
            since = 0
    return lengths


def with_deferred(share, ratio):
    """A gradient whose selected columns are 1 and whose deferred ones are `share`."""
    gradient = torch.full((ROWS, COLUMNS), share)
    gradient[:, : round(ratio * COLUMNS)] = 1.0
    return gradient


# The automatic interval


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(("share", "length"), [(1.0, 2), (0.5, 3), (0.25, 5), (0.125, 9), (0.01, 16)])
def test_a_window_ends_when_deferred_gradients_add_up_to_a_selected_columns(ratio, share, length):
    p, optimizer = one_parameter(topk_ratio=ratio, update_interval="auto")
    assert windows(optimizer, p, [with_deferred(share, ratio)] * 2 * length) == [length, length]
    assert optimizer.stats().update_interval == length


def test_the_longest_window_is_a_setting():
    p, optimizer = one_parameter(update_interval="auto", max_update_interval=6)
    assert windows(optimizer, p, [with_deferred(0.01, 0.1)] * 12) == [6, 6]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_where_nobody_can_vote_windows_have_their_full_length(ratio):
    p, optimizer = one_parameter(topk_ratio=ratio, update_interval="auto", max_update_interval=5)
    assert windows(optimizer, p, [torch.ones(ROWS, COLUMNS)] * 10) == [5, 5]


def test_windows_of_zeros_or_nans_end_too():
    p, optimizer = one_parameter(update_interval="auto", max_update_interval=5)
    assert windows(optimizer, p, [torch.zeros(ROWS, COLUMNS)] * 4) == [2, 2]
    assert windows(optimizer, p, [torch.full((ROWS, COLUMNS), torch.nan)] * 5) == [5]


@pytest.mark.parametrize(("share", "length"), [(0.5, 3), (0.6, 9)])
def test_a_window_ends_with_the_votes_of_so_many_parameters(share, length):
    quick, slow = (torch.nn.Parameter(torch.ones(ROWS, COLUMNS)) for _ in range(2))
    optimizer = ZenFlowOptimizer([quick, slow], min_offload_numel=0, update_interval="auto", auto_ratio=share)
    for step in range(1, length + 1):
        quick.grad, slow.grad = with_deferred(0.5, 0.1), with_deferred(0.125, 0.1)
        optimizer.step()
        ended = optimizer.state_dict()["param_groups"][0]["zenflow_window_step"] == 0
        assert ended == (step == length)


@pytest.mark.parametrize("steps", range(1, 12))
def test_an_automatic_run_resumes_at_any_step_with_the_bits_of_never_having_stopped(steps):
    settings = {"update_interval": "auto", "max_update_interval": 5, "topk_ratio": 0.2}
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(ROWS, COLUMNS, generator=generator) * 0.7**i for i in range(24)]
    p, optimizer = one_parameter(**settings)
    windows(optimizer, p, gradients[:steps])
    q, resumed = one_parameter(**settings)
    with torch.no_grad():
        q.copy_(p)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for gradient in gradients[steps:]:
        p.grad, q.grad = gradient, gradient.clone()
        optimizer.step()
        resumed.step()
        assert_same(q, p, "resumed")


def test_from_a_fixed_to_an_automatic_interval_no_gradient_is_lost():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(14)]
    p, every_step = one_parameter(update_interval=1, update_delay=0)
    windows(every_step, p, gradients)
    q, first = one_parameter(update_interval=4)
    windows(first, q, gradients[:6])
    for settings in ({"update_interval": "auto"}, {"update_interval": "auto", "max_update_interval": 3}):
        second = ZenFlowOptimizer([q], lr=1e-3, min_offload_numel=0, **settings)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        windows(second, q, gradients[6:])
        ours, theirs = second.state_dict()["state"][0], every_step.state_dict()["state"][0]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_same(ours[key], theirs[key], key)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_interval": "often"}, "update_interval must be one of an integer >= 1, 'auto', 'fit', got 'often'"),
        ({"update_delay": "fit"}, "update_delay must be one of an integer >= 0, 'auto', got 'fit'"),
        ({"update_interval": "auto", "update_delay": 2}, 'must be 0 or 1 with update_interval="auto", got 2'),
        ({"update_interval": "auto", "update_delay": "auto"}, "must be 0 or 1"),
        ({"update_interval": "fit", "update_delay": 1}, "leave it out"),
        ({"update_interval": "auto", "auto_ratio": 0}, r"auto_ratio must be in \(0, 1\], got 0"),
        ({"max_update_interval": 0}, "max_update_interval must be an integer >= 1, got 0"),
        ({"select_interval": "epoch"}, "needs steps_per_epoch"),
        ({"select_interval": "epoch", "steps_per_epoch": 0}, "steps_per_epoch must be an integer >= 1, got 0"),
        ({"steps_per_epoch": 5}, 'steps_per_epoch is for select_interval="epoch"'),
        ({"select_interval": "auto"}, "select_interval must be one of an integer >= 1, 'epoch', got 'auto'"),
    ],
)
def test_schedules_that_do_not_fit_together_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        one_parameter(**settings)


# Selection by epochs


def selection_steps(optimizer, p, steps):
    """The steps after which the selection was another; gradients prefer another column at each step."""
    selecting, before = [], None
    for step in range(1, steps + 1):
        p.grad = torch.zeros(ROWS, COLUMNS)
        p.grad[:, step % COLUMNS] = 1.0
        optimizer.step()
        selected = optimizer.state_dict()["state"][0]["selected"]
        if before is None or not torch.equal(selected, before):
            selecting.append(step)
        before = selected
    return selecting


def test_columns_are_selected_once_an_epoch_at_its_first_window():
    p, optimizer = one_parameter(update_interval=4, select_interval="epoch", steps_per_epoch=10, topk_ratio=1 / COLUMNS)
    # Epochs begin at 1, 11, 21, 31, 41; windows at 1, 5, 9, 13, ...
    assert selection_steps(optimizer, p, 45) == [1, 13, 21, 33, 41]


def test_epochs_shorter_than_a_window_select_at_each_window():
    p, optimizer = one_parameter(update_interval=4, select_interval="epoch", steps_per_epoch=3, topk_ratio=1 / COLUMNS)
    assert selection_steps(optimizer, p, 13) == [1, 5, 9, 13]


# The schedule that is measured


def fitted(settings, host_seconds, step_seconds, fits=lambda settings: True, around=contextlib.nullcontext):
    """The choice for a host and a device that take so long. A window's last gradients come `interval` steps after those
    of the one before, or later by what the device, a step later, waited for that one's update. Each window is observed
    in a context that `around` makes."""
    fit, steps, arrived, spans = ScheduleFit(settings), 0, 100.0, [(0.0, 0.0)]
    while steps < 1000:
        interval = fit.settings.update_interval
        steps += interval
        seconds = host_seconds(interval)
        report = {"host_update_span": spans[-1], "last_window": {"host_update_seconds": seconds}}
        spans.append((arrived, arrived + seconds))
        arrived += interval * step_seconds + max(0.0, seconds - step_seconds)
        with around():
            fit.observe(report, fits)
        if fit.chosen:
            assert steps <= FIT_STEPS or settings.update_interval != "fit" or around is not contextlib.nullcontext
            return fit.settings.update_interval, fit.settings.update_delay
    raise AssertionError("never chosen")


@given(st.floats(0.001, 20), st.floats(0, 2))
def test_the_choice_is_the_smallest_pair_that_hides_the_host(base, slope):
    def host_seconds(interval):
        return base + slope * interval

    def hides(interval, delay):
        return host_seconds(interval) <= HEADROOM * delay * (1 + 1e-9)

    interval, delay = fitted(Settings(update_interval="fit"), host_seconds, 1.0)
    pairs = [(i, d) for i in range(1, 17) for d in range(1, i + 1)]
    assert (interval, delay) == next((pair for pair in pairs if hides(*pair)), (16, 16))


@pytest.mark.parametrize(("seconds", "delay"), [(0.1, 1), (0.89, 1), (1.1, 2), (2.6, 3), (9.0, 4)])
def test_a_given_interval_keeps_and_only_the_delay_is_chosen(seconds, delay):
    assert fitted(Settings(update_interval=4, update_delay="auto"), lambda interval: seconds, 1.0) == (4, delay)


def test_a_schedule_that_does_not_fit_in_memory_is_not_chosen():
    assert fitted(Settings(update_interval="fit"), lambda i: 5.0, 1.0) == (6, 6)
    assert fitted(Settings(update_interval="fit"), lambda i: 5.0, 1.0, lambda s: s.update_interval <= 4) == (4, 4)
    assert fitted(Settings(update_interval="fit"), lambda i: 5.0, 1.0, lambda s: False) == (6, 1)


def test_only_schedules_up_to_the_choice_are_looked_at():
    settings, asked = Settings(update_interval="fit", max_update_interval=200), []
    assert fitted(settings, lambda i: 2.5, 1.0, lambda settings: not asked.append(settings)) == (3, 3)
    assert len(asked) == 1


@pytest.mark.parametrize("window", [1, WINDOWS_BEFORE + WINDOWS_MEASURED, 2 * (WINDOWS_BEFORE + WINDOWS_MEASURED)])
def test_an_interrupt_while_a_window_is_measured_changes_no_choice(window):
    settings = Settings(update_interval="fit", max_update_interval=6)

    def is_reached(moment):
        interrupt = InterruptAt(moment)
        contexts = (interrupt if number == window else contextlib.nullcontext() for number in itertools.count(1))
        assert fitted(settings, lambda i: 2.5, 1.0, around=lambda: next(contexts)) == (3, 3)
        return interrupt.reached

    assert next(moment for moment in itertools.count() if not is_reached(moment)) > 0


def test_what_depends_on_the_schedule_follows_it():
    settings = Settings(update_interval="fit", select_interval=30).with_schedule(8, 3)
    assert (settings.select_interval, settings.lookahead) == (32, 3.0)
    assert Settings(update_interval="fit", lookahead=0).with_schedule(8, 3).lookahead == 0
    assert Settings(update_interval="fit").with_schedule(5, 2).select_interval == 80


def train(model, optimizer, steps, seed=0):
    text = torch.randint(WORDS, (steps, 2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    for batch in text:
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("hooks", [False, True])
def test_a_real_run_is_measured_then_keeps_its_schedule_and_saves_it(hooks):
    def new(model):
        return ZenFlowOptimizer(
            model.parameters(), min_offload_numel=1000, update_interval="fit", offload_gradients=hooks
        )

    model = small_model()
    optimizer = new(model)
    assert optimizer.stats().fitted is False
    train(model, optimizer, FIT_STEPS)
    stats = optimizer.stats()
    assert stats.fitted
    train(model, optimizer, 2 * stats.update_interval + 1)
    assert (optimizer.stats().update_interval, optimizer.stats().update_delay) == (
        stats.update_interval,
        stats.update_delay,
    )
    assert "visible" in str(stats)

    other = small_model()
    other.load_state_dict(model.state_dict())
    resumed = new(other)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.stats().fitted
    train(model, optimizer, 10, seed=1)
    train(other, resumed, 10, seed=1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(q, p, "resumed")
    assert copy.deepcopy(optimizer).stats().fitted


@pytest.mark.parametrize(("settings", "interval"), [({"update_interval": "fit"}, 1), ({"update_delay": "auto"}, 4)])
def test_where_nothing_is_deferred_the_smallest_schedule_is_chosen(settings, interval):
    p, optimizer = one_parameter(topk_ratio=1.0, **settings)
    windows(optimizer, p, [torch.ones(ROWS, COLUMNS)] * FIT_STEPS)
    stats = optimizer.stats()
    assert (stats.fitted, stats.update_interval, stats.update_delay) == (True, interval, 1)


def test_a_run_that_was_saved_before_the_choice_is_measured_anew():
    model = small_model()
    optimizer = ZenFlowOptimizer(model.parameters(), min_offload_numel=1000, update_interval="fit")
    train(model, optimizer, FIT_STEPS - 5)
    resumed = ZenFlowOptimizer(model.parameters(), min_offload_numel=1000, update_interval="fit")
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.stats().fitted is False
    train(model, resumed, FIT_STEPS)
    assert resumed.stats().fitted


@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("settings", [{"update_interval": "fit"}, {"update_interval": 3, "update_delay": "auto"}])
def test_measuring_loses_no_gradient(settings, buffer):
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(FIT_STEPS + 20)]
    p, every_step = one_parameter(update_interval=1, update_delay=0)
    q, measured = one_parameter(host_buffer=buffer, **settings)
    windows(every_step, p, gradients)
    windows(measured, q, gradients)
    assert measured.stats().fitted
    ours, theirs = measured.state_dict()["state"][0], every_step.state_dict()["state"][0]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert_same(ours[key], theirs[key], key)


def test_a_fixed_schedule_wins_over_a_saved_choice():
    p, measured = one_parameter(update_interval="fit")
    windows(measured, p, [torch.ones(ROWS, COLUMNS)] * FIT_STEPS)
    q, fixed = one_parameter(update_interval=5, update_delay=2)
    fixed.load_state_dict(measured.state_dict())
    windows(fixed, q, [torch.ones(ROWS, COLUMNS)] * 5)
    assert (fixed.stats().update_interval, fixed.stats().update_delay, fixed.stats().fitted) == (5, 2, None)


@pytest.mark.parametrize(
    "settings",
    [{"update_interval": 3, "update_delay": "auto"}, {"update_interval": "fit", "max_update_interval": 1}],
)
def test_a_saved_choice_that_the_settings_rule_out_is_measured_anew(settings):
    p, measured = one_parameter(update_interval=2, update_delay="auto")
    windows(measured, p, [torch.ones(ROWS, COLUMNS)] * 20)
    assert measured.stats().fitted
    q, resumed = one_parameter(**settings)
    resumed.load_state_dict(measured.state_dict())
    assert resumed.stats().fitted is False
    windows(resumed, q, [torch.ones(ROWS, COLUMNS)] * 30)
    interval = settings["update_interval"] if settings["update_interval"] != "fit" else 1
    assert (resumed.stats().fitted, resumed.stats().update_interval) == (True, interval)
