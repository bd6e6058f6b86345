# SPDX-License-Identifier: Apache-2.0
"""LoRA with PEFT: most parameters are frozen, the rest small."""

import pytest
import torch

pytest.importorskip("peft", reason="needs peft: pip install -r requirements-test.txt")
pytest.importorskip("accelerate", reason="needs accelerate: pip install -r requirements-test.txt")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from compare import assert_all_same, assert_same_saved
from language_model import SETTINGS, batch_of, examples, new_model
from zenflow import ZenFlowOptimizer
from zenflow.integrations.transformers import ZenFlowCallback

STEPS, BATCH = 11, 2
TRAIN = examples(STEPS * BATCH)
SPLIT = {**SETTINGS, "min_offload_numel": 0}
pytestmark = pytest.mark.filterwarnings("error:zenflow")


def new_adapted_model():
    torch.manual_seed(5)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(new_model(), config).train()


def adapters_of(model):
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def step(model, optimizer, index):
    model(**batch_of(TRAIN[index * BATCH :][:BATCH])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_as_users_have_it_nothing_is_split_and_training_is_adamws():
    model, other = new_adapted_model(), new_adapted_model()
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = ZenFlowOptimizer(model.parameters(), lr=1e-3)
    adamw = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for index in range(STEPS):
        step(model, optimizer, index)
        step(other, adamw, index)
    stats = optimizer.stats()
    assert (stats.parameters, stats.split_parameters, stats.host_bytes) == (len(adapters_of(model)), 0, 0)
    moved = [a - b for a, b in zip(adapters_of(other), adapters_of(new_adapted_model()), strict=True)]
    for a, b, move in zip(adapters_of(model), adapters_of(other), moved, strict=True):
        assert (a - b).abs().max() <= 1e-5 * move.abs().max() > 0
    assert_all_same([p for p in model.parameters() if not p.requires_grad], frozen, "frozen weights")


@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
def test_split_adapters_train_and_are_saved_without_a_gradient_missing(tmp_path, hooks):
    model = new_adapted_model()
    optimizer = ZenFlowOptimizer(model.parameters(), **SPLIT, offload_gradients=hooks)
    before = model(**batch_of(TRAIN)).loss.item()
    for index in range(STEPS):
        step(model, optimizer, index)
    optimizer.flush()
    assert optimizer.stats().split_parameters == optimizer.stats().parameters == len(adapters_of(model))
    assert model(**batch_of(TRAIN)).loss.item() < before - 0.1
    masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(new_model(), tmp_path, is_trainable=True)
    assert_all_same(adapters_of(loaded), masters, "adapters")


def make(folder):
    model = new_adapted_model()
    optimizer = ZenFlowOptimizer(model.parameters(), **SPLIT)
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=6,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=TRAIN, optimizers=(optimizer, None))
    trainer.add_callback(ZenFlowCallback(trainer))
    return trainer, optimizer


def test_trainer_resumes_adapters_with_the_same_bits(tmp_path):
    trainer, optimizer = make(tmp_path / "a")
    trainer.train()
    resumed, resumed_optimizer = make(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert_all_same(adapters_of(resumed.model), adapters_of(trainer.model), "adapters")
    assert_same_saved(resumed_optimizer, optimizer, "state")
