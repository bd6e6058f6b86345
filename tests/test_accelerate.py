# SPDX-License-Identifier: Apache-2.0
"""Accelerate, as its users run it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="needs accelerate: pip install -r requirements-test.txt")
pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from compare import assert_same_training
from language_model import SETTINGS, examples, new_model
from zenflow import ZenFlowOptimizer

STEPS, ACCUMULATED, BATCH, CLIP = 11, 2, 2, 0.5
TRAIN = examples(STEPS * ACCUMULATED * BATCH)
HOOKS = {"offload_gradients": True, "gradient_accumulation_steps": ACCUMULATED}
MODES = pytest.mark.parametrize("hooks", [{}, HOOKS], ids=["default", "offload_gradients"])
pytestmark = pytest.mark.filterwarnings("error:zenflow")


@pytest.fixture(autouse=True)
def new_accelerators():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def things(**settings):
    model = new_model().train()
    optimizer = ZenFlowOptimizer(model.parameters(), **{**SETTINGS, **settings})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler


class Run:
    """An accelerated training; the optimizer clips if its settings say so, else Accelerate does."""

    def __init__(self, mixed_precision="no", **settings):
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision=mixed_precision
        )
        self.plain_optimizer, self.clips = None, "max_grad_norm" not in settings
        model, self.plain_optimizer, scheduler = things(**settings)
        loader = DataLoader(TRAIN, batch_size=BATCH)
        prepared = self.accelerator.prepare(model, self.plain_optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, first=0, last=STEPS):
        batches = list(self.loader)[first * ACCUMULATED : last * ACCUMULATED]
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.accelerator.sync_gradients and self.clips:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self


def train_plainly(autocast=None, **settings):
    """(model, optimizer) of the same training without Accelerate."""
    model, optimizer, scheduler = things(**settings)
    for i, batch in enumerate(DataLoader(TRAIN, batch_size=BATCH)):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(**batch).loss
        (loss / ACCUMULATED).backward()
        if (i + 1) % ACCUMULATED == 0:
            if "max_grad_norm" not in settings:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model, optimizer


@pytest.mark.parametrize(("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16)])
def test_it_accumulates_clips_and_schedules_as_a_plain_loop_does(precision, dtype):
    run = Run(precision).train()
    assert run.plain_optimizer.stats().total.steps == STEPS, "no step while gradients are accumulated"
    assert run.plain_optimizer.stats().split_parameters > 10
    assert_same_training(run.model, run.plain_optimizer, *train_plainly(dtype))


def test_its_clipping_takes_effect_on_gradients_that_left_in_backward():
    run = Run(**HOOKS)
    with pytest.warns(UserWarning, match="was brought back"):
        run.train()
    assert_same_training(run.model, run.plain_optimizer, *train_plainly())


def test_gradients_that_left_stay_away_where_the_optimizer_clips():
    run = Run(max_grad_norm=CLIP, **HOOKS).train()
    assert_same_training(run.model, run.plain_optimizer, *train_plainly(max_grad_norm=CLIP))


@MODES
@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_a_training_that_was_saved_and_loaded_has_the_bits_of_an_uninterrupted_one(step, hooks, tmp_path):
    """At every offset of a window; at step 4 an update is in flight."""
    settings = {"max_grad_norm": CLIP, **hooks}
    Run(**settings).train(last=step).accelerator.save_state(tmp_path)
    resumed = Run(**settings)
    resumed.accelerator.load_state(tmp_path)
    resumed.train(first=step)
    assert_same_training(resumed.model, resumed.plain_optimizer, *train_plainly(**settings))


def test_preparing_in_mid_training_changes_nothing():
    """prepare() saves and loads the optimizer's state."""
    model, optimizer, _ = things()
    straight = copy.deepcopy(model)
    other = ZenFlowOptimizer(straight.parameters(), **SETTINGS)
    batches = list(DataLoader(TRAIN, batch_size=BATCH))
    for i, batch in enumerate(batches):
        if i == 6:
            accelerated = Accelerator(cpu=True).prepare(optimizer)
        for network, player in ((model, accelerated if i >= 6 else optimizer), (straight, other)):
            network(**batch).loss.backward()
            player.step()
            player.zero_grad()
    assert_same_training(model, optimizer, straight, other)
