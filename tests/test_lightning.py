# SPDX-License-Identifier: Apache-2.0
"""Lightning, as its users run it, with and without ZenFlowCallback."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="needs lightning: pip install -r requirements-test.txt")
pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.core.optimizer import LightningOptimizer

from compare import assert_all_same, assert_same_training
from language_model import SETTINGS, batch_of, examples, loss_on, new_model, weights_of
from zenflow import ZenFlowOptimizer
from zenflow.integrations.lightning import ZenFlowCallback

STEPS, ACCUMULATED, BATCH = 11, 2, 2
TRAIN, EVAL = examples(STEPS * ACCUMULATED * BATCH), examples(4, start=100_000)
HOOKS = {"offload_gradients": True, "gradient_accumulation_steps": ACCUMULATED}
pytestmark = pytest.mark.filterwarnings("ignore", "error:zenflow")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """`settings`: changed ones of the optimizer."""

    def __init__(self, **settings):
        super().__init__()
        self.model, self.settings = new_model(), settings

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.log("loss", self.model(**batch).loss)

    def test_step(self, batch, index):
        self.validation_step(batch, index)

    def predict_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        optimizer = ZenFlowOptimizer(self.model.parameters(), **{**SETTINGS, **self.settings})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Calls(Callback):
    """Calls what it is given at each event of one kind."""

    def __init__(self, event, call):
        setattr(self, event, lambda trainer, module, *rest: call(trainer, module))


class Loader(DataLoader):
    """One that Lightning can resume in mid-epoch."""

    first = taken = 0

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i >= self.first:
                self.taken = i + 1
                yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.first = state["taken"]


def data(pieces=TRAIN, batch=BATCH):
    return Loader(pieces, batch_size=batch)


def make(folder, callbacks=(), zenflow_callback=True, **changed):
    settings = {"accumulate_grad_batches": ACCUMULATED, "max_epochs": 1, "num_sanity_val_steps": 0, "logger": False}
    settings |= {"enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks)}
    callbacks = [*callbacks, *([ZenFlowCallback()] if zenflow_callback else [])]
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**settings, **changed},
    )


def train(folder, validates=False, checkpoint=None, module=None, settings=None, **changed):
    """(trainer, module, optimizer) after a training."""
    trainer, module = make(folder, **changed), module or Module(**(settings or {}))
    trainer.fit(module, data(), data(EVAL, len(EVAL)) if validates else None, ckpt_path=checkpoint)
    return trainer, module, trainer.optimizers[0]


def assert_same_runs(found, expected):
    """Of what train() and train_plainly() return."""
    assert_same_training(*found[1:], *expected[1:])


def train_plainly(clip=None):
    """The same training as a plain loop: (None, model, optimizer)."""
    model = new_model().train()
    optimizer = ZenFlowOptimizer(model.parameters(), **SETTINGS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i, batch in enumerate(data()):
        (model(**batch).loss / ACCUMULATED).backward()
        if (i + 1) % ACCUMULATED == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return None, model, optimizer


# Training


def test_automatic_optimization_accumulates_clips_and_schedules_as_a_plain_loop_does(tmp_path):
    found = train(tmp_path, zenflow_callback=False, gradient_clip_val=0.5)
    assert found[2].stats().split_parameters > 10
    assert_same_runs(found, train_plainly(clip=0.5))


def test_lightnings_clipping_takes_effect_on_gradients_that_left_in_backward(tmp_path):
    expected = train(tmp_path, gradient_clip_val=0.5)
    with pytest.warns(UserWarning, match="was brought back"):
        found = train(tmp_path, gradient_clip_val=0.5, settings=HOOKS)
    assert_same_runs(found, expected)


def test_gradients_that_left_stay_away_where_the_optimizer_clips(tmp_path):
    inside = {"max_grad_norm": 0.5}
    assert_same_runs(train(tmp_path, settings=HOOKS | inside), train(tmp_path, settings=inside))


class Manual(Module):
    """Accumulates, clips and steps itself, with or without a closure."""

    def __init__(self, closure, **settings):
        super().__init__(**settings)
        self.automatic_optimization, self.closure, self.pieces = False, closure, []

    def training_step(self, batch, index):
        self.pieces.append(batch)
        if len(self.pieces) < ACCUMULATED:
            return
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()

        def closure():
            optimizer.zero_grad()
            for piece in self.pieces:
                self.manual_backward(self.model(**piece).loss / ACCUMULATED)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

        if self.closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
        scheduler.step()
        self.pieces.clear()


@pytest.mark.parametrize("closure", [False, True])
def test_manual_optimization_trains_as_a_plain_loop_does(tmp_path, closure):
    found = train(tmp_path, module=Manual(closure), zenflow_callback=False, accumulate_grad_batches=1)
    assert_same_runs(found, train_plainly(clip=0.5))


class Methods(Module):
    """Uses the methods of what self.optimizers() returns, which is Lightning's wrapper."""

    def on_train_batch_start(self, batch, index):
        optimizer = self.optimizers()
        if index == 6:
            with optimizer.settled():
                self.settled = weights_of(self)
        if index == 10:
            self.saved = optimizer.state_dict()
        if index == 12:
            optimizer.synchronize()
        if index == 18:
            optimizer.flush()
            self.stats = optimizer.stats()


def test_the_optimizers_methods_work_through_lightnings_wrapper(tmp_path):
    _, module, _ = found = train(tmp_path, module=Methods())
    real = {"settled": None}

    def act(trainer, plain):
        index, optimizer = trainer.fit_loop.epoch_loop.batch_idx, trainer.optimizers[0]
        if index == 6:
            with optimizer.settled():
                real["settled"] = weights_of(plain)
        if index == 10:
            real["saved"] = optimizer.state_dict()
        if index == 12:
            optimizer.synchronize()
        if index == 18:
            optimizer.flush()

    expected = train(tmp_path, callbacks=[Calls("on_train_batch_start", act)])
    assert_same_runs(found, expected)
    assert_all_same(module.settled, real["settled"], "settled")
    assert module.saved["param_groups"] == real["saved"]["param_groups"]
    for i, state in real["saved"]["state"].items():
        for key, value in state.items():
            assert torch.equal(module.saved["state"][i][key], value), key
    assert module.stats.total.steps == 9


def test_lightnings_wrapper_keeps_nothing_of_what_the_methods_change():
    model = new_model()
    optimizer = ZenFlowOptimizer(model.parameters(), **SETTINGS)
    wrapper = LightningOptimizer(optimizer)
    own = set(vars(wrapper))
    for pieces in (TRAIN[:4], TRAIN[4:8]):
        model(**batch_of(pieces)).loss.backward()
        optimizer.step()
    wrapper.flush()
    wrapper.synchronize()
    with wrapper.settled():
        saved = wrapper.state_dict()
    wrapper.load_state_dict(saved)
    assert set(vars(wrapper)) == own
    assert optimizer.stats() == wrapper.stats()


class TwoOptimizers(Module):
    """A ZenFlowOptimizer for the matrices, AdamW for the rest, in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(self.model(**batch).loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        matrices, rest = ([p for p in self.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
        return ZenFlowOptimizer(matrices, **SETTINGS), torch.optim.AdamW(rest)


def test_an_optimizer_of_another_kind_may_stand_beside(tmp_path):
    trainer, module, optimizer = train(tmp_path, module=TwoOptimizers(), accumulate_grad_batches=1, validates=True)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(loss_on(module.model, EVAL))
    assert optimizer.stats().total.steps == STEPS * ACCUMULATED


# Evaluation


def test_validations_see_settled_masters_and_training_goes_on_as_if_there_had_been_none(tmp_path):
    training, settled, reported = [], [], []

    def before(trainer, module):
        training.append(loss_on(module.model, EVAL))
        with trainer.optimizers[0].settled():
            settled.append(loss_on(module.model, EVAL))

    def after(trainer, module):
        reported.append(trainer.callback_metrics["loss"].item())

    probes = [Calls("on_train_batch_end", before), Calls("on_validation_end", after)]
    found = train(tmp_path, callbacks=probes, validates=True, val_check_interval=1)
    assert reported[:-1] == settled[:-1]
    assert reported[-1] == loss_on(found[1].model, EVAL), "the last step closes its window first"
    assert sum(a != b for a, b in zip(training, settled, strict=True)) > len(training) / 2
    assert_same_runs(found, train(tmp_path))


def stop_at(step):
    def stop(trainer, module):
        if trainer.global_step == step:
            raise RuntimeError("enough")

    return stop


def test_after_a_validation_that_failed_the_training_weights_are_back(tmp_path):
    before = []
    probes = [
        Calls("on_train_batch_end", lambda trainer, module: before.append(weights_of(module))),
        Calls("on_validation_batch_start", stop_at(6)),
    ]
    trainer, module = make(tmp_path, callbacks=probes, val_check_interval=2), Module()
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(module, data(), data(EVAL))
    assert len(before) == 12
    assert_all_same(weights_of(module), before[-1], "training weights")
    trainer.optimizers[0].synchronize()
    assert any(not torch.equal(a, b) for a, b in zip(weights_of(module), before[-1], strict=True))


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_an_evaluation_outside_of_training_sees_settled_masters(tmp_path, what):
    trainer, module = make(tmp_path, callbacks=[Calls("on_train_batch_end", stop_at(6))]), Module()
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(module, data())
    before = weights_of(module)
    with trainer.optimizers[0].settled():
        settled = loss_on(module.model, EVAL)
    result = getattr(trainer, what)(module, data(EVAL, len(EVAL)))[0]
    assert (result if what == "predict" else result["loss"]) == settled != loss_on(module.model, EVAL)
    assert_all_same(weights_of(module), before, "training weights")


# Checkpoints


def checkpoints(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)


@pytest.fixture(scope="module", params=[False, True], ids=["default", "offload_gradients"])
def uninterrupted(request, tmp_path_factory):
    """(settings, finished training, folder with a checkpoint of each step) of a training with validations."""
    folder = tmp_path_factory.mktemp("lightning")
    settings = {"max_grad_norm": 0.5, **(HOOKS if request.param else {})}
    changed = {"settings": settings, "validates": True, "val_check_interval": 4}
    return changed, train(folder, callbacks=[checkpoints(folder)], **changed), folder


@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(uninterrupted, step, tmp_path):
    """At every offset of a window; at step 4 an update is in flight."""
    changed, finished, folder = uninterrupted
    steps = []
    count = Calls("on_train_batch_end", lambda trainer, module: steps.append(trainer.global_step))
    resumed = train(tmp_path, callbacks=[count], checkpoint=folder / f"step={step}.ckpt", **changed)
    assert steps[ACCUMULATED - 1 :: ACCUMULATED] == list(range(step + 1, STEPS + 1))
    assert_same_runs(resumed, finished)


def test_a_checkpoint_of_a_validation_resumes_with_the_same_bits(tmp_path):
    """ModelCheckpoint saves after the training weights are back."""
    saves = ModelCheckpoint(tmp_path, filename="{step}", monitor="loss", save_top_k=-1)
    finished = train(tmp_path, callbacks=[saves], validates=True, val_check_interval=12)
    saved = tmp_path / "step=6.ckpt"
    resumed = train(tmp_path / "resumed", checkpoint=saved, validates=True, val_check_interval=12)
    assert_same_runs(resumed, finished)


def assert_nothing_is_pending(path, module):
    saved = torch.load(path, weights_only=False)
    states = saved["optimizer_states"][0]["state"]
    assert all(state["window"][0] == 0 for state in states.values())
    weights = [saved["state_dict"][name] for name, _ in module.named_parameters()]
    assert_all_same(weights, [state["master"] for state in states.values()], "settled masters")


@pytest.mark.parametrize(
    "end", [{"max_epochs": 1}, {"max_epochs": -1, "max_steps": STEPS - 1}, {"limit_train_batches": 10}]
)
def test_the_last_checkpoint_lacks_no_gradient(tmp_path, end):
    """At the end of an epoch of odd length, of the steps, and of a part of the data."""
    trainer, module, _ = train(tmp_path, callbacks=[checkpoints(tmp_path)], **end)
    assert_nothing_is_pending(tmp_path / f"step={trainer.global_step}.ckpt", module)
    assert_nothing_is_pending(tmp_path / "last.ckpt", module)


def test_a_training_that_stops_early_ends_flushed(tmp_path):
    def stop(trainer, module):
        trainer.should_stop = trainer.global_step == 6

    trainer, module, optimizer = train(tmp_path, callbacks=[Calls("on_train_batch_end", stop)])
    assert optimizer.stats().total.steps == 6
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert_nothing_is_pending(tmp_path / "final.ckpt", module)


# Misuse


def test_a_module_with_another_optimizer_is_refused(tmp_path):
    class Other(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(TypeError, match="gave AdamW: return a ZenFlowOptimizer"):
        train(tmp_path, module=Other())
