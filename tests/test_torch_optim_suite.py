# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's own suite asks of torch.optim.AdamW, asked of ZenFlowOptimizer.

First AdamW's inputs and error inputs (tests/torch_suite.py), then the generic cases of PyTorch's test_optim.py, each
in our own words. Parameters are tiny, so all are split (`min_offload_numel=0`). Cases that compare with AdamW run under
the synchronous schedule; the others under a window of four steps too.

Of test_optim.py these do not apply:
- foreach, fused (matches_forloop, peak_memory, large_tensor, error_on_params_on_meta, found_inf, defaults_changed_to
  and set_default_dtype with foreach): there is one implementation; both flags are refused by name.
- capturable, and step in a CUDA graph: refused by name; a step is partly the host's (tests/gpu has the capture).
- differentiable: refused by name; the step has no autograd.
- complex, complex_2d: such parameters are refused.
- rosenbrock_sparse: sparse gradients are refused (tests/test_interface.py), as by AdamW.
- second_order_optims: for LBFGS. optim_infos_do_not_specify: checks PyTorch's database.
- multigpu, cuda_params, cpu_load_state_dict, fused_cpu_matches_cuda: tests/gpu.
- grad_scaling_autocast: tests/test_grad_scaler.py.
"""

import copy
import io
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torch_suite
from compare import assert_all_same, assert_same
from zenflow import ZenFlowOptimizer

NAMES = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(torch.__version__ < (2, 6), reason="torch < 2.6 takes no names")),
]
SYNCHRONOUS = {"min_offload_numel": 0, "update_interval": 1, "update_delay": 0, "num_threads": 1}
WINDOWS = {"min_offload_numel": 0, "update_interval": 4, "topk_ratio": 0.3, "num_threads": 1}
any_schedule = pytest.mark.parametrize("schedule", [SYNCHRONOUS, WINDOWS], ids=["synchronous", "windows"])

# By the option that makes an input one of those that do not apply.
REFUSED = {
    "amsgrad": "its maximum needs a fourth array; refused by name",
    "capturable": "a step with host work cannot be captured; refused by name",
}
# By PyTorch's description: AdamW refuses these, and what becomes of them here.
OTHER_ERRORS = {
    "lr as Tensor doesn't work with foreach & not capturable": "foreach=True is not supported",  # with any lr
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "foreach=True is not supported",
    "betas must be either both floats or both Tensors": None,  # each counts by its value: no reason to refuse them
}


def inputs():
    """Those of AdamW's inputs that apply."""
    kept = [(text, settings) for text, settings in torch_suite.inputs()[0] if not REFUSED.keys() & settings.keys()]
    assert len(kept) >= 4
    return copy.deepcopy(kept)


class Problem:
    """(weight @ x + bias)^2, with new parameters from a seed."""

    def __init__(self, contiguous=True, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            values = torch.randn((*shape, 2), generator=generator).to(dtype)[..., 0]
            return values.contiguous() if contiguous else values

        self.weight, self.bias, self.x = nn.Parameter(draw(10, 5)), nn.Parameter(draw(10)), draw(5)
        assert self.weight.is_contiguous() == contiguous
        self.parameters = [self.weight, self.bias]

    def loss(self):
        return (self.weight.mv(self.x) + self.bias).square().sum()

    def closure(self, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def train(self, optimizer, steps, schedulers=()):
        for _ in range(steps):
            loss = optimizer.step(self.closure(optimizer))
            for scheduler in schedulers:
                plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss.item()) if plateau else scheduler.step()


def assert_as_adamw(problem, twin, what):
    for p, q in zip(problem.parameters, twin.parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


def assert_goes_right(problem, before, settings, what):
    up = settings.get("maximize", False)
    after = problem.loss().item()
    assert (after > before) if up else (after < before), f"{what}: {before} -> {after}"


def assert_equal_state_dicts(actual, expected):
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0)
    assert actual["param_groups"] == expected["param_groups"]


# AdamW's inputs


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_input_trains_as_adamw(contiguous):
    for what, settings in inputs():
        problem, twin = Problem(contiguous), Problem(contiguous)
        optimizer = ZenFlowOptimizer(problem.parameters, **settings, **SYNCHRONOUS)
        adamw = torch.optim.AdamW(twin.parameters, **settings, foreach=False)
        before = problem.loss().item()
        for step in range(20):
            problem.train(optimizer, 1)
            twin.train(adamw, 1)
            assert_as_adamw(problem, twin, f"{what}, step {step + 1}")
        assert_goes_right(problem, before, settings, what)


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_input_goes_in_the_right_direction_in_windows(contiguous):
    for what, settings in inputs():
        problem = Problem(contiguous)
        optimizer = ZenFlowOptimizer(problem.parameters, **settings, **WINDOWS)
        before = problem.loss().item()
        problem.train(optimizer, 20)
        optimizer.flush()
        assert_goes_right(problem, before, settings, what)


def test_every_input_that_does_not_apply_is_refused_by_name():
    on_cpu, on_gpu, _ = torch_suite.inputs()
    others = [(text, settings) for text, settings in [*on_cpu, *on_gpu] if REFUSED.keys() & settings.keys()]
    assert {option for _, settings in others for option in REFUSED.keys() & settings.keys()} == REFUSED.keys()
    for what, settings in others:
        with pytest.raises(ValueError) as raised:
            ZenFlowOptimizer(Problem().parameters, **settings)
        assert re.match(r"(amsgrad|capturable)=True is not supported: ", str(raised.value)), what


@pytest.mark.parametrize("option", ["foreach", "fused", "differentiable", "capturable", "amsgrad"])
def test_options_of_other_implementations_are_refused_unless_they_are_off(option):
    with pytest.raises(ValueError, match=f"{option}=True is not supported"):
        ZenFlowOptimizer(Problem().parameters, **{option: True})
    with pytest.raises(ValueError, match=f"{option}=True is not supported"):
        ZenFlowOptimizer([{"params": Problem().parameters, option: True}])
    ZenFlowOptimizer(Problem().parameters, **{option: False})


def test_every_error_input_is_refused_in_torchs_words_or_listed():
    unlisted = set(OTHER_ERRORS)
    for what, parameters, settings, error, words in torch_suite.inputs()[2]:
        parameters = Problem().parameters if parameters is None else parameters
        if what in OTHER_ERRORS:
            unlisted.discard(what)
            words = OTHER_ERRORS[what]
            if words is None:
                ZenFlowOptimizer(parameters, **settings)
                continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(error) as raised:
                ZenFlowOptimizer(parameters, **settings)
        assert re.search(words, str(raised.value)), what
    assert not unlisted or torch.__version__ < (2, 7), unlisted


def test_what_is_no_list_of_leaf_tensors_is_refused_as_by_torch():
    leaf = nn.Parameter(torch.ones(2, 3))
    wrong = [
        [],
        {"params": [leaf]},
        "weights",
        [leaf, 3.0],
        [leaf * 2],
        [{"params": {leaf}}],
        [{"lr": 0.1}],
        [{"params": [leaf]}, [leaf]],
    ]
    for parameters in wrong:
        raised = []
        for optimizer_class in (torch.optim.AdamW, ZenFlowOptimizer):
            with pytest.raises(Exception) as error:
                optimizer_class(parameters)
            raised.append((type(error.value), str(error.value)))
        assert raised[0] == raised[1], parameters


def test_betas_count_by_value_whether_numbers_or_tensors():
    weights = []
    for betas in ((0.5, 0.75), (torch.tensor(0.5), 0.75), (torch.tensor([[0.5]]), torch.tensor(0.75))):
        problem = Problem()
        problem.train(ZenFlowOptimizer(problem.parameters, betas=betas, **WINDOWS), 10)
        weights.append(problem.parameters)
    for others in weights[1:]:
        assert_all_same(others, weights[0], "beside numbers")


# Groups and learning rates


@any_schedule
def test_a_group_without_weight_decay_beside_one_with_it(schedule):
    for what, settings in inputs():
        problem = Problem()
        groups = [{"params": [problem.weight], **settings}, {"params": [problem.bias], **settings, "weight_decay": 0.0}]
        before = problem.loss().item()
        problem.train(ZenFlowOptimizer(groups, **schedule), 20)
        assert_goes_right(problem, before, settings, what)


@any_schedule
def test_a_group_with_a_vanishing_learning_rate_stays_where_it_is(schedule):
    for what, settings in inputs():
        problem = Problem()
        still, twin = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        with torch.no_grad():
            twin.copy_(still)
        groups = [{"params": problem.parameters, "lr": 1e-3, **settings}, {"params": [still]}]
        optimizer = ZenFlowOptimizer(groups, lr=1e-28, **schedule)
        before = problem.loss().item()
        for _ in range(20):
            still.grad = torch.rand_like(still)
            problem.closure(optimizer)()
            still.grad = torch.rand_like(still)
            optimizer.step()
        assert_goes_right(problem, before, settings, what)
        assert_same(still, twin, what)


@any_schedule
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_tensor_is_its_value(schedule, shape):
    for what, settings in inputs():
        weights = []
        for lr in (1e-3, torch.full(shape, 1e-3)):
            problem = Problem()
            optimizer = ZenFlowOptimizer(problem.parameters, **{**settings, "lr": lr}, **schedule)
            problem.train(optimizer, 9)
            assert optimizer.param_groups[0]["lr"] is lr
            weights.append(problem.parameters)
        # 1e-3 is none of fp32's numbers, so the tensor's is another
        for p, q in zip(*weights, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=lambda text, what=what: f"{what}: {text}")


SCHEDULERS = {
    "exponential": [lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.9)],
    "linear": [lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.4, total_iters=4)],
    "polynomial": [lambda optimizer: lr_scheduler.PolynomialLR(optimizer, power=0.9, total_iters=4)],
    "two": [
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=0.4, total_iters=4),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    ],
    "step and plateau": [
        lambda optimizer: lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    ],
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_drive_groups_as_they_drive_adamws(name, tensor_lr):
    for what, settings in inputs():
        trained = []
        for make in (lambda groups: ZenFlowOptimizer(groups, **SYNCHRONOUS), torch.optim.AdamW):
            problem = Problem()
            lr = torch.tensor(0.01) if tensor_lr else 0.01
            groups = [{"params": [problem.weight], **settings}, {"params": [problem.bias], **settings, "lr": lr}]
            optimizer = make(groups)
            before = problem.loss().item()
            problem.train(optimizer, 20, [schedule(optimizer) for schedule in SCHEDULERS[name]])
            assert_goes_right(problem, before, settings, what)
            trained.append((problem, [float(group["lr"]) for group in optimizer.param_groups]))
        (ours, our_lr), (theirs, their_lr) = trained
        assert our_lr == their_lr
        assert_as_adamw(ours, theirs, what)


# Steps that have nothing to do


@any_schedule
def test_a_step_without_gradients_changes_nothing_and_returns_the_closures_value(schedule):
    for _, settings in inputs():
        tensors = [torch.randn(2, 3) for _ in range(2)]  # no nn.Parameter, no requires_grad
        before = copy.deepcopy(tensors)
        optimizer = ZenFlowOptimizer(tensors, **settings, **schedule)
        for _ in range(5):
            assert optimizer.step(lambda: torch.tensor([1.0])).item() == 1
        optimizer.flush()
        assert_all_same(tensors, before, "tensors")


@any_schedule
@pytest.mark.parametrize("shape", [(5, 1), (3, 4), (0,), (0, 4), (4, 0)])
def test_zero_and_empty_gradients_without_decay_change_nothing(schedule, shape):
    for what, settings in inputs():
        p = nn.Parameter(torch.randn(shape))
        before = p.detach().clone()
        optimizer = ZenFlowOptimizer([p], **{**settings, "weight_decay": 0.0}, **schedule)
        for _ in range(9):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        optimizer.flush()
        assert_same(p, before, what)


# Types


@any_schedule
@pytest.mark.parametrize("contiguous", [True, False])
def test_parameters_of_all_dtypes_train_together(schedule, contiguous):
    """As each would alone, so that no dtype leaks into another."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    together, alone = ([Problem(contiguous, dtype, seed) for seed, dtype in enumerate(dtypes)] for _ in range(2))
    optimizer = ZenFlowOptimizer([p for problem in together for p in problem.parameters], lr=1e-2, **schedule)
    others = [ZenFlowOptimizer(problem.parameters, lr=1e-2, **schedule) for problem in alone]
    before = [problem.loss().item() for problem in together]
    for _ in range(12):
        optimizer.zero_grad()
        for problem in together:
            problem.loss().backward()
        optimizer.step()
        for problem, other in zip(alone, others, strict=True):
            problem.train(other, 1)
    for problem, twin, loss in zip(together, alone, before, strict=True):
        assert_all_same(problem.parameters, twin.parameters, problem.weight.dtype)
        assert_goes_right(problem, loss, {}, problem.weight.dtype)


def test_complex_parameters_are_refused_at_construction_and_in_a_later_group():
    p = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"complex .*view_as_real"):
        ZenFlowOptimizer([p])
    optimizer = ZenFlowOptimizer(Problem().parameters)
    with pytest.raises(ValueError, match=r"complex .*view_as_real"):
        optimizer.add_param_group({"params": [p]})
    real = torch.view_as_real(p.detach()).requires_grad_()
    optimizer = ZenFlowOptimizer([real], **SYNCHRONOUS)
    before = p.detach().clone()
    real.square().sum().backward()
    optimizer.step()
    assert (p != before).all()


# State dicts


@any_schedule
@pytest.mark.parametrize("saved_named", NAMES)
@pytest.mark.parametrize("loaded_named", NAMES)
def test_a_loaded_state_dict_trains_and_saves_alike(schedule, saved_named, loaded_named):
    def named(parameters, wanted):
        return [(f"name{i}", p) for i, p in enumerate(parameters)] if wanted else parameters

    def saved(optimizer):
        state_dict = optimizer.state_dict()
        for group in state_dict["param_groups"]:
            group.pop("param_names", None)
        return state_dict

    for what, settings in inputs():
        problem, twin = Problem(), Problem()
        optimizer = ZenFlowOptimizer(named(problem.parameters, saved_named), **settings, **schedule)
        problem.train(optimizer, 10)
        with torch.no_grad():
            for p, q in zip(problem.parameters, twin.parameters, strict=True):
                q.copy_(p)
        other = ZenFlowOptimizer(named(twin.parameters, loaded_named), **settings, **schedule)
        state_dict = optimizer.state_dict()
        untouched = copy.deepcopy(state_dict)
        other.load_state_dict(state_dict)
        assert_equal_state_dicts(state_dict, untouched)
        if saved_named or loaded_named:
            assert other.param_groups[0]["param_names"] == ["name0", "name1"]
        for _ in range(10):
            problem.train(optimizer, 1)
            twin.train(other, 1)
            assert_all_same(problem.parameters, twin.parameters, what)
        assert_equal_state_dicts(saved(other), saved(optimizer))
        other.param_groups.extend(other.param_groups)
        assert saved(other)["param_groups"][-1] == saved(optimizer)["param_groups"][-1], "repeated parameters"


@any_schedule
def test_state_dicts_of_older_torch_load(schedule):
    """Without the groups' newer flags, and with steps that are plain numbers."""
    for what, settings in inputs():
        problem, twin = Problem(), Problem()
        optimizer, other = (ZenFlowOptimizer(p.parameters, **settings, **schedule) for p in (problem, twin))
        problem.train(optimizer, 3)
        twin.train(other, 3)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            del group["maximize"]
        for state in old["state"].values():
            state["step"] = state["step"].item()
        optimizer.load_state_dict(old)
        assert optimizer.param_groups[0]["maximize"] is settings.get("maximize", False)
        problem.train(optimizer, 6)
        twin.train(other, 6)
        assert_all_same(problem.parameters, twin.parameters, what)


@any_schedule
def test_a_saved_state_dict_equals_the_loaded_one_with_weights_only_too(schedule):
    for _, settings in inputs():
        problem = Problem()
        optimizer = ZenFlowOptimizer(problem.parameters, **settings, **schedule)
        problem.train(optimizer, 6)
        file, state_dict = io.BytesIO(), optimizer.state_dict()
        torch.save(state_dict, file)
        for weights_only in (True, False):
            file.seek(0)
            loaded = torch.load(file, weights_only=weights_only)
            assert_equal_state_dicts(loaded, state_dict)


@any_schedule
def test_state_that_belongs_to_no_parameter_is_kept_as_it_is(schedule):
    problem = Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)
    optimizer.state["notes"] = {"epoch": 3}
    assert optimizer.state_dict()["state"] == {"notes": {"epoch": 3}}
    problem.train(optimizer, 3)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1, "notes"]
    other = ZenFlowOptimizer(Problem().parameters, **schedule)
    other.load_state_dict(saved)
    for copied in (other, copy.deepcopy(optimizer)):
        assert copied.state["notes"] == {"epoch": 3}
        assert len(copied.state) == 3
    problem.train(optimizer, 3)
    assert optimizer.state["notes"] == {"epoch": 3}


@any_schedule
def test_a_deep_copy_has_all_public_attributes(schedule):
    problem = Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)

    def public(optimizer):
        return {name for name in vars(optimizer) if not name.startswith("_")}

    assert public(optimizer) == public(torch.optim.AdamW(Problem().parameters))
    for _ in range(2):
        copied = copy.deepcopy(optimizer)
        assert public(copied) == public(optimizer)
        assert copied.param_groups[0].keys() == optimizer.param_groups[0].keys()
        problem.train(optimizer, 3)


def test_an_optimizer_can_be_printed():
    for _, settings in inputs():
        text = repr(ZenFlowOptimizer([{"params": [p]} for p in Problem().parameters], **settings))
        assert re.match(r"ZenFlowOptimizer \(\nParameter Group 0\n    betas: \(0.9, 0.999\)\n", text)
        assert "Parameter Group 1" in text
        for name, value in settings.items():
            assert f"    {name}: {value}\n" in text


@any_schedule
def test_flags_that_are_put_into_defaults_later_change_nothing(schedule):
    """As libraries do to choose torch's implementation."""
    problem, twin = Problem(), Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)
    optimizer.defaults.update(foreach=True, fused=False, differentiable=False)
    other = ZenFlowOptimizer(twin.parameters, **schedule)
    problem.train(optimizer, 6)
    twin.train(other, 6)
    assert_all_same(problem.parameters, twin.parameters, "weights")
    optimizer.zero_grad(set_to_none=False)
    assert not problem.weight.grad.any()


# Hooks


@any_schedule
def test_step_hooks_run_in_torchs_order_until_they_are_removed(schedule):
    problem, seen = Problem(), []
    optimizer, sgd = ZenFlowOptimizer(problem.parameters, **schedule), torch.optim.SGD(problem.parameters)

    def note(what):
        return lambda optimizer, args, kwargs: seen.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("any, before")),
        register_optimizer_step_post_hook(note("any, after")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        sgd.register_step_pre_hook(note("before")),
        sgd.register_step_post_hook(note("after")),
    ]
    try:
        for stepped in (optimizer, sgd, optimizer):
            seen.clear()
            stepped.step()
            assert seen == ["any, before", "before", "after", "any, after"]
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert len(seen) == 4


def test_a_step_hook_may_change_the_closure():
    problem = Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **SYNCHRONOUS)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 5), {}))
    assert optimizer.step() == 5


@any_schedule
def test_state_dict_hooks_see_and_change_what_is_saved(schedule):
    def before(optimizer):
        optimizer.state["test"] = 1

    def after(optimizer, state_dict):
        state_dict["before_ran"] = state_dict["state"].pop("test", None) == 1

    problem = Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)
    problem.train(optimizer, 2)
    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["before_ran"] is False
    optimizer.register_state_dict_pre_hook(before)
    assert optimizer.state_dict()["before_ran"] is True
    handle.remove()
    assert optimizer.state_dict()["state"]["test"] == 1


def test_a_state_dict_hook_finds_the_live_optimizer_and_may_replace_what_is_saved():
    problem, seen = Problem(), []
    optimizer = ZenFlowOptimizer(problem.parameters, **WINDOWS)
    problem.train(optimizer, 2)

    def after(optimizer, state_dict):
        seen.append(optimizer.state.keys() == set(problem.parameters))
        seen.append(optimizer.param_groups[0].keys() & {"zenflow_step"})
        return {"kept": state_dict}

    optimizer.register_state_dict_post_hook(after)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: seen.append("second"), prepend=True)
    assert optimizer.state_dict().keys() == {"kept"}
    assert seen == ["second", True, set()]


@any_schedule
def test_load_hooks_see_and_change_what_is_loaded(schedule):
    def change(optimizer, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.002

    def replace(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.003
        return state_dict

    problem = Problem()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)
    problem.train(optimizer, 2)
    state_dict = optimizer.state_dict()
    first = optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    first.remove()

    def note(optimizer):
        optimizer.state["loaded lr"] = optimizer.param_groups[0]["lr"]

    optimizer.register_load_state_dict_post_hook(note)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["loaded lr"] == 0.003


def test_a_copy_has_no_hooks_as_torchs_has_none():
    problem = Problem()
    optimizer, adamw = ZenFlowOptimizer(problem.parameters, **WINDOWS), torch.optim.AdamW(problem.parameters)
    counts = []
    for original in (optimizer, adamw):
        original.register_step_pre_hook(lambda *_: None)
        original.register_state_dict_post_hook(lambda *_: None)
        copied = copy.deepcopy(original)
        counts.append([len(copied._optimizer_step_pre_hooks), len(copied._optimizer_state_dict_post_hooks)])
    assert counts == [[0, 0], [0, 0]]


# Whatever state there is at construction


@any_schedule
def test_an_optimizer_made_while_gradients_are_there_uses_them_at_once(schedule):
    problem, twin = Problem(), Problem()
    problem.loss().backward()
    optimizer = ZenFlowOptimizer(problem.parameters, **schedule)
    other = ZenFlowOptimizer(twin.parameters, **schedule)
    twin.loss().backward()
    optimizer.step()
    other.step()
    assert_all_same(problem.parameters, twin.parameters, "weights")


@any_schedule
def test_state_is_not_empty_after_a_step_and_has_torchs_names_when_saved(schedule):
    for _, settings in inputs():
        problem = Problem()
        optimizer = ZenFlowOptimizer(problem.parameters, **settings, **schedule)
        assert not optimizer.state
        problem.train(optimizer, 1)
        for p in problem.parameters:
            assert float(optimizer.state[p]["step"]) == 1
        theirs = Problem()
        adamw = torch.optim.AdamW(theirs.parameters)
        theirs.train(adamw, 1)
        saved, expected = (list(made.state_dict()["state"].values()) for made in (optimizer, adamw))
        for ours, its in zip(saved, expected, strict=True):
            assert its.keys() <= ours.keys()
            assert [ours[key].shape for key in its] == [its[key].shape for key in its]
