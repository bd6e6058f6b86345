# SPDX-License-Identifier: Apache-2.0
"""from_deepspeed_config: what a configuration becomes, what is refused, and that every key is accounted for."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from compare import assert_all_same, assert_same_saved
from zenflow import ZenFlowOptimizer
from zenflow.deepspeed_config import read

# As small as a configuration can be, with everything in it used.
PLAIN = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1},
    },
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {
            "topk_ratio": 0.2,
            "select_strategy": "step",
            "select_interval": 6,
            "update_interval": 3,
            "full_warm_up_rounds": 2,
            "overlap_step": True,
        },
    },
}
PLAIN_SETTINGS = {
    "lr": 1e-2,
    "betas": (0.8, 0.99),
    "eps": 1e-7,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "topk_ratio": 0.2,
    "select_interval": 6,
    "update_interval": 3,
    "update_delay": 3,
    "deferred_rule": "mean",
    "lookahead": 0,
    "full_warm_up_rounds": 2,
}

# The block of DeepSpeed's tutorial on ZenFlow, and an example that fine-tunes a Llama with it.
TUTORIAL = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        },
    }
}
LLAMA = {
    "train_batch_size": 32,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}
# ZeRO-3 with offloading as people write it for Hugging Face's Trainer, with ZenFlow and some of the engine's blocks.
TRAINER = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": False},
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
            "torch_adam": True,
            "adam_w_mode": True,
            "bias_correction": True,
            "fp32_optimizer_states": False,
        },
        "legacy_fusion": False,
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": False, "buffer_count": 4},
        "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 1e9,
        "zenflow": {
            "topk_ratio": 0.1,
            "select_strategy": "epoch",
            "select_interval": 2,
            "update_interval": "auto",
            "auto_ratio": 0.9,
            "full_warm_up_rounds": 8,
            "overlap_step": False,
            "offload": True,
            "pt_reserved_cores_perc": 0.25,
            "steps_per_epoch": 100,
        },
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "flops_profiler": {"enabled": True, "profile_step": 1},
}
TRAINER_FILLED = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def changed(config, path, value):
    """A copy with one key set, or left out if the value is `...`."""
    config = copy.deepcopy(config)
    *blocks, key = path.split(".")
    inner = config
    for name in blocks:
        inner = inner.setdefault(name, {})
    if value is ...:
        inner.pop(key, None)
    else:
        inner[key] = value
    return config


def settings_of(config, **overrides):
    return read(config, overrides)[0]


def text_of(config, **overrides):
    return read(config, overrides)[1]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 40), (7,), (16, 30))]


def train(optimizer, steps=20):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


# What it becomes


def test_training_equals_the_same_settings_given_by_hand(tmp_path):
    path = tmp_path / "zenflow.json"
    path.write_text(json.dumps(PLAIN), encoding="utf-8")
    by_hand = ZenFlowOptimizer(parameters(), min_offload_numel=0, num_threads=1, **PLAIN_SETTINGS)
    train(by_hand)
    for config in (PLAIN, path, str(path)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = ZenFlowOptimizer.from_deepspeed_config(parameters(), config, min_offload_numel=0, num_threads=1)
        train(ours)
        assert_all_same(ours.param_groups[0]["params"], by_hand.param_groups[0]["params"], "weights")
        assert_same_saved(ours, by_hand, "state")
        assert ours.stats().update_delay == 3


def test_where_every_key_is_used_there_is_no_warning():
    assert read(PLAIN, {}) == (PLAIN_SETTINGS, None)


def test_the_tutorials_block_becomes_the_published_schedule():
    settings, text = read(TUTORIAL, {"lr": 1e-5, "max_grad_norm": None, "steps_per_epoch": 50})
    assert settings == {
        "lr": 1e-5,
        "max_grad_norm": None,
        "topk_ratio": 0.05,
        "update_interval": 4,
        "update_delay": 4,
        "deferred_rule": "mean",
        "lookahead": 0,
        "full_warm_up_rounds": 0,
        "select_interval": "epoch",
        "steps_per_epoch": 50,
    }
    assert text == ("DeepSpeed configuration:\n- not used, ZenFlow has nothing like it: zero_optimization.stage")


def test_the_llama_example_takes_optimizer_and_clipping_over():
    settings, text = read(LLAMA, {"select_interval": 64})
    assert settings == {
        "lr": 2e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "topk_ratio": 0.1,
        "update_interval": 4,
        "update_delay": 4,
        "deferred_rule": "mean",
        "lookahead": 0,
        "full_warm_up_rounds": 0,
        "select_interval": 64,
    }
    assert "bf16 is not used: convert the model yourself" in text
    assert "train_batch_size, zero_allow_untested_optimizer, zero_optimization.stage" in text


def test_an_empty_zenflow_block_has_deepspeeds_defaults():
    config = {"gradient_clipping": 1.0, "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "zenflow": {}}}
    settings, text = read(config, {"lr": 1e-3, "steps_per_epoch": 7})
    assert settings == {
        "lr": 1e-3,
        "max_grad_norm": 1.0,
        "update_interval": "auto",
        "auto_ratio": 0.99,
        "update_delay": 0,
        "deferred_rule": "mean",
        "lookahead": 0,
        "select_interval": "epoch",
        "steps_per_epoch": 7,
    }
    assert text is None


def test_without_a_zenflow_block_zenflow_has_its_own_defaults():
    for config in (changed(PLAIN, "zero_optimization.zenflow", ...), changed(PLAIN, "zero_optimization.zenflow", None)):
        settings, text = read(config, {})
        assert settings.keys() == {"lr", "betas", "eps", "weight_decay", "max_grad_norm"}
        assert "no block zero_optimization.zenflow: ZenFlow's own defaults" in text


@pytest.mark.parametrize(
    ("overlap", "interval", "delay"),
    [(True, 4, 4), (False, 4, 0), ("auto", 4, 0), (..., 4, 0), (True, "auto", 1), (False, "auto", 0)],
)
def test_the_delay_is_the_interval_or_0_without_overlap(overlap, interval, delay):
    config = changed(PLAIN, "zero_optimization.zenflow.overlap_step", overlap)
    config = changed(config, "zero_optimization.zenflow.update_interval", interval)
    assert settings_of(config, select_interval=None)["update_delay"] == delay


def test_the_delay_follows_an_overridden_interval():
    settings = settings_of(PLAIN, update_interval=6)
    assert (settings["update_interval"], settings["update_delay"]) == (6, 6)


@pytest.mark.parametrize(
    ("strategy", "every", "expected"),
    [
        ("step", 12, {"select_interval": 12}),
        ("epoch", 1, {"select_interval": "epoch", "steps_per_epoch": 30}),
        ("epoch", 2, {"select_interval": 60}),
        ("auto", "auto", {"select_interval": "epoch", "steps_per_epoch": 30}),
        (..., ..., {"select_interval": "epoch", "steps_per_epoch": 30}),
    ],
)
def test_select_strategy_says_what_select_interval_counts(strategy, every, expected):
    config = changed(PLAIN, "zero_optimization.zenflow.select_strategy", strategy)
    config = changed(config, "zero_optimization.zenflow.select_interval", every)
    overrides = {"steps_per_epoch": 30} if strategy != "step" else {}
    settings = settings_of(config, **overrides)
    assert {name: settings[name] for name in ("select_interval", "steps_per_epoch") if name in settings} == expected


def test_a_selection_between_windows_moves_to_the_next_window_and_that_is_said():
    settings, text = read(changed(PLAIN, "zero_optimization.zenflow.select_interval", 10), {})
    assert settings["select_interval"] == 12
    assert "columns are selected every 12 steps instead of 10: when a window of 3 steps starts" in text


@pytest.mark.parametrize(("clipping", "norm"), [(0, None), (0.0, None), (2, 2), (..., 1.0)])
def test_gradient_clipping_becomes_max_grad_norm(clipping, norm):
    settings, text = read(changed(PLAIN, "gradient_clipping", clipping), {})
    assert settings["max_grad_norm"] == norm
    assert ("no gradient_clipping: 1.0, the default of DeepSpeed 0.19.6" in (text or "")) == (clipping is ...)


def test_without_weight_decay_it_is_0_and_that_is_said():
    config = changed(PLAIN, "optimizer.params.weight_decay", ...)
    assert settings_of(config)["weight_decay"] == 0.0
    assert "no optimizer.params.weight_decay: 0" in text_of(config)
    assert read(config, {"weight_decay": 0.3}) == ({**PLAIN_SETTINGS, "weight_decay": 0.3}, None)


@pytest.mark.parametrize(("name", "mode"), [("AdamW", ...), ("adamw", False), ("Adam", ...), ("ADAM", True)])
def test_adam_means_adamw_as_in_deepspeed(name, mode):
    config = changed(changed(PLAIN, "optimizer.type", name), "optimizer.params.adam_w_mode", mode)
    assert read(config, {}) == (PLAIN_SETTINGS, None)


def test_gradient_accumulation_is_announced_and_explained():
    settings, text = read(changed(PLAIN, "gradient_accumulation_steps", 8), {})
    assert settings["gradient_accumulation_steps"] == 8
    assert "gradient_accumulation_steps is 8: accumulate in your loop" in text
    assert read(changed(PLAIN, "gradient_accumulation_steps", 1), {}) == (PLAIN_SETTINGS, None)


def test_keywords_override_the_configuration():
    overrides = {
        "lr": 0.5,
        "topk_ratio": 0.4,
        "update_interval": 2,
        "select_interval": 4,
        "update_delay": 1,
        "deferred_rule": "adamw",
        "lookahead": "auto",
        "max_grad_norm": None,
        "num_threads": 1,
    }
    assert read(PLAIN, overrides) == ({**PLAIN_SETTINGS, **overrides}, None)


# What is refused


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optimizer", ..., r"no block optimizer: pass lr=\.\.\."),
        ("optimizer.type", "Lion", r"optimizer\.type must be .*, got 'Lion'"),
        ("optimizer.type", ..., r"optimizer\.type must be .*, got None"),
        ("optimizer.params", [1], r"optimizer\.params must be a JSON object, got a list"),
        ("optimizer.params.bias_correction", False, r"optimizer\.params\.bias_correction is false"),
        ("optimizer.params.amsgrad", True, r"optimizer\.params\.amsgrad is true: .*torch\.optim\.AdamW"),
        ("optimizer.params.max_grad_norm", 1.0, r"optimizer\.params\.max_grad_norm: write gradient_clipping"),
        ("optimizer.params.lr", "auto", r'optimizer\.params\.lr is "auto", .* write the value, or pass lr='),
        ("optimizer.params.betas", "auto", r'optimizer\.params\.betas is "auto"'),
        ("optimizer.params.eps", "auto", r'optimizer\.params\.eps is "auto"'),
        ("optimizer.params.weight_decay", "auto", r'optimizer\.params\.weight_decay is "auto"'),
        ("optimizer.params.lr", "fast", "Invalid learning rate: fast"),
        ("gradient_clipping", "auto", r'gradient_clipping is "auto", .* or pass max_grad_norm='),
        ("gradient_clipping", -1, "max_grad_norm must be None or a number > 0, got -1"),
        ("zero_optimization", True, "zero_optimization must be a JSON object, got a bool"),
        ("zero_optimization.zenflow", True, r"zero_optimization\.zenflow must be a JSON object, got a bool"),
        ("zero_optimization.zenflow.topk_ratio", 2, "topk_ratio must be in .*, got 2"),
        ("zero_optimization.zenflow.update_interval", 0, "update_interval must be an integer >= 1, got 0"),
        ("zero_optimization.zenflow.full_warm_up_rounds", -1, "full_warm_up_rounds must be an integer >= 0"),
        ("zero_optimization.zenflow.overlap_step", 1, r"zenflow\.overlap_step must be true or false, got 1"),
        ("zero_optimization.zenflow.select_strategy", "best", r"zenflow\.select_strategy must be .*, got 'best'"),
        ("zero_optimization.zenflow.select_strategy", "auto", r"select_interval is 6, but select_strategy \"auto\""),
        ("zero_optimization.zenflow.select_interval", "auto", r"select_interval must be an integer .*, got 'auto'"),
        ("zero_optimization.zenflow.select_strategy", "epoch", r"by epochs: pass steps_per_epoch=\.\.\."),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(path, value, words):
    with pytest.raises(ValueError, match=words):
        ZenFlowOptimizer.from_deepspeed_config(parameters(), changed(PLAIN, path, value))


def test_adam_with_coupled_weight_decay_is_refused():
    config = changed(changed(PLAIN, "optimizer.type", "Adam"), "optimizer.params.adam_w_mode", False)
    with pytest.raises(
        ValueError, match=r"optimizer\.params\.adam_w_mode is false: .* or train with torch\.optim\.Adam"
    ):
        read(config, {})


def test_what_the_trainer_would_fill_in_may_be_given_as_keywords():
    with pytest.raises(ValueError, match=r'optimizer\.params\.lr is "auto"'):
        read(TRAINER, {})
    settings = settings_of(TRAINER, **TRAINER_FILLED)
    assert {name: settings[name] for name in TRAINER_FILLED} == TRAINER_FILLED


def test_a_keyword_that_the_constructor_does_not_know_is_refused_by_it():
    with pytest.raises(TypeError, match="'topk'"):
        ZenFlowOptimizer.from_deepspeed_config(parameters(), PLAIN, topk=0.1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{} // mine", "cannot be read as JSON .* remove comments"),
        ('{"optimizer": {"type": "AdamW", "type": "Lion"}}', "key 'type' stands twice in one object"),
        ("[]", "the configuration must be a JSON object, got a list"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content, words):
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read(path, {})
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing.json", {})
    with pytest.raises(ValueError, match="pass a dict"):
        read('{"gradient_clipping": 1.0}', {})


# Every key


def paths_of(block, prefix=""):
    for key, value in block.items():
        if isinstance(value, dict):
            yield from paths_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def is_named(path, text):
    """Whether a line begins with the path or a block that it lies in, or the last line lists it."""
    *lines, last = text.splitlines()
    names = {line.removeprefix("- ").split()[0] for line in [*lines, last]} | set(last.partition(": ")[2].split(", "))
    parts = path.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


@pytest.mark.parametrize(
    ("config", "overrides"),
    [(LLAMA, {"steps_per_epoch": 9}), (TRAINER, TRAINER_FILLED), (PLAIN, {})],
    ids=["llama", "trainer", "plain"],
)
def test_every_key_decides_something_or_is_named(config, overrides):
    """A key that is not named must matter: with another value, something else comes out."""

    def outcome(config):
        try:
            return read(config, overrides)
        except ValueError as error:
            return str(error)

    settings, text = read(config, overrides)
    silent = [path for path in paths_of(config) if not (text and is_named(path, text))]
    overridden = {"lr", "betas", "eps", "weight_decay", "gradient_clipping"} if overrides is TRAINER_FILLED else set()
    agreeing = {"torch_adam"}  # the rule is the same either way
    for path in silent:
        if path.rpartition(".")[2] not in overridden | agreeing:
            assert outcome(changed(config, path, "changed")) != (settings, text), path


def test_what_to_do_about_an_unused_key_is_said_where_there_is_something_to_do():
    text = text_of(TRAINER, **TRAINER_FILLED)
    for line in (
        'gradient_accumulation_steps is "auto": your loop decides',
        'zero_optimization.offload_optimizer.device is "nvme": deferred columns have their state in host memory',
        "fp16 is not used: scale the loss with torch.amp.GradScaler",
        "scheduler is not used: build the scheduler yourself",
        "zero_optimization.offload_param is not used",
        "zero_optimization.zenflow.offload is not used: selected columns keep their state on the device",
        "optimizer.params.fp32_optimizer_states is not used: moments are float32",
    ):
        assert f"- {line}" in text
    assert "bf16" not in text  # it is switched off


def test_unknown_keys_are_named_with_their_path_and_what_was_meant():
    config = changed(PLAIN, "zero_optimization.zenflow.topk_ration", 0.3)
    config = changed(changed(config, "gradient_cliping", 1.0), "mine.inner", 1)
    assert "zero_optimization.zenflow.topk_ration\n" in text_of(config) + "\n"  # topk_ratio is there too: no typo
    config = changed(config, "zero_optimization.zenflow.topk_ratio", ...)
    text = text_of(changed(config, "gradient_clipping", ...))
    assert "zero_optimization.zenflow.topk_ration is not used; did you mean topk_ratio?" in text
    assert "gradient_cliping is not used; did you mean gradient_clipping?" in text
    assert "not used, ZenFlow has nothing like it: mine" in text


def test_there_is_one_warning_and_it_points_at_the_call():
    with pytest.warns(UserWarning) as caught:
        ZenFlowOptimizer.from_deepspeed_config(parameters(), LLAMA, select_interval=64)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(caught[0].message) == text_of(LLAMA, select_interval=64)


def test_the_configuration_is_left_as_it_was():
    before, overrides = copy.deepcopy(TRAINER), dict(TRAINER_FILLED, steps_per_epoch=5)
    read(TRAINER, overrides)
    assert (TRAINER, overrides) == (before, {**TRAINER_FILLED, "steps_per_epoch": 5})
