# SPDX-License-Identifier: Apache-2.0
"""`zenflow.plan()` and `python -m zenflow plan`: bytes are those of a real training, times follow the schedule."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zenflow
from small_model import small_model
from zenflow import ZenFlowOptimizer, memory
from zenflow.planning import planner, predict
from zenflow.settings import Settings
from zenflow.store import splits

os.environ["HF_HUB_OFFLINE"] = "1"
GIVEN = {"host_bandwidth": 50e9}  # nothing is measured


# Bytes


@st.composite
def trainings(draw):
    """(shapes, dtype, settings) of small trainings."""
    shape = st.one_of(
        st.tuples(st.integers(1, 30), st.integers(1, 50)),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20)),
        st.tuples(*[st.integers(1, 5)] * 4),
        st.tuples(st.integers(1, 40)),
    )
    interval = draw(st.sampled_from([1, 2, 3, 5, "auto"]))
    longest = interval if interval != "auto" else draw(st.integers(1, 4))
    settings = {
        "update_interval": interval,
        "update_delay": draw(st.integers(0, 1 if interval == "auto" else longest)),
        "max_update_interval": longest,
        "topk_ratio": draw(st.sampled_from([0.0, 0.1, 0.33, 0.5, 1.0])),
        "deferred_rule": draw(st.sampled_from(["adamw", "mean"])),
        "host_buffer": draw(st.sampled_from(["ring", "stream"])),
        "full_warm_up_rounds": draw(st.sampled_from([0, 0, 2])),
        "min_offload_numel": draw(st.sampled_from([0, 60])),
        "offload_gradients": draw(st.booleans()),
    }
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return draw(st.lists(shape, min_size=1, max_size=4)), dtype, settings


def train(parameters, settings, windows=3):
    """A ZenFlowOptimizer after as many of the longest windows, and its warm-up."""
    optimizer = ZenFlowOptimizer(parameters, num_threads=1, **settings)
    for _ in range(settings["full_warm_up_rounds"] + windows * settings["max_update_interval"]):
        sum((p.float() ** 2).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@given(trainings())
def test_bytes_are_those_of_a_real_training(training):
    shapes, dtype, settings = training
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    stats = train(parameters, settings).stats()
    plan = zenflow.plan(parameters, **settings, **GIVEN)
    # On the CPU the selected columns' gradients that wait for step() lie in host memory too.
    waiting = plan.optimizer_device_bytes - stats.device_bytes
    assert stats.host_bytes == plan.host_bytes + waiting
    kept = settings["offload_gradients"] and settings["topk_ratio"] > 0
    assert (waiting > 0) == (kept and stats.split_parameters > 0)
    assert plan.weight_bytes == sum(p.nbytes for p in parameters)
    assert plan.host_buffer == settings["host_buffer"]


@given(trainings())
def test_the_first_step_asks_the_host_for_what_the_plan_says(training):
    shapes, dtype, settings = training
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    whole = Settings(**{name: value for name, value in settings.items() if name != "topk_ratio"})
    stream = settings["host_buffer"] == "stream"
    asked = sum(memory.host_bytes(p, splits(p, True, whole), settings["topk_ratio"], whole, stream) for p in parameters)
    assert zenflow.plan(parameters, **settings, **GIVEN).host_peak_bytes == asked


@pytest.mark.parametrize(("interval", "delay"), [(1, 0), (1, 1), (3, 1), (4, 4)])
def test_traffic_is_that_of_a_real_training(interval, delay):
    model = small_model(torch.bfloat16)
    settings = {"update_interval": interval, "update_delay": delay, "max_update_interval": interval}
    settings |= {"full_warm_up_rounds": 0, "min_offload_numel": 1000}
    plan = zenflow.plan(model, **settings, **GIVEN)
    stats = train(list(model.parameters()), settings, windows=8).stats()
    published = 8 - (1 if delay else 0)
    assert stats.total.d2h_bytes == 8 * interval * plan.down_bytes
    assert stats.total.h2d_bytes == published * interval * plan.up_bytes


def test_gradients_that_leave_in_backward_are_on_the_gpu_one_at_a_time():
    model = nn.Sequential(nn.Linear(1000, 300), nn.Linear(300, 400))
    staying, leaving = (
        zenflow.plan(model, offload_gradients=leaves, **GIVEN, update_interval=4) for leaves in (False, True)
    )
    assert staying.gradient_bytes == sum(4 * p.numel() for p in model.parameters())
    assert leaving.gradient_bytes == 4 * (1000 * 300 + 300 + 400)  # the largest, and those that are not split
    selected = 100 * 300 + 30 * 400
    assert leaving.optimizer_device_bytes - staying.optimizer_device_bytes == 4 * selected


def test_frozen_parameters_are_weights_alone():
    model = nn.Sequential(nn.Linear(1000, 300, bias=False), nn.Linear(300, 1000, bias=False))
    model[1].requires_grad_(False)
    plan = zenflow.plan(model, **GIVEN)
    assert (plan.weight_bytes, plan.gradient_bytes, plan.parameters) == (2_400_000, 1_200_000, 300_000)


def test_a_number_of_parameters_is_taken_for_matrices():
    plan = zenflow.plan(params="7B", **GIVEN)
    assert plan.parameters == 7_000_000_000
    assert "all of them split" in str(plan)
    deferred = plan.down_bytes / 2
    assert deferred / 7e9 == pytest.approx(0.9, rel=1e-3)
    assert plan.host_bytes == 26 * deferred  # docs/memory.md: bf16, ring, window 4, delay 1
    assert plan.optimizer_device_bytes == 12 * (7_000_000_000 - deferred)


# Models from Hugging Face


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
CONFIGS = [
    LLAMA | {"num_key_value_heads": None, "tie_word_embeddings": True},
    LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": None, "attention_bias": True},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4},
    {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_a_config_has_the_shapes_that_transformers_builds(config, tmp_path):
    import transformers

    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    built = transformers.AutoConfig.from_pretrained(tmp_path)
    kind = getattr(transformers, config["architectures"][0]) if "architectures" in config else None
    with torch.device("meta"):
        model = kind(built) if kind else transformers.AutoModel.from_config(built)
    settings = {"min_offload_numel": 1000, **GIVEN}
    plan = zenflow.plan(tmp_path, dtype="fp32", **settings)
    expected = zenflow.plan(model, **settings)
    assert dataclasses.replace(plan, source="") == dataclasses.replace(expected, source="")
    assert plan.parameters == sum(p.numel() for p in model.parameters())


def test_a_configs_dtype_is_taken(tmp_path):
    def weight_bytes(**changed):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
        return zenflow.plan(tmp_path / "config.json", **GIVEN).weight_bytes

    assert weight_bytes(torch_dtype="float32") == weight_bytes(dtype="float32") == 2 * weight_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "a config.json or a folder .* on this machine"),
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "llama"}', "has no hidden_size"),
        (json.dumps(LLAMA | {"dtype": "int8"}), "dtype must be one of"),
    ],
)
def test_a_config_that_cannot_be_used_is_told(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        zenflow.plan(tmp_path)


# Times


# The host takes 1 s for a window of 4, the link 0.1 s for a step's gradients.
WORK = {"deferred": 1e9, "item": 2, "host_bandwidth": 34e9, "link_bandwidth": 20e9}


@pytest.mark.parametrize(
    ("settings", "stall"),
    [
        # the host has one step, less the gradients' way: 0.1 + 1 - 0.8; and 0.1 for weights; in 4 steps
        ({"device_seconds": 0.8}, (0.3 + 0.1) / 4),
        ({"device_seconds": 2.0}, 0.1 / 4),
        ({"device_seconds": 0.8, "update_delay": 2}, 0.1 / 4),
        ({"device_seconds": 0.8, "update_delay": 0}, (0.1 + 1 + 0.1) / 4),
        # each step: its gradients down, 28 bytes an element, weights up
        ({"device_seconds": 0.8, "update_delay": 0, "update_interval": 1}, 0.1 + 28 / 34 + 0.1),
        # the device waits for the host, and the host for the weights' way up alone
        ({"device_seconds": 0.01, "update_delay": 4}, (1 + 0.1) / 4 - 0.01),
        # hooks: gradients leave and weights return beside backward, whose last layer waits for the host's
        ({"device_seconds": 0.9, "offload_gradients": True}, (1 - 0.9) / 4),
        ({"device_seconds": 1.2, "offload_gradients": True}, 0.0),
        ({"device_seconds": 0.06, "update_delay": 4, "offload_gradients": True}, 1 / 4 - 0.06),
        # the stream's passes of 18 bytes, and the closing one of 28, beside one step each
        ({"device_seconds": 1.0, "host_buffer": "stream"}, 0.1 / 4),
        ({"device_seconds": 0.7, "host_buffer": "stream"}, (0.1 + 28 / 34 - 0.7 + 0.1) / 4),
    ],
)
def test_the_stall_follows_from_the_schedule(settings, stall):
    predicted = predict(**WORK, **settings)
    assert predicted.stall_seconds == pytest.approx(stall, abs=0.003)
    assert predicted.step_seconds == pytest.approx(settings["device_seconds"] + predicted.stall_seconds)
    parts = predicted.host_wait_seconds, predicted.upload_seconds, predicted.download_seconds
    assert sum(parts) == pytest.approx(predicted.stall_seconds)


def test_a_slow_link_bounds_the_step():
    slow = predict(**WORK | {"link_bandwidth": 1e9, "host_bandwidth": 1e15}, device_seconds=0.1, update_delay=4)
    assert slow.step_seconds == pytest.approx(2.0)  # down; what goes up does so beside it
    other = predict(**WORK | {"link_bandwidth": (20e9, 1e9)}, device_seconds=2.0)
    assert other.stall_seconds == pytest.approx(2.0 / 4)


def test_the_smallest_schedule_that_hides_the_host_is_chosen():
    options = {"params": 1e9, "host_bandwidth": 34e9, "link_bandwidth": 1e12, "topk_ratio": 0.0}
    # a window of S takes (26 + 2 S) / 34 s, and has its delay, at most S steps, of 0.9 * 0.5 s each
    plan = zenflow.plan(**options, step_seconds=0.5)
    assert (plan.update_interval, plan.update_delay) == plan.smallest_hiding == (2, 2)
    assert plan.hides_host
    fixed = zenflow.plan(**options, step_seconds=0.5, update_interval=2)
    assert not fixed.hides_host and fixed.smallest_hiding == (2, 2)
    assert any("update_interval=2, update_delay=2" in line for line in fixed.advice)
    assert zenflow.plan(**options, step_seconds=0.5, update_interval=2, update_delay="auto").update_delay == 2
    short = zenflow.plan(
        **options, step_seconds=0.5, host_memory=20e9, host_buffer="ring"
    )  # (2, 2) takes 24 bytes each
    assert short.smallest_hiding is None and short.fits_host
    hopeless = zenflow.plan(**options, step_seconds=0.001)
    assert hopeless.smallest_hiding is None and not hopeless.hides_host


def test_where_no_schedule_hides_the_host_the_fastest_that_fits_is_chosen():
    """A longer window with the slower buffer, for which there is memory, is none."""
    options = {"params": 7e9, "step_seconds": 0.66, "host_bandwidth": 20e9, "offload_gradients": True}
    plan = zenflow.plan(**options, host_memory="256GB")
    assert plan.smallest_hiding is None and plan.fits_host
    for interval in range(1, 17):
        for delay in range(1, interval + 1):
            other = zenflow.plan(**options, host_memory="256GB", update_interval=interval, update_delay=delay)
            if other.fits_host:
                assert plan.prediction.step_seconds <= other.prediction.step_seconds


def test_what_leaves_no_room_for_activations_is_told():
    plan = zenflow.plan(params=7e9, gpu_memory="24GB", offload_gradients=True, **GIVEN)
    assert plan.fits_gpu and plan.is_tight and "TOO LITTLE" in str(plan)
    assert any("activations" in line for line in plan.advice)
    roomy = zenflow.plan(params=7e9, gpu_memory="32GB", offload_gradients=True, **GIVEN)
    assert roomy.fits_gpu and not roomy.is_tight and not roomy.advice


def test_host_memory_that_bfloat16_moments_would_save_is_told():
    options = {"params": 7e9, "host_memory": "110GB", **GIVEN}
    (line,) = (line for line in zenflow.plan(**options).advice if "state_dtype" in line)
    assert "100.8 GB" in line and zenflow.plan(**options, state_dtype="bf16").fits_host


def test_a_host_without_memory_for_a_longer_windows_measurement_keeps_the_first(monkeypatch):
    asked = []

    def measure(item, settings, stream):
        asked.append(settings.longest_interval)
        if len(asked) > 1:
            raise MemoryError("measuring the host update takes more")
        return 20e9

    monkeypatch.setattr(planner, "measure_host_bandwidth", measure)
    plan = zenflow.plan(params=7e9, step_seconds=0.5)
    assert asked[0] == 4 and asked[1] == plan.update_interval == 16
    assert plan.host_bandwidth == 20e9


def test_counts_are_printed_as_people_write_them():
    for count, words in ((7e9, "7B"), ("135M", "135M"), (65536, "65.54k"), (7, "7")):
        assert f"model          {words} parameters" in str(zenflow.plan(params=count, **GIVEN))


def test_an_optimizer_or_named_parameters_stand_for_their_parameters():
    model = torch.nn.Linear(512, 512)
    expected = dataclasses.replace(zenflow.plan(model, **GIVEN), source="")
    for source in (torch.optim.AdamW(model.parameters()), model.named_parameters()):
        assert dataclasses.replace(zenflow.plan(source, **GIVEN), source="") == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 7e9}, "did you mean params="),
        ({"model": "7B"}, "a number of parameters goes into params"),
        ({"params": 7e9, "step_seconds": "0.7"}, "step_seconds must be a number > 0, got '0.7'"),
        ({"params": 7e9, "host_bandwidth": "20Gb/s"}, "8 bits are a byte"),
    ],
)
def test_what_is_probably_meant_is_said(arguments, words):
    with pytest.raises(ValueError, match=words):
        zenflow.plan(**arguments)


def test_without_the_devices_time_the_default_schedule_and_the_formula_are_shown():
    plan = zenflow.plan(params=1e9, **GIVEN)
    assert (plan.update_interval, plan.update_delay, plan.prediction) == (4, 1, None)
    assert "- 1 x forward and backward" in str(plan)


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({"update_delay": 0}, (4, 0)),
        ({"update_delay": 2}, (4, 2)),
        ({"update_delay": 6}, (6, 6)),
        ({"update_interval": 6, "update_delay": "auto"}, (6, 1)),
        ({"max_update_interval": 3}, (3, 1)),
        ({"update_interval": "auto"}, (16, 1)),
    ],
)
def test_without_the_devices_time_what_is_left_open_is_as_near_to_the_default_as_it_can_be(options, schedule):
    plan = zenflow.plan(params=1e9, **options, **GIVEN)
    assert (plan.update_interval, plan.update_delay) == schedule


def test_where_nothing_is_deferred_no_speed_is_measured():
    plan = zenflow.plan(params=1e9, topk_ratio=1.0, step_seconds=1)
    assert (plan.host_bandwidth, plan.host_measured, plan.host_update_seconds) == (None, False, 0)
    assert "none: no column is deferred" in str(plan) and "inf" not in str(plan)
    json.dumps(plan.as_dict(), allow_nan=False)


def test_the_devices_time_comes_from_operations():
    plan = zenflow.plan(params="7B", tflops=100, tokens=4096, **GIVEN)
    assert plan.device_seconds == pytest.approx(6 * 7e9 * 4096 / 100e12)


def test_several_processes_share_the_host():
    alone = zenflow.plan(params=1e9, host_memory="100GB", step_seconds=1, **GIVEN)
    shared = zenflow.plan(params=1e9, host_memory="100GB", step_seconds=1, gpus=4, **GIVEN)
    assert shared.host_memory == alone.host_memory / 4
    assert shared.host_bandwidth == alone.host_bandwidth / 4
    assert "not supported yet" in str(shared) and "not supported yet" not in str(alone)


def test_what_does_not_fit_is_told_with_what_to_change():
    options = {"params": "7B", "step_seconds": 1.0, "update_interval": 4, **GIVEN}
    plan = zenflow.plan(**options, gpu_memory="24GB", host_memory="150GB")
    assert (plan.fits_gpu, plan.fits_host) == (False, True)
    assert plan.host_buffer == "stream"
    assert any("offload_gradients=True" in line for line in plan.advice)
    assert zenflow.plan(**options, gpu_memory="24GB", offload_gradients=True).fits_gpu
    ring = zenflow.plan(**options, host_memory="150GB", host_buffer="ring")
    assert ring.fits_host is False and "DOES NOT FIT in 150 GB" in str(ring)
    assert any('host_buffer="stream"' in line for line in ring.advice)
    assert zenflow.plan(**options, host_memory="200GB").host_buffer == "ring"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "needs a model"),
        ({"params": 7e9, "host_bandwith": 1e9}, TypeError, "did you mean 'host_bandwidth'"),
        ({"params": "7X"}, ValueError, "params must be a number such as 7e9"),
        ({"params": 0}, ValueError, "params must be more than 0"),
        ({"params": 1e9, "gpu_memory": "24 horses"}, ValueError, "gpu_memory must be bytes"),
        ({"params": 1e9, "gpu_memory": "24"}, ValueError, "gpu_memory .* got '24', which lacks its unit"),
        ({"params": 1e9, "host_bandwidth": 100}, ValueError, "host_bandwidth .* got 100, which lacks its unit"),
        ({"params": 1e9, "gpus": 0}, ValueError, "gpus must be an integer >= 1"),
        ({"params": 1e9, "topk_ratio": 2}, ValueError, r"topk_ratio must be in \[0, 1\]"),
        ({"params": 1e9, "step_seconds": -1}, ValueError, "step_seconds must be a number > 0"),
        ({"params": 1e9, "tflops": 10}, ValueError, "tflops and tokens go together"),
        ({"params": 1e9, "dtype": "int8"}, ValueError, "dtype must be one of"),
        ({"params": 1e9, "update_interval": 4, "update_delay": 5}, ValueError, "update_delay must be at most"),
        ({"params": 1e9, "update_delay": 20}, ValueError, "update_delay must be at most max_update_interval"),
        ({"params": 1e9, "update_intervall": 4}, TypeError, "update_intervall"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        zenflow.plan(**GIVEN | options)


# The command


def command(*arguments, check=True):
    done = subprocess.run([sys.executable, "-m", "zenflow", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_the_command_prints_the_plan_and_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = ["--gpu-memory", "24GiB", "--host-bandwidth", "50GB/s", "--step-seconds", "0.5"]
    assert command("plan", "--params", "7B", *options).stdout.startswith("ZenFlow plan\n")
    found = json.loads(command("plan", str(tmp_path), *options, "--update-interval", "2", "--json").stdout)
    plan = zenflow.plan(tmp_path, gpu_memory=24 * 2**30, host_bandwidth=50e9, step_seconds=0.5, update_interval=2)
    assert found == json.loads(json.dumps(plan.as_dict()))
    assert found["update_interval"] == 2 and found["gpu_memory"] == 24 * 2**30


def test_the_command_says_what_is_wrong_without_a_traceback():
    refused = command("plan", "--params", "7X", check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("zenflow: params must be a number such as 7e9")


def test_the_hosts_bandwidth_is_measured_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None; from zenflow.__main__ import main; "
        "main(['plan', '--params', '1B', '--step-seconds', '1'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(measured here)" in done.stdout
