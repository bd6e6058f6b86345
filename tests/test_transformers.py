# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, as its users run it, with and without ZenFlowCallback."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")
pytest.importorskip("accelerate", reason="needs accelerate: pip install -r requirements-test.txt")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

from compare import assert_all_same, assert_same_training, saved_state
from language_model import SETTINGS, batch_of, examples, loss_on, new_model, weights_of
from zenflow import ZenFlowOptimizer
from zenflow.integrations.transformers import ZenFlowCallback

STEPS, ACCUMULATED, BATCH = 11, 2, 2
TRAIN, EVAL = examples(STEPS * ACCUMULATED * BATCH), examples(4, start=100_000)
pytestmark = pytest.mark.filterwarnings("error:zenflow")


def arguments(folder, **changed):
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": len(EVAL),
        "gradient_accumulation_steps": ACCUMULATED,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(folder, **{**settings, **changed})


def make(folder, callback=True, probes=(), evaluates=EVAL, optimizer=None, trainer_class=Trainer, **changed):
    """A trainer of a new model; `optimizer`: changed settings of it."""
    model = new_model()
    optimizer = ZenFlowOptimizer(model.parameters(), **{**SETTINGS, **(optimizer or {})})
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    trainer = trainer_class(
        model,
        arguments(folder, **changed),
        train_dataset=TRAIN,
        eval_dataset=evaluates,
        optimizers=(optimizer, scheduler),
        callbacks=list(probes),
    )
    if callback:
        trainer.add_callback(ZenFlowCallback(trainer))
    return trainer, optimizer


class Calls(TrainerCallback):
    """Calls what it is given at each event of one kind."""

    def __init__(self, event, call):
        setattr(self, event, lambda args, state, control, **kwargs: call(state, control, **kwargs))


# Training


def test_trainer_accumulates_clips_and_schedules_as_a_plain_loop_does(tmp_path):
    trainer, optimizer = make(tmp_path, callback=False, max_grad_norm=0.5, train_sampling_strategy="sequential")
    trainer.train()

    model = new_model().train()
    plain = ZenFlowOptimizer(model.parameters(), **SETTINGS)
    scheduler = get_linear_schedule_with_warmup(plain, 2, STEPS)
    for step in range(STEPS):
        pieces = TRAIN[step * ACCUMULATED * BATCH :][: ACCUMULATED * BATCH]
        items = sum((piece["labels"][1:] != -100).sum() for piece in pieces)
        for i in range(ACCUMULATED):
            model(**batch_of(pieces[i * BATCH :][:BATCH]), num_items_in_batch=items).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        scheduler.step()
        plain.zero_grad()
    assert optimizer.stats().split_parameters > 10
    assert_same_training(trainer.model, optimizer, model, plain)


def test_trainers_clipping_takes_effect_on_gradients_that_left_in_backward(tmp_path):
    trainer, optimizer = make(tmp_path / "default", max_grad_norm=0.5)
    trainer.train()
    offload = {"offload_gradients": True, "gradient_accumulation_steps": ACCUMULATED}
    hooked, hooked_optimizer = make(tmp_path / "hooks", optimizer=offload, max_grad_norm=0.5)
    with pytest.warns(UserWarning, match="was brought back"):
        hooked.train()
    assert_same_training(hooked.model, hooked_optimizer, trainer.model, optimizer)


def test_with_the_callback_gradients_that_left_stay_away(tmp_path):
    """As documented: clipping by the optimizer, none by Trainer; what comes back would warn."""
    trainer, optimizer = make(tmp_path / "default", optimizer={"max_grad_norm": 0.5}, max_grad_norm=0)
    trainer.train()
    settings = {"max_grad_norm": 0.5, "offload_gradients": True, "gradient_accumulation_steps": ACCUMULATED}
    hooked, hooked_optimizer = make(tmp_path / "hooks", optimizer=settings, max_grad_norm=0)
    hooked.train()
    assert_same_training(hooked.model, hooked_optimizer, trainer.model, optimizer)
    norms = [entry.get("grad_norm") for entry in hooked.state.log_history if "loss" in entry]
    assert norms[0] is None and all(norm > 0 for norm in norms[1:])


def test_trainer_makes_the_optimizer_with_its_own_groups(tmp_path):
    trainer = Trainer(
        new_model(),
        arguments(tmp_path, weight_decay=0.1),
        train_dataset=TRAIN,
        optimizer_cls_and_kwargs=(ZenFlowOptimizer, SETTINGS),
    )
    trainer.add_callback(ZenFlowCallback(trainer))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.stats().total.steps == STEPS
    assert trainer.evaluate(EVAL)["eval_loss"] == pytest.approx(loss_on(trainer.model, EVAL))


# Evaluation


class Losses(TrainerCallback):
    """At each step's end: losses of the training weights and of the settled masters; at each evaluation Trainer's."""

    def __init__(self):
        self.training, self.settled, self.reported = [], [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.training.append(loss_on(model, EVAL))
        with optimizer.optimizer.settled():
            self.settled.append(loss_on(model, EVAL))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.reported.append(metrics.get("eval_loss", metrics.get("eval_second_loss")))


def test_evaluations_see_settled_masters_and_training_goes_on_as_if_there_had_been_none(tmp_path):
    losses = Losses()
    trainer, optimizer = make(tmp_path / "a", probes=[losses], eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert losses.reported[:-1] == losses.settled[:-1]
    assert losses.reported[-1] == loss_on(trainer.model, EVAL), "the last step closes its window first"
    assert sum(a != b for a, b in zip(losses.training, losses.settled, strict=True)) >= STEPS - 4
    straight, straight_optimizer = make(tmp_path / "b")
    straight.train()
    assert_same_training(trainer.model, optimizer, straight.model, straight_optimizer)


def test_each_of_several_evaluation_sets_and_a_prediction_see_settled_masters(tmp_path):
    losses, predicted = Losses(), []

    def predict(state, control, model, **kwargs):
        predicted.append(trainer.predict(EVAL).metrics["test_loss"])

    sets = {"first": examples(2, start=200_000), "second": EVAL}
    probes = [losses, Calls("on_step_end", predict)]
    trainer, _ = make(tmp_path, probes=probes, evaluates=sets, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert losses.reported[1::2][:-1] == losses.settled[:-1]
    assert predicted == losses.settled


def test_after_an_evaluation_that_failed_training_goes_on_with_its_weights(tmp_path):
    class Fails(Trainer):
        def prediction_step(self, *args, **kwargs):
            raise KeyboardInterrupt

    before = []
    keep = Calls("on_step_end", lambda state, control, model, **kwargs: before.append(weights_of(model)))
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer, optimizer = make(
        tmp_path, probes=[keep], trainer_class=Fails, eval_strategy="steps", eval_steps=6, **settings
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(before) == 6
    with optimizer.settled():
        settled = weights_of(trainer.model)
    assert any(not torch.equal(a, b) for a, b in zip(before[-1], settled, strict=True))
    assert_all_same(weights_of(trainer.model), before[-1], "training weights")

    trainer.args.eval_strategy = "no"
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    straight, straight_optimizer = make(tmp_path / "straight")
    straight.train()
    assert_same_training(trainer.model, optimizer, straight.model, straight_optimizer)


# Checkpoints


@pytest.fixture(scope="module", params=[False, True], ids=["default", "offload_gradients"])
def uninterrupted(request, tmp_path_factory):
    """(settings, trainer, optimizer, folder with a checkpoint of each step) of a training with evaluations."""
    folder = tmp_path_factory.mktemp("trainer")
    changed = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    if request.param:
        inside = {"offload_gradients": True, "gradient_accumulation_steps": ACCUMULATED, "max_grad_norm": 1.0}
        changed |= {"optimizer": inside, "max_grad_norm": 0}
    trainer, optimizer = make(folder, **changed)
    trainer.train()
    return changed, trainer, optimizer, folder


@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(uninterrupted, step, tmp_path):
    """At every offset of a window; at step 4 an update is in flight."""
    changed, trainer, optimizer, folder = uninterrupted
    steps = []
    count = Calls("on_step_end", lambda state, control, **kwargs: steps.append(state.global_step))
    resumed, resumed_optimizer = make(tmp_path, probes=[count], **changed)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert steps == list(range(step + 1, STEPS + 1))
    assert_same_training(resumed.model, resumed_optimizer, trainer.model, optimizer)
    kept = [[entry["eval_loss"] for entry in t.state.log_history if "eval_loss" in entry] for t in (resumed, trainer)]
    assert kept[0] == kept[1]


def test_the_last_checkpoint_lacks_no_gradient(uninterrupted):
    _, trainer, _, folder = uninterrupted
    last = folder / f"checkpoint-{STEPS}"
    states = torch.load(last / "optimizer.pt", weights_only=True)["state"].values()
    assert all(state["window"][0] == 0 for state in states)
    weights = weights_of(type(trainer.model).from_pretrained(last))
    assert_all_same(weights, [state["master"] for state in states], "settled masters")


def test_a_training_that_stops_early_ends_flushed(tmp_path):
    def stop(state, control, **kwargs):
        control.should_training_stop = state.global_step == 6

    trainer, optimizer = make(tmp_path, probes=[Calls("on_step_end", stop)])
    trainer.train()
    assert optimizer.stats().total.steps == 6
    before = weights_of(trainer.model)
    optimizer.flush()
    assert_all_same(weights_of(trainer.model), before, "weights")


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_the_one_that_was_evaluated(tmp_path, save_only_model):
    def get_worse(state, control, lr_scheduler, **kwargs):
        if state.global_step == 6:
            lr_scheduler.base_lrs = [5.0]

    trainer, optimizer = make(
        tmp_path,
        probes=[EarlyStoppingCallback(2), Calls("on_step_end", get_worse)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        save_only_model=save_only_model,
    )
    trainer.train()
    step = trainer.state.best_global_step
    assert 5 <= step <= trainer.state.global_step - 2
    saved = type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{step}")
    assert loss_on(saved, EVAL) != trainer.state.best_metric
    if save_only_model:  # all that is known of it
        assert_all_same(weights_of(trainer.model), weights_of(saved), "weights")
    else:
        assert loss_on(trainer.model, EVAL) == trainer.state.best_metric
        assert all(state["step"] == step for state in saved_state(optimizer).values())


# Misuse


def test_a_trainer_with_another_optimizer_is_refused(tmp_path):
    trainer = Trainer(new_model(), arguments(tmp_path), train_dataset=TRAIN)
    trainer.add_callback(ZenFlowCallback(trainer))
    with pytest.raises(TypeError, match="has AdamW: pass optimizers="):
        trainer.train()


def test_a_callback_that_is_not_given_the_trainer_says_how_it_is_made():
    with pytest.raises(TypeError, match=r"got ZenFlowOptimizer: .* trainer.add_callback\(ZenFlowCallback\(trainer\)\)"):
        ZenFlowCallback(ZenFlowOptimizer(new_model().parameters()))
