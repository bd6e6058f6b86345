# SPDX-License-Identifier: Apache-2.0
"""What is refused, in which words, and that nothing has changed then; and how others' states load."""

import copy
import gc
import io
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn

import zenflow
from compare import assert_all_same, assert_same
from zenflow import _C, ZenFlowOptimizer


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 40), (7,), (6, 5, 8))]


def train(optimizer, steps, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


SMALL = {"min_offload_numel": 0, "lr": 1e-2, "num_threads": 1}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
        ({"topk_ratio": 1.5}, r"topk_ratio must be in \[0, 1\], got 1.5"),
        ({"update_interval": 0}, "update_interval must be an integer >= 1, got 0"),
        ({"update_interval": 2.5}, "update_interval must be an integer >= 1, got 2.5"),
        ({"update_delay": 5}, "update_delay=5 with update_interval=4"),
        ({"select_interval": 6}, "select_interval=6 with update_interval=4"),
        ({"deferred_rule": "sum"}, "deferred_rule must be one of 'adamw', 'mean', got 'sum'"),
        ({"host_buffer": "disk"}, "host_buffer must be one of 'auto', 'ring', 'stream'"),
        ({"lookahead": -1}, "lookahead must be .* >= 0, got -1"),
        ({"full_warm_up_rounds": -1}, "full_warm_up_rounds must be an integer >= 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be None or a number > 0"),
        ({"min_offload_numel": -1}, "min_offload_numel must be an integer >= 0"),
        ({"num_threads": 0}, "num_threads must be an integer >= 1"),
        ({"pt_reserved_cores_perc": 2}, r"pt_reserved_cores_perc must be in \[0, 1\], got 2"),
        ({"maximize": 1}, "maximize must be True or False"),
        ({"amsgrad": True}, "amsgrad=True is not supported: .*torch.optim.AdamW"),
        ({"capturable": True}, "capturable=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
        ({"foreach": True}, "foreach=True is not supported: .* leave it out"),
        ({"fused": True}, "fused=True is not supported: .* leave it out"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_value_and_range(setting, words):
    with pytest.raises(ValueError, match=words):
        ZenFlowOptimizer(parameters(), **setting)


def test_an_unknown_setting_is_a_type_error_as_for_any_function():
    with pytest.raises(TypeError, match=r"'correct_bias'; help\(zenflow.ZenFlowOptimizer\) lists all$"):
        ZenFlowOptimizer(parameters(), correct_bias=True)
    with pytest.raises(TypeError, match="'learning_rate'; did you mean 'lr'"):
        ZenFlowOptimizer(parameters(), learning_rate=1e-3)
    with pytest.raises(TypeError, match="'topk_ration'; did you mean 'topk_ratio'"):
        ZenFlowOptimizer(parameters(), topk_ration=0.2)


def test_a_model_or_a_models_state_in_the_wrong_place_is_named():
    with pytest.raises(TypeError, match=r"pass model.parameters\(\)"):
        ZenFlowOptimizer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="is it the model's"):
        ZenFlowOptimizer(parameters()).load_state_dict(nn.Linear(2, 2).state_dict())


def test_a_whole_checkpoint_in_the_place_of_the_optimizers_state_is_told_which_part_to_give():
    optimizer = ZenFlowOptimizer(parameters())
    checkpoint = {"model": nn.Linear(2, 2).state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(ValueError, match=r"the optimizer's part of a checkpoint"):
        optimizer.load_state_dict(checkpoint)


def test_a_setting_of_the_whole_optimizer_is_refused_in_a_group():
    with pytest.raises(ValueError, match="update_interval is one for the whole optimizer"):
        ZenFlowOptimizer([{"params": parameters(), "update_interval": 8}])


def test_what_adamw_does_not_ask_for_may_be_passed_as_off():
    ZenFlowOptimizer(parameters(), amsgrad=False, foreach=None, fused=None, capturable=False)


def test_a_likely_typo_in_a_group_is_named_and_the_users_own_keys_are_not():
    with pytest.warns(UserWarning, match="nothing reads 'topk_ration' of a parameter group: did you mean 'topk_ratio'"):
        ZenFlowOptimizer([{"params": parameters(), "topk_ration": 0.2}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZenFlowOptimizer([{"params": parameters(), "initial_lr": 1.0, "name": "decoder", "lr_scale": 2, 3: 4}])


def test_a_bad_group_is_not_added():
    optimizer = ZenFlowOptimizer(parameters())
    for group, words in (({"topk_ratio": 2}, "topk_ratio"), ({"amsgrad": True}, "amsgrad"), ({"split": "no"}, "split")):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": parameters(), **group})
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 has dtype torch.float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def sparse_gradient(p):
    p.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], p.shape, check_invariants=True)


def reshaped(p):
    p.data = p.data[:3].clone()
    p.grad = torch.zeros_like(p)


def negated_view(p):
    p.grad = torch._neg_view(torch.ones_like(p))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (negated_view, r"weight has a gradient that is a negated view: assign gradient.resolve_neg\(\)"),
        (sparse_gradient, "weight has a sparse gradient .*SparseAdam"),
        (reshaped, r"weight had shape \(24, 40\) .* now has \(3, 40\)"),
    ],
)
def test_what_a_step_cannot_use_is_refused_before_anything_changes(spoil, words):
    bad, good, _ = parameters()
    optimizer = ZenFlowOptimizer([("bias", good), ("weight", bad)], **SMALL)
    train(optimizer, 6)
    weight, steps = good.detach().clone(), optimizer.stats().total.steps
    good.grad = torch.ones_like(good)
    spoil(bad)
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert_same(good, weight, "the other parameter")
    assert optimizer.stats().total.steps == steps


def test_a_meta_tensor_is_refused_before_anything_changes():
    good, bad = parameters()[1], nn.Parameter(torch.zeros(3, 4, device="meta"))
    optimizer = ZenFlowOptimizer([good, bad], **SMALL)
    good.grad, bad.grad = torch.ones_like(good), torch.zeros_like(bad)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0 is a meta tensor .* materialise"):
        optimizer.step()
    assert_same(good, parameters()[1], "the other parameter")
    assert not optimizer.state


def test_complex_parameters_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="view_as_real"):
        ZenFlowOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_a_parameter_whose_elements_share_memory_is_refused():
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is an expanded or negated view, .* clone\(\) it"):
        ZenFlowOptimizer([nn.Parameter(torch.zeros(1, 6).expand(4, 6))])


@pytest.mark.parametrize("of", ["parameter", "gradient"])
def test_a_tensor_without_memory_is_refused_before_anything_changes(of):
    bad, good, _ = parameters()
    optimizer = ZenFlowOptimizer([good, bad], **SMALL)
    train(optimizer, 5)
    before = good.detach().clone()
    (bad if of == "parameter" else bad.grad).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"of shape \(24, 40\) has no memory of its own: .* storage was freed"):
        optimizer.step()
    assert_same(good, before, "the other parameter")


def test_a_lazy_module_is_optimized_after_its_first_forward():
    net = nn.LazyLinear(3)
    optimizer = ZenFlowOptimizer(net.parameters(), **SMALL)
    net(torch.ones(2, 5)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert (net.weight != before).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_does_not_follow_torchs_default_dtype_and_device(dtype):
    optimizer = ZenFlowOptimizer(parameters()[1:2], lr=1e-3)
    torch.set_default_dtype(dtype)
    try:
        for step in range(259):
            optimizer.param_groups[0]["params"][0].grad = torch.full((7,), step / 8, dtype=torch.float32)
            optimizer.step()
        with torch.device("meta"):
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    finally:
        torch.set_default_dtype(torch.float32)
    for state in (saved["state"][0], *optimizer.state.values()):
        assert (float(state["step"]), state["step"].dtype) == (259, torch.float32)


def test_skip_nonfinite_skips_the_whole_step_and_counts_it():
    ours, twin = parameters(), parameters()
    optimizer = ZenFlowOptimizer(ours, skip_nonfinite=True, **SMALL)
    reference = ZenFlowOptimizer(twin, **SMALL)
    for start in (0, 3, 6):
        train(optimizer, 3, start)
        train(reference, 3, start)
        before = copy.deepcopy(ours)
        ours[0].grad[2, 3] = float("nan")
        optimizer.step()
        assert_all_same(ours, before, "after a skipped step")
    assert_all_same(ours, twin, "beside a run without the bad gradients")
    assert optimizer.stats().skipped_steps == 3
    assert optimizer.stats().total.steps == 9


def test_adamws_checkpoint_loads_and_goes_on_as_adamw():
    theirs = parameters()
    adamw = torch.optim.AdamW(theirs, lr=1e-2)
    train(adamw, 5)
    ours = copy.deepcopy(theirs)
    optimizer = ZenFlowOptimizer(ours, update_interval=1, update_delay=0, **SMALL)
    optimizer.load_state_dict(adamw.state_dict())
    for step in range(5, 15):
        train(adamw, 1, step)
        train(optimizer, 1, step)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=(step - 4) * 8 * 2**-24 * (4 + 1e-2))
    assert all(float(state["step"]) == 15 for state in optimizer.state.values())


@pytest.mark.parametrize("steps", [6, 8, 9])
def test_adamw_goes_on_from_our_flushed_checkpoint(steps):
    ours = parameters()
    optimizer = ZenFlowOptimizer(ours, **SMALL)
    train(optimizer, steps)
    optimizer.flush()
    theirs = copy.deepcopy(ours)
    adamw = torch.optim.AdamW(theirs, lr=1e-2)
    adamw.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()["state"]
    for i, p in enumerate(theirs):
        assert_same(adamw.state[p]["exp_avg"], saved[i]["exp_avg"], "exp_avg")
        assert_same(adamw.state[p]["exp_avg_sq"], saved[i]["exp_avg_sq"], "exp_avg_sq")
        assert adamw.state[p]["step"] == steps
    train(adamw, 3, steps)


@pytest.mark.parametrize(
    "other",
    [
        {"update_interval": 2},
        {"deferred_rule": "mean"},
        {"topk_ratio": 0.5},
        {"min_offload_numel": 500},
        {"update_interval": 6, "update_delay": 3},
    ],
)
@pytest.mark.parametrize("steps", [8, 9, 10])
def test_under_another_schedule_a_checkpoints_window_closes_first(other, steps):
    """As flush() under the old schedule, then training under the new one from the same state."""
    base = {"topk_ratio": 0.2, **SMALL}
    ours = parameters()
    optimizer = ZenFlowOptimizer(ours, **base)
    train(optimizer, steps)
    saved, twin = optimizer.state_dict(), copy.deepcopy(ours)
    optimizer.flush()

    loaded = ZenFlowOptimizer(twin, **{**base, **other})
    loaded.load_state_dict(saved)
    assert_all_same([q.detach() for q in twin], [p.detach() for p in twin], "loading writes no weight")
    loaded.synchronize()
    assert_all_same(twin, ours, "after the window has closed")
    masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    assert_all_same([state["master"] for state in loaded.state_dict()["state"].values()], masters, "masters")
    train(loaded, 10, steps)
    assert loaded.param_groups[0]["topk_ratio"] == {**base, **other}["topk_ratio"]


def test_a_ratio_set_out_of_range_between_steps_is_refused():
    optimizer = ZenFlowOptimizer(parameters(), **SMALL)
    train(optimizer, 2)
    for ratio in (2.0, -1, float("nan"), "much"):
        optimizer.param_groups[0]["topk_ratio"] = ratio
        with pytest.raises(ValueError, match="topk_ratio must be in"):
            optimizer.step()
    assert optimizer.stats().total.steps == 2


def test_a_checkpoint_with_amsgrad_is_refused():
    adamw = torch.optim.AdamW(parameters(), amsgrad=True)
    train(adamw, 1)
    with pytest.raises(ValueError, match="amsgrad=True"):
        ZenFlowOptimizer(parameters()).load_state_dict(adamw.state_dict())


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    ours = parameters()
    optimizer = ZenFlowOptimizer(ours, **SMALL)
    train(optimizer, 6)
    before = optimizer.state_dict()
    wrong_shape = copy.deepcopy(before)
    wrong_shape["state"][0]["exp_avg"] = torch.zeros(3, 3)
    no_moments = copy.deepcopy(before)
    del no_moments["state"][0]["exp_avg_sq"]
    wrong_columns = copy.deepcopy(before)
    wrong_columns["state"][0]["selected"] = torch.ones(3, dtype=torch.bool)
    fewer = {**before, "param_groups": [{**before["param_groups"][0], "params": [0]}]}
    wrong = ((wrong_shape, ValueError), (no_moments, ValueError), (wrong_columns, ValueError), (fewer, ValueError))
    for state_dict, error in wrong:
        with pytest.raises(error):
            optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    for i, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(after["state"][i][key], value), key
    train(optimizer, 3, 6)


def test_a_checkpoint_loads_with_weights_only():
    optimizer = ZenFlowOptimizer(parameters(), update_interval=numpy.int64(3), update_delay=numpy.int64(1), **SMALL)
    train(optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    ZenFlowOptimizer(parameters(), **SMALL).load_state_dict(torch.load(file, weights_only=True))


def test_hooks_see_steps_and_states():
    optimizer, seen = ZenFlowOptimizer(parameters(), **SMALL), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before step", "after step", 3, "before load", "after load"]


def test_a_hook_may_flush_before_the_state_is_read():
    optimizer = ZenFlowOptimizer(parameters(), **SMALL)
    optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.flush())
    train(optimizer, 6)
    saved = optimizer.state_dict()["state"]
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        assert_same(saved[i]["last_written"], p, "what the parameter holds")
        assert_same(saved[i]["master"], p, "master")


def test_a_compiled_training_step_trains_as_an_eager_one():
    def network():
        torch.manual_seed(0)
        net = nn.Linear(5, 8)
        optimizer = ZenFlowOptimizer(net.parameters(), **SMALL)

        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(2, 5)).square().sum()
            loss.backward()
            return loss

        return net, optimizer, closure

    net, optimizer, closure = network()
    twin, eager, eager_closure = network()
    for _ in range(6):
        torch.compile(lambda: optimizer.step(closure), backend="eager")()
        eager.step(eager_closure)
        assert_same(net.weight, twin.weight, "weight")
    assert optimizer.stats().total.steps == 6


def test_a_scheduler_drives_the_learning_rate():
    optimizer = ZenFlowOptimizer(parameters(), **SMALL)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    train(optimizer, 1)
    scheduler.step()
    optimizer.synchronize()
    weights = copy.deepcopy(optimizer.param_groups[0]["params"])
    train(optimizer, 2, 1)
    assert_same(optimizer.param_groups[0]["params"][1], weights[1], "at learning rate 0")


def test_the_version_counter_tells_of_our_writes():
    p = parameters()[0]
    optimizer = ZenFlowOptimizer([p], **SMALL)
    version = p._version
    train(optimizer, 1)
    assert p._version > version


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, ZenFlowOptimizer])
def test_a_parameter_that_no_call_has_written_can_still_go_backward(optimizer_class):
    """As for two networks under one optimizer: a step for one lies between the other's forward and backward."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = optimizer_class([*one.parameters(), *other.parameters()])
    for _ in range(6):
        one(other(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = one(torch.relu(one(torch.ones(2, 4)))).sum()
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if optimizer_class is ZenFlowOptimizer:
            with optimizer.settled():
                optimizer.state_dict()
            optimizer.synchronize()
        loss.backward()
        optimizer.zero_grad()


def test_a_dropped_optimizer_frees_its_memory_at_once():
    held = _C.host_bytes_held()
    optimizer = ZenFlowOptimizer(parameters(), **SMALL)
    train(optimizer, 5)
    assert _C.host_bytes_held() > held
    gone = weakref.ref(optimizer)
    gc.disable()  # no cycle that a collection would have to find
    try:
        del optimizer
        assert gone() is None
        assert _C.host_bytes_held() == held
    finally:
        gc.enable()


def test_stats_count_what_moves():
    ratio, rows, columns = 0.1, 24, 40
    optimizer = ZenFlowOptimizer([parameters()[0]], topk_ratio=ratio, **SMALL)
    assert optimizer.stats() == ZenFlowOptimizer(parameters(), **SMALL).stats()
    train(optimizer, 9)
    stats = optimizer.stats()
    deferred = rows * (columns - 4)
    assert stats.total.steps == 9
    assert stats.total.d2h_bytes == 9 * deferred * 4
    assert stats.total.h2d_bytes == 2 * deferred * 4
    assert stats.total.handover_bytes == 0
    assert stats.last_window.steps == 4
    assert stats.host_buffer == "ring"
    assert stats.host_bytes == deferred * 40
    assert stats.device_bytes == rows * 4 * 12
    assert (stats.parameters, stats.split_parameters) == (1, 1)
    assert stats.total.host_update_seconds > 0


def test_config_reports_what_runs():
    config = zenflow.config()
    assert config.isa in config.isa_available
    assert config.threads >= 1
