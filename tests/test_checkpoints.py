# SPDX-License-Identifier: Apache-2.0
"""What people do with an optimizer's state: exchange it with AdamW, save it in the background or a hundred times, map
it to a device, and export the fp32 weights. (That a run resumes with the same bits: test_semantics.py.)"""

import copy
import io
import threading

import psutil
import pytest
import safetensors.torch
import torch
from torch import nn

from compare import assert_all_same, assert_same, assert_same_saved, copies, saved_state
from small_parameters import random_parameter, train, zenflow_of
from zenflow import ZenFlowOptimizer

FP32, BF16 = torch.float32, torch.bfloat16
# after 3 steps a window is open, after 4 and 5 its update is in flight, after 5 a new one is open too, 6 publishes
SCHEDULE = {"update_interval": 4, "update_delay": 2, "select_interval": 8, "topk_ratio": 0.3, "lr": 0.01}
KINDS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def pair_of(dtype):
    return [random_parameter(12, 20, dtype=dtype), random_parameter(7, dtype=dtype, seed=1)]


def at_step(steps, dtype=BF16, **changed):
    parameters = pair_of(dtype)
    optimizer = zenflow_of(*parameters, **{**SCHEDULE, **changed})
    train(optimizer, steps)
    return parameters, optimizer


def everything(state_dict):
    """All tensors of a state, and its groups."""
    tensors = {(i, key): value for i, state in state_dict["state"].items() for key, value in state.items()}
    return tensors, state_dict["param_groups"]


def assert_same_state_dict(actual, expected, what):
    (ours, our_groups), (theirs, their_groups) = everything(actual), everything(expected)
    assert ours.keys() == theirs.keys() and our_groups == their_groups, what
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) and ours[name].dtype == value.dtype, f"{what}: {name}"


# Interchange with torch.optim.AdamW


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_adamws_moments_and_steps_are_used(dtype, kind):
    theirs = pair_of(dtype)
    adamw = torch.optim.AdamW(theirs, lr=0.01, **kind)
    train(adamw, 5)
    optimizer = zenflow_of(*copies(theirs), **SCHEDULE)
    optimizer.load_state_dict(adamw.state_dict())
    for p, state in zip(theirs, saved_state(optimizer).values(), strict=True):
        assert state["step"] == 5
        assert_same(state["exp_avg"], adamw.state[p]["exp_avg"].float(), "exp_avg")
        assert_same(state["exp_avg_sq"], adamw.state[p]["exp_avg_sq"].float(), "exp_avg_sq")
        assert_same(state["master"], p.detach().float(), "master")
    train(optimizer, 4, start=5)
    assert all(state["step"] == 9 for state in saved_state(optimizer).values())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [3, 5, 8])
def test_adamw_goes_on_from_our_state_as_from_its_own(steps, dtype, kind):
    """Saved after flush(), so that nothing is missing for it."""
    ours, optimizer = at_step(steps, dtype)
    optimizer.flush()
    saved = optimizer.state_dict()
    plain = {i: {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")} for i, state in saved["state"].items()}
    groups = [{"params": [0, 1], "lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}]
    results = []
    for state_dict in (saved, {"state": plain, "param_groups": groups}):
        theirs = copies(ours)
        adamw = torch.optim.AdamW(theirs, lr=0.01, **kind)
        adamw.load_state_dict(copy.deepcopy(state_dict))
        train(adamw, 4, start=steps)
        results.append(theirs)
    assert_all_same(*results, "after 4 steps")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [3, 5])
def test_what_adamw_carried_along_is_not_taken_for_ours(steps, dtype):
    """torch keeps what it does not know, so an open window or a master of long ago would come back with it."""
    ours, optimizer = at_step(steps, dtype)
    adamw = torch.optim.AdamW(ours, lr=0.01)
    adamw.load_state_dict(optimizer.state_dict())
    train(adamw, 6, start=steps)
    back = zenflow_of(*ours, **SCHEDULE)
    back.load_state_dict(adamw.state_dict())
    weights = copies(ours)
    back.flush()
    assert_all_same(ours, weights, "with nothing open and nothing in flight")
    for p, state in zip(ours, saved_state(back).values(), strict=True):
        assert_same(state["master"], p.detach().float(), "master")
        assert state["step"] == steps + 6 and not state["has_selection"]


def test_a_state_without_some_parameters_loads_as_in_torch():
    """Those begin anew at their next gradient."""
    _, optimizer = at_step(5)
    saved = optimizer.state_dict()
    del saved["state"][0]
    _, other = at_step(2)
    other.load_state_dict(saved)
    assert other.state_dict()["state"].keys() == {1}
    train(other, 1, start=5)
    assert [float(state["step"]) for state in saved_state(other).values()] == [1, 6]


@pytest.mark.parametrize("wrong", ["another number of groups", "another number of parameters"])
def test_groups_that_do_not_match_are_torchs_own_errors_and_change_nothing(wrong):
    _, optimizer = at_step(5)
    before = optimizer.state_dict()
    saved = copy.deepcopy(before)
    if wrong == "another number of groups":
        saved["param_groups"].append(saved["param_groups"][0])
    else:
        saved["param_groups"][0]["params"] = [0]
    messages = []
    for player in (torch.optim.AdamW(pair_of(BF16)), optimizer):
        with pytest.raises(ValueError) as error:
            player.load_state_dict(copy.deepcopy(saved))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert_same_state_dict(optimizer.state_dict(), before, "after a refused load")


# Saving


def test_who_reads_moments_from_the_live_state_is_sent_to_state_dict():
    (p, _), optimizer = at_step(5)
    assert optimizer.state[p]["step"] == 5
    with pytest.raises(AttributeError, match=r"has no 'exp_avg' that could be read .*: take it from .*state_dict\(\)"):
        optimizer.state[p]["exp_avg"].norm()


def test_two_states_taken_one_after_the_other_are_equal():
    for steps in range(10):
        _, optimizer = at_step(steps)
        assert_same_state_dict(optimizer.state_dict(), optimizer.state_dict(), f"after {steps} steps")


@pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
def test_a_state_is_not_changed_by_the_training_that_goes_on(hooks):
    """As an asynchronous saver needs it: the file of a thread that is slow holds the state of its step."""
    parameters, optimizer = at_step(5, offload_gradients=hooks)
    state, weights = optimizer.state_dict(), copies(parameters)
    expected, file, go = copy.deepcopy(state), io.BytesIO(), threading.Event()

    def save():
        go.wait()
        torch.save({"optimizer": state, "weights": weights}, file)

    saver = threading.Thread(target=save)
    saver.start()
    train(optimizer, 4, start=5)
    go.set()
    train(optimizer, 8, start=9)
    saver.join()
    file.seek(0)
    assert_same_state_dict(torch.load(file, weights_only=True)["optimizer"], expected, "in the file")


def test_a_learning_rate_tensor_in_a_state_does_not_follow_the_scheduler():
    lr = torch.tensor(0.5)
    parameters = pair_of(BF16)
    groups = [{"params": [parameters[0]], "lr": lr}, {"params": [parameters[1]], "lr": lr}]
    optimizer = ZenFlowOptimizer(groups, min_offload_numel=0)
    saved = optimizer.state_dict()["param_groups"]
    lr.fill_(0.25)
    assert [group["lr"].item() for group in saved] == [0.5, 0.5]
    assert saved[0]["lr"] is saved[1]["lr"], "as the optimizer's groups share it"


def test_a_loaded_state_may_be_changed_afterwards():
    parameters, optimizer = at_step(5)
    state = optimizer.state_dict()
    twin = copies(parameters)
    resumed = zenflow_of(*twin, **SCHEDULE)
    resumed.load_state_dict(state)
    for tensor in everything(state)[0].values():
        tensor.zero_()
    train(optimizer, 8, start=5)
    train(resumed, 8, start=5)
    assert_all_same(twin, parameters, "weights")


def test_host_memory_does_not_grow_over_100_saves_and_loads():
    p = random_parameter(512, 512)  # 4 MB of state
    optimizer = zenflow_of(p, **SCHEDULE)
    train(optimizer, 5)

    def save_and_load(times):
        for _ in range(times):
            optimizer.load_state_dict(optimizer.state_dict())
        return psutil.Process().memory_info().rss, optimizer.stats().host_bytes

    before, held = save_and_load(10)
    after, still_held = save_and_load(100)
    assert still_held == held
    assert after - before < 40e6, f"{(after - before) / 1e6:.0f} MB more; a state that stays each time would be 400"


def test_a_file_is_about_as_large_as_the_state():
    p = random_parameter(256, 300)
    optimizer = zenflow_of(p, **SCHEDULE)
    train(optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    # two moments, master, and what the parameter holds and will hold: 4 bytes each
    assert file.tell() < 1.05 * 5 * 4 * p.numel()


@pytest.mark.parametrize(
    "map_location",
    ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, _: storage],
    ids=["string", "device", "dict", "function"],
)
def test_a_file_loads_with_weights_only_and_any_map_location(tmp_path, map_location):
    parameters, optimizer = at_step(5)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twin = copies(parameters)
    resumed = zenflow_of(*twin, **SCHEDULE)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, map_location=map_location))
    assert_same_saved(resumed, optimizer, "loaded")
    train(optimizer, 8, start=5)
    train(resumed, 8, start=5)
    assert_all_same(twin, parameters, "weights")


# Masters


class Net(nn.Module):
    """Tied, frozen, small and large parameters, and a buffer."""

    def __init__(self, dtype=BF16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.norm, self.frozen = nn.BatchNorm1d(16), nn.Linear(3, 3)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad]


NAMES = ["embedding.weight", "head.bias", "norm.weight", "norm.bias", "frozen.weight", "frozen.bias"]


@pytest.mark.parametrize("steps", range(8))
def test_master_weights_are_the_settled_fp32_weights_at_any_step(steps):
    net = Net()
    optimizer = zenflow_of(*net.trained(), **SCHEDULE)
    train(optimizer, steps)
    weights = optimizer.master_weights(net)
    assert sorted(weights) == sorted(NAMES)
    assert all(w.dtype == FP32 and w.is_cpu and w.is_contiguous() for w in weights.values())
    with optimizer.settled():
        for name, p in net.named_parameters():
            assert_same(weights[name].to(BF16), p, name)
    for p, state in zip(net.trained(), saved_state(optimizer).values(), strict=False):
        name = next(name for name, q in net.named_parameters() if q is p)
        assert_same(weights[name], state["master"], name)
    if steps > 0:
        assert any((w != w.to(BF16).float()).any() for w in weights.values()), "no more than the model's own bits"


def test_master_weights_change_nothing_and_share_no_memory():
    nets = Net(), Net()
    optimizers = [zenflow_of(*net.trained(), **SCHEDULE) for net in nets]
    for step in range(12):
        for optimizer in optimizers:
            train(optimizer, 1, step)
        for tensor in optimizers[0].master_weights(nets[0]).values():
            tensor.zero_()
        assert_all_same(list(nets[0].parameters()), list(nets[1].parameters()), f"step {step + 1}")
    assert_same_saved(*optimizers, "state")


def test_master_weights_hold_the_update_in_flight_and_after_flush_the_open_window():
    p = nn.Parameter(torch.zeros(2, 3))
    moves = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}  # each gradient moves by 1
    optimizer = ZenFlowOptimizer([("w", p)], min_offload_numel=0, **{**SCHEDULE, **moves, "topk_ratio": 0.0})
    for _ in range(5):
        p.grad = torch.ones(2, 3)
        optimizer.step()
    assert (p == 0).all()
    assert (optimizer.master_weights()["w"] == -4).all()
    optimizer.flush()
    assert (optimizer.master_weights()["w"] == -5).all()


def test_master_weights_go_through_safetensors_and_load_into_an_fp32_model(tmp_path):
    net = Net()
    optimizer = zenflow_of(*net.trained(), **SCHEDULE)
    train(optimizer, 6)
    weights = optimizer.master_weights(net)
    safetensors.torch.save_file(weights, tmp_path / "masters.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "masters.safetensors")
    fp32 = Net(FP32)
    missing, unexpected = fp32.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert set(missing) == {"head.weight", "norm.running_mean", "norm.running_var"}
    for name, p in fp32.named_parameters():
        assert_same(p, weights[name], name)


def test_master_weights_follow_an_edit():
    net = Net()
    optimizer = zenflow_of(*net.trained(), **SCHEDULE)
    train(optimizer, 5)
    net.embedding.weight.data[3] = 0.5
    assert (optimizer.master_weights(net)["embedding.weight"][3] == 0.5).all()


def test_master_weights_need_names():
    net = Net()
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    with_names, without = zenflow_of(*named, **SCHEDULE), zenflow_of(*net.trained(), **SCHEDULE)
    assert list(with_names.master_weights()) == [name for name, _ in named]
    with pytest.raises(ValueError, match=r"does not know its parameters' names: pass the model"):
        without.master_weights()
    with pytest.raises(ValueError, match="none of this model's parameters"):
        without.master_weights(Net())
    with pytest.raises(TypeError, match="takes the model itself, got OrderedDict"):
        without.master_weights(net.state_dict())


def test_master_weights_of_what_is_not_trained_are_its_own_in_fp32():
    net = Net()
    net.register_parameter("codes", nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False))
    optimizer = zenflow_of(*net.trained(), **SCHEDULE)
    train(optimizer, 5)
    weights = optimizer.master_weights(net)
    assert_same(weights["frozen.weight"], net.frozen.weight.float(), "frozen")
    assert weights["codes"].dtype == torch.uint8
    assert weights["codes"].data_ptr() != net.codes.data_ptr()
