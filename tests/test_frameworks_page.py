# SPDX-License-Identifier: Apache-2.0
"""The code blocks of docs/frameworks.md run as they stand, on a small model and a short text."""

import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate: pip install -r requirements-test.txt")
pytest.importorskip("peft", reason="needs peft: pip install -r requirements-test.txt")
pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning", reason="needs lightning: pip install -r requirements-test.txt")

from language_model import examples, new_model

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "frameworks.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
WRITES = {
    "Hugging Face Trainer": "tuned/model.safetensors",
    "Accelerate": "state/optimizer.bin",
    "Lightning": "tuned.ckpt",
    "PEFT": "adapters/adapter_model.safetensors",
    "GradScaler, averaged weights": None,
}


def test_every_block_of_the_page_is_run():
    assert list(BLOCKS) == list(WRITES) and PAGE.count("```python") == len(BLOCKS)


@pytest.mark.filterwarnings("ignore", "error:zenflow")
@pytest.mark.parametrize("section", WRITES)
def test_a_block_runs(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, evaluation = examples(40), examples(4, start=100_000)
    names = {
        "model": new_model(width=256).train(),  # wide enough to be split with default settings
        "train_set": train,
        "eval_set": evaluation,
        "loader": torch.utils.data.DataLoader(train, batch_size=4),
        "eval_loader": torch.utils.data.DataLoader(evaluation, batch_size=4),
        "device": "cpu",
    }
    exec(compile(BLOCKS[section], f"docs/frameworks.md, {section}", "exec"), names)
    optimizer = names["optimizer"] if "optimizer" in names else names["trainer"].optimizers[0]
    stats = optimizer.stats()
    assert stats.total.steps >= 5
    assert (stats.split_parameters > 0) == (section != "PEFT")
    assert WRITES[section] is None or (tmp_path / WRITES[section]).is_file()
