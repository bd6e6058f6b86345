# SPDX-License-Identifier: Apache-2.0
"""`offload_gradients=True`: gradients leave during backward, and not a bit changes, whatever happens around it."""

import copy
import gc
import io
import warnings
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from backward import backward_of
from compare import assert_all_same, assert_same_saved, assert_same_state
from reference import ReferenceZenFlow
from small_model import Shared, batches, loss_of, small_model
from strategies import ACTIONS, BF16, FP32, runs
from zenflow import _C, ZenFlowOptimizer
from zenflow.offloaded_gradient import OffloadedGradient, Staged

pytestmark = pytest.mark.filterwarnings("error:zenflow")

STEPS = 50
BROUGHT_BACK = "was brought back"
SCHEDULE = {"update_interval": 4, "select_interval": 8, "topk_ratio": 0.15, "min_offload_numel": 1000}


def offloading(parameters, **changed):
    settings = {"min_offload_numel": 0, "num_threads": 1, "offload_gradients": True, **changed}
    return ZenFlowOptimizer(parameters, **settings)


def random_parameters(*shapes, dtype=FP32):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes or [(8, 12)]]


def random_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


def give_random(parameters, seed):
    backward_of(zip(parameters, random_gradients(parameters, seed), strict=True))


def has_left(p):
    return isinstance(p.grad, OffloadedGradient) and p.grad.is_staged()


# Any run


def play_backward(run, index, parameters, optimizer, between=lambda: None):
    """Run.play() with gradients from a backward pass."""
    run.set_settings(index, optimizer)
    run.set_gradients(index, parameters)
    gradients = [p.grad for p in parameters]
    optimizer.zero_grad()
    backward_of(zip(parameters, gradients, strict=True))
    between()
    optimizer.step()


@settings(max_examples=3 * settings.default.max_examples)
@given(runs(), st.lists(st.sampled_from(ACTIONS), min_size=14, max_size=14))
def test_any_run_equals_the_reference(run, between):
    ours, theirs = run.new_parameters(), run.new_parameters()
    optimizer = run.new_optimizer(ZenFlowOptimizer, ours, offload_gradients=True)
    reference = run.new_optimizer(ReferenceZenFlow, theirs)

    def act(action, index, parameters, player):
        if action != "state":
            acting = copy.copy(run.steps[index])
            object.__setattr__(acting, "after", action)
            changed = copy.copy(run)
            object.__setattr__(changed, "steps", {index: acting})
            changed.act(index, parameters, player)
        elif player is optimizer:
            player.state_dict()

    for i, step in enumerate(run.steps):
        for parameters, player in ((ours, optimizer), (theirs, reference)):
            play_backward(run, i, parameters, player, lambda *who, i=i: act(between[i], i, parameters, player))  # noqa: B023
        assert_all_same(ours, theirs, f"after step {i + 1}")
        if step.after == "state":
            assert_same_state(optimizer, reference, f"after step {i + 1}")
        else:
            run.act(i, ours, optimizer)
            run.act(i, theirs, reference)
        assert_all_same(ours, theirs, f"after step {i + 1} and {step.after!r}")
    assert_same_state(optimizer, reference, "at the end")


@given(runs(max_steps=8, actions=("",)), st.booleans())
def test_any_run_resumes_from_any_step_and_between_backward_and_step(run, between):
    straight, resumed = run.new_parameters(), run.new_parameters()
    optimizers = [run.new_optimizer(ZenFlowOptimizer, p, offload_gradients=True) for p in (straight, resumed)]

    def restart():
        saved = io.BytesIO()
        torch.save(optimizers[1].state_dict(), saved)
        saved.seek(0)
        optimizers[1] = run.new_optimizer(ZenFlowOptimizer, resumed, offload_gradients=True)
        optimizers[1].load_state_dict(torch.load(saved))

    for i in range(len(run.steps)):
        play_backward(run, i, straight, optimizers[0])
        run.set_settings(i, optimizers[1])
        run.set_gradients(i, resumed)
        gradients = [p.grad for p in resumed]
        optimizers[1].zero_grad()
        backward_of(zip(resumed, gradients, strict=True))
        if between:
            groups = [dict(g) for g in optimizers[1].param_groups]
            restart()  # what left to the old optimizer comes back for the new one
            for new, old in zip(optimizers[1].param_groups, groups, strict=True):
                new.update(lr=old["lr"], betas=old["betas"])
        optimizers[1].step()
        if not between:
            restart()
        assert_all_same(resumed, straight, f"after step {i + 1}")


# A real model


def once(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clip(model, optimizer, batch):
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def clip_foreach(model, optimizer, batch):
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def scale_data(model, optimizer, batch):
    loss_of(model, batch).backward()
    for p in model.parameters():
        p.grad.data.mul_(0.3)
    optimizer.step()
    optimizer.zero_grad()


def two_passes(model, optimizer, batch):
    for part in batch.split(2):
        loss_of(model, part).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_passes_announced(model, optimizer, batch):
    with optimizer.accumulate():
        loss_of(model, batch[:2]).backward()
    loss_of(model, batch[2:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def four_passes(model, optimizer, batch):
    for part in batch.split(1):
        loss_of(model, part).backward()
    optimizer.step()
    model.zero_grad()


def uneven_passes(model, optimizer, batch):
    for part in batch.split(1)[: int(batch.sum()) % 4 + 1]:  # as at the end of an epoch
        loss_of(model, part).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeros_kept(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batch).backward()
    optimizer.step()


def zeros_kept_by_the_model(model, optimizer, batch):
    loss_of(model, batch).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, batch).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)


def thrown_away(model, optimizer, batch):
    loss_of(model, batch[:1]).backward()
    model.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)


def logs_everything(model, optimizer, batch):
    loss_of(model, batch).backward()
    assert all(torch.isfinite(p.grad.norm()) and "tensor" in repr(p.grad) for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()


def saves_in_between(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.state_dict()
    with optimizer.settled():
        model(batch[:, :-1])
    optimizer.step()
    optimizer.zero_grad()


def weights_after(model, loop, hooks, steps=STEPS, **changed):
    """Every step's weights, and the optimizer."""
    optimizer = ZenFlowOptimizer(model.parameters(), 1e-3, **{**SCHEDULE, "offload_gradients": hooks, **changed})
    history = []
    for batch in batches(steps):
        loop(model, optimizer, batch)
        history.append([p.detach().clone() for p in model.parameters()])
    return history, optimizer


def assert_hooks_change_no_bit(make_model, loop, steps=STEPS, leaving=None, **changed):
    """`leaving`: how many gradients have to leave at least; one in each step."""
    with mock.patch("zenflow.offload.Staged", wraps=Staged) as staged:
        ours, optimizer = weights_after(make_model(), loop, True, steps, **changed)
    assert staged.call_count >= (steps if leaving is None else leaving)
    theirs, default = weights_after(make_model(), loop, False, steps, **changed)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_all_same(a, b, f"after step {i + 1}")
    assert_same_saved(optimizer, default, "at the end")
    return optimizer


QUIET = {
    "once": (once, {}),
    "every step": (once, {"update_interval": 1, "select_interval": 1}),
    "synchronous": (once, {"update_delay": 0}),
    "as late as can be": (once, {"update_delay": 4}),
    "published rule": (once, {"deferred_rule": "mean", "host_buffer": "stream", "full_warm_up_rounds": 3}),
    "clipped inside": (once, {"max_grad_norm": 0.5}),
    "skips gradients that are not finite": (once, {"skip_nonfinite": True}),
    "two passes in accumulate()": (two_passes_announced, {"max_grad_norm": 0.5}),
    "four passes announced": (four_passes, {"gradient_accumulation_steps": 4}),
    "fewer passes than announced": (uneven_passes, {"gradient_accumulation_steps": 4}),
    "zeros kept": (zeros_kept, {}),
    # Without a delay, since else the gradient thrown away may already have brought a publication.
    "zeros kept by the model": (zeros_kept_by_the_model, {"update_delay": 0}),
    "thrown away": (thrown_away, {"update_delay": 0}),
    "thrown away while counted": (thrown_away, {"update_delay": 0, "gradient_accumulation_steps": 1}),
    "closure": (with_closure, {}),
    "saves in between": (saves_in_between, {}),
}
WARNED = {
    "clipped by the user": (clip, {}),
    "clipped by the user with foreach": (clip_foreach, {}),
    "scaled in .data": (scale_data, {}),
    "two passes, not announced": (two_passes, {"leaving": 10}),
    "logging": (logs_everything, {}),
}


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_model_trains_to_the_same_bits(name, dtype):
    loop, changed = QUIET[name]
    optimizer = assert_hooks_change_no_bit(lambda: small_model(dtype), loop, **changed)
    assert not optimizer._offload._in_parts


@pytest.mark.parametrize("name", WARNED)
def test_a_model_trains_to_the_same_bits_with_one_warning(name):
    loop, changed = WARNED[name]
    with pytest.warns(UserWarning, match=BROUGHT_BACK) as caught:
        assert_hooks_change_no_bit(small_model, loop, **changed)
    assert sum(BROUGHT_BACK in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("loop", "changed"),
    [
        (once, {}),
        (once, {"update_interval": 1, "select_interval": 2, "max_grad_norm": 0.5}),
        (two_passes_announced, {}),
        (four_passes, {"gradient_accumulation_steps": 4}),
    ],
    ids=["once", "every step", "accumulate()", "counted"],
)
def test_checkpointed_shared_weights_train_to_the_same_bits(use_reentrant, loop, changed):
    optimizer = assert_hooks_change_no_bit(lambda: Shared(use_reentrant), loop, **changed)
    assert len(optimizer._offload._in_parts) == (1 if use_reentrant and loop is once else 0) or loop is not once


def test_a_model_in_which_all_is_checkpointed_trains_to_the_same_bits():
    """No gradient comes from the outermost pass."""

    def make():
        model = Shared(True)
        model.head.requires_grad_(False)
        model.embedding.requires_grad_(True)
        return model

    for loop, changed in ((once, {}), (four_passes, {"gradient_accumulation_steps": 4}), (two_passes_announced, {})):
        assert_hooks_change_no_bit(make, loop, leaving=0 if loop is four_passes else None, **changed)


def test_frozen_and_late_parameters_train_to_the_same_bits():
    def loop(model, optimizer, batch):
        step = optimizer.stats().total.steps
        model[1].requires_grad_(step >= 5)
        if step == 20:
            model[0].requires_grad_(False)
        once(model, optimizer, batch)

    assert_hooks_change_no_bit(small_model, loop)


def test_a_layer_that_is_not_always_used_trains_to_the_same_bits():
    def loop(model, optimizer, batch):
        step = optimizer.stats().total.steps
        once(nn.Sequential(model[0], *([model[1]] if step > 4 and step % 3 else []), *model[2:]), optimizer, batch)

    assert_hooks_change_no_bit(small_model, loop)


def test_a_backward_that_fails_leaves_what_came_before():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("by the user")

    def loop(model, optimizer, batch):
        x = model[2](Fail.apply(model[1](model[0](batch[:, :-1]))))
        loss = nn.functional.cross_entropy(model[3](x).flatten(0, 1), batch[:, 1:].flatten())
        with pytest.raises(ValueError, match="by the user"):
            loss.backward()
        if optimizer.stats().total.steps % 2:
            optimizer.zero_grad()
        once(model, optimizer, batch)

    with pytest.warns(UserWarning, match=BROUGHT_BACK):
        assert_hooks_change_no_bit(small_model, loop)


def test_a_model_moved_to_another_dtype_between_backward_and_step_goes_on_with_the_same_bits():
    def loop(model, optimizer, batch):
        loss_of(model, batch).backward()
        step = optimizer.stats().total.steps
        if step in (5, 11):
            model.to(torch.bfloat16 if step == 5 else torch.float32)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match=BROUGHT_BACK):
        assert_hooks_change_no_bit(small_model, loop, 20)


@pytest.mark.parametrize("first", [0, 5], ids=["first step", "later step"])
def test_weights_assigned_in_another_dtype_between_backward_and_step_take_the_gradient_that_left(first):
    def loop(model, optimizer, batch):
        loss_of(model, batch).backward()
        step = optimizer.stats().total.steps
        if step in (first, 11):
            for p in model.parameters():
                p.data = p.data.to(torch.bfloat16 if step == first else torch.float32)
        optimizer.step()
        optimizer.zero_grad()

    assert_hooks_change_no_bit(small_model, loop, 20)


def test_a_ratio_changed_between_backward_and_step_counts_at_once():
    def loop(model, optimizer, batch):
        loss_of(model, batch).backward()
        optimizer.param_groups[0]["topk_ratio"] = 0.3 if optimizer.stats().total.steps >= 8 else 0.1
        optimizer.step()
        optimizer.zero_grad()

    assert_hooks_change_no_bit(small_model, loop, 20)


@pytest.mark.parametrize("action", ["flush", "synchronize", "state_dict"])
def test_what_is_called_between_backward_and_step_changes_what_the_step_does_and_no_more(action):
    """flush() in mid-window makes the next step the first of a window, which may select."""

    def loop(model, optimizer, batch):
        loss_of(model, batch).backward()
        getattr(optimizer, action)()
        optimizer.step()
        optimizer.zero_grad()

    assert_hooks_change_no_bit(small_model, loop, 20, select_interval=4)


def test_a_parameter_group_that_is_added_later_is_followed():
    def weights(hooks):
        torch.manual_seed(3)
        first, second = random_parameters((9, 14), (7, 11))
        optimizer = offloading([first], offload_gradients=hooks)
        for step in range(12):
            if step == 3:
                optimizer.add_param_group({"params": [second], "lr": 0.01})
            give_random([first, second], step)
            assert has_left(first) == hooks and has_left(second) == (hooks and step >= 3)
            optimizer.step()
            optimizer.zero_grad()
            second.grad = None
        return first, second

    assert_all_same(weights(True), weights(False), "after 12 steps")


# What stands in p.grad counts


def test_a_gradient_leaves_and_its_memory_is_freed():
    [p] = random_parameters()
    seen = []
    p.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    optimizer = offloading([p])
    give_random([p], 0)
    gc.collect()
    assert has_left(p) and seen[0]() is None
    assert p.grad.shape == p.shape and p.grad.dtype == p.dtype and p.grad.device == p.device
    optimizer.step()


def test_parameters_that_are_not_split_keep_their_gradients():
    vector, small, whole, split = random_parameters((40,), (3, 4), (8, 8), (8, 8))
    groups = [{"params": [vector, small, split]}, {"params": [whole], "split": False}]
    optimizer = offloading(groups, min_offload_numel=20)
    give_random([vector, small, whole, split], 0)
    optimizer.step()
    optimizer.zero_grad()
    give_random([vector, small, whole, split], 0)
    assert [has_left(p) for p in (vector, small, whole, split)] == [False, False, False, True]
    assert all(type(p.grad) is torch.Tensor for p in (vector, small, whole))


def test_a_gradient_set_to_none_is_discarded():
    p, q = random_parameters((8, 12), (8, 12))
    optimizer = offloading([p, q])
    before = p.detach().clone()
    give_random([p, q], 0)
    p.grad = None
    optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[q]["step"] == 1 and p not in optimizer.state


def test_a_gradient_that_the_user_replaced_is_the_one_that_counts():
    [p], [q] = random_parameters(), random_parameters()
    ours, theirs = offloading([p]), offloading([q], offload_gradients=False)
    give_random([p], 0)
    p.grad = q.grad = torch.ones(p.shape)
    ours.step()
    theirs.step()
    assert_all_same([p], [q], "after the step")


def test_a_gradient_that_somebody_keeps_survives_the_next_backward_and_step():
    p, q = random_parameters((8, 12), (8, 12))
    optimizer = offloading([p, q])
    first, second = random_gradients([p], 0)[0], random_gradients([p], 1)[0]
    backward_of([(p, first), (q, first)])
    kept, over_a_step = p.grad, q.grad
    p.grad = q.grad = None
    backward_of([(p, second)])
    assert has_left(p)
    optimizer.step()
    assert torch.equal(kept, first) and torch.equal(over_a_step, first)
    with pytest.raises(RuntimeError, match=r"look at it before step\(\)"):
        p.grad.norm()


def test_a_gradient_that_is_put_back_counts():
    (p, q), (r, s) = random_parameters((8, 12), (8, 12)), random_parameters((8, 12), (8, 12))
    ours, theirs = offloading([p, q]), offloading([r, s], offload_gradients=False)
    for (a, b), optimizer in (((p, q), ours), ((r, s), theirs)):
        give_random([a, b], 0)
        kept, a.grad = a.grad, None
        optimizer.step()
        b.grad, a.grad = None, kept
        optimizer.step()
        a.grad = None
        give_random([a, b], 1)
        b.grad = a.grad  # another parameter's
        optimizer.step()
    assert_all_same([p, q], [r, s], "after three steps")


def test_an_applied_gradient_is_refused_rather_than_applied_again():
    [p] = random_parameters()
    optimizer = offloading([p])
    give_random([p], 0)
    optimizer.step()
    before = p.detach().clone()
    for again in (optimizer.step, lambda: give_random([p], 1), lambda: p.grad.add_(1)):
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before the next backward"):
            again()
    assert torch.equal(p, before)
    kept, p.grad = p.grad, None
    give_random([p], 1)
    with pytest.raises(RuntimeError, match=r"look at it before step\(\)"):
        kept.norm()  # and not the gradient that took its place
    p.grad = kept
    optimizer.zero_grad(set_to_none=False)
    give_random([p], 1)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_model_that_stays_where_it_is_brings_no_gradient_back():
    model = nn.Linear(12, 8)
    optimizer = offloading(model.parameters())
    give_random(list(model.parameters()), 0)
    model.to(model.weight.device)
    assert has_left(model.weight)
    optimizer.step()


@pytest.mark.parametrize("move", [BF16, "cpu", "meta"])
def test_a_model_may_move_while_its_gradients_are_applied(move):
    """As some frameworks do at the end of a training. There is still nothing to be seen of them."""
    model = nn.Linear(12, 8)
    optimizer = offloading(model.parameters())
    give_random(list(model.parameters()), 0)
    optimizer.step()
    model.to(move)
    p = model.weight
    assert type(p.grad) is OffloadedGradient and (p.grad.dtype, p.grad.device) == (p.dtype, p.device)
    with pytest.raises(RuntimeError, match=r"look at it before step\(\)"):
        p.grad.norm()
    if move != "meta":
        optimizer.zero_grad()
        give_random(list(model.parameters()), 1)
        optimizer.step()
        assert optimizer.state[p]["step"] == 2


def test_a_gradient_with_a_graph_stays():
    [p] = random_parameters()
    optimizer = offloading([p])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle
        (p**2).sum().backward(create_graph=True)
        assert p.grad.requires_grad
        p.grad.sum().backward(inputs=[p])
    p.grad = p.grad.detach()
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_gradients_stay_while_settled_weights_are_shown():
    [p] = random_parameters()
    optimizer = offloading([p])
    give_random([p], 0)
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.settled():
        give_random([p], 1)
        assert type(p.grad) is torch.Tensor
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_state_is_that_of_the_steps_alone():
    [p], [q] = random_parameters(), random_parameters()
    ours, theirs = offloading([p]), offloading([q], offload_gradients=False)
    give_random([p], 0)
    assert ours.state_dict()["state"] == {} and len(ours.state) == 0
    ours.synchronize()
    ours.flush()
    assert has_left(p)
    give_random([q], 0)
    ours.step()
    theirs.step()
    give_random([q], 1)
    p.grad = None
    give_random([p], 1)
    assert_same_saved(ours, theirs, "before the second step")


# Hooks


def hooks_of(p):
    return len(p._post_accumulate_grad_hooks or {})


def test_hooks_vanish_with_the_optimizer_and_gradients_stay_readable():
    p, q = random_parameters((8, 12), (5,))
    optimizer = offloading([p, q])
    assert (hooks_of(p), hooks_of(q)) == (1, 0)
    [gradient] = random_gradients([p], 0)
    backward_of([(p, gradient)])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None and hooks_of(p) == 0
    with pytest.warns(UserWarning, match=BROUGHT_BACK):
        assert torch.equal(p.grad, gradient)


def test_an_optimizer_without_hooks_takes_a_gradient_that_another_ones_took():
    [p], [q] = random_parameters(), random_parameters()
    for parameter, hooks in ((p, True), (q, False)):
        before = offloading([parameter], offload_gradients=hooks)
        give_random([parameter], 0)
        before.step()
        before.zero_grad()
        give_random([parameter], 1)
        assert has_left(parameter) == hooks
        after = offloading([parameter], offload_gradients=False)
        after.load_state_dict(before.state_dict())
        after.step()
        after.flush()
    assert_all_same([p], [q], "weights")


def test_an_optimizer_whose_state_another_one_took_over_writes_no_more_weights():
    [p], [q] = random_parameters(), random_parameters()
    kept = []
    for parameter, hooks in ((p, True), (q, False)):
        optimizer = offloading([parameter], update_delay=3, offload_gradients=hooks)
        for step in range(20):
            if step == 10:
                kept.append(optimizer)  # with an update in flight
                optimizer = offloading([parameter], update_delay=3, offload_gradients=hooks)
                optimizer.load_state_dict(kept[-1].state_dict())
            optimizer.zero_grad()
            give_random([parameter], step)
            optimizer.step()
        optimizer.flush()
    assert_all_same([p], [q], "weights")


def test_two_optimizers_of_one_parameter_both_get_its_gradient():
    [p], [q] = random_parameters(), random_parameters()
    ours = [offloading([p]), offloading([p], lr=0.1)]
    theirs = [offloading([q], offload_gradients=False), offloading([q], lr=0.1, offload_gradients=False)]
    with pytest.warns(UserWarning, match="another ZenFlowOptimizer also updates"):
        for step in range(6):
            for parameter, players in ((p, ours), (q, theirs)):
                give_random([parameter], step)
                for player in players:
                    player.step()
                players[0].zero_grad(set_to_none=step % 2 == 0)
            assert_all_same([p], [q], f"after step {step + 1}")


def test_a_parameter_that_leaves_loses_its_hook():
    p, q = random_parameters((8, 12), (8, 12))
    optimizer = offloading([p, q])
    give_random([p, q], 0)
    del optimizer.param_groups[0]["params"][0]
    optimizer.step()
    assert (hooks_of(p), hooks_of(q)) == (0, 1)
    p.grad = None
    give_random([p], 1)
    assert type(p.grad) is torch.Tensor


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load"])
def test_a_copy_has_hooks_of_its_own_and_trains_to_the_same_bits(how):
    [p] = random_parameters((9, 20))
    optimizer = offloading([p], topk_ratio=0.2)
    for step in range(6):
        give_random([p], step)
        optimizer.step()
        optimizer.zero_grad()
    give_random([p], 6)
    if how == "deepcopy":
        other = copy.deepcopy(optimizer)
    elif how == "pickle":
        saved = io.BytesIO()
        torch.save(optimizer, saved)
        saved.seek(0)
        other = torch.load(saved, weights_only=False)
    else:
        q = nn.Parameter(p.detach().clone())
        other = offloading([q], topk_ratio=0.2)
        other.load_state_dict(optimizer.state_dict())
    [q] = other.param_groups[0]["params"]
    assert q is not p and hooks_of(p) == hooks_of(q) == 1
    q.grad = None
    give_random([q], 6)
    assert has_left(p) and has_left(q)
    for step in range(7, 14):
        for parameter, player in ((p, optimizer), (q, other)):
            player.step()
            player.zero_grad()
            give_random([parameter], step)
        assert_all_same([q], [p], f"after step {step}")


def test_a_model_with_hooks_can_be_copied_and_saved():
    model = small_model()
    optimizer = ZenFlowOptimizer(model.parameters(), offload_gradients=True, min_offload_numel=1000)
    loss_of(model, batches(1)[0]).backward()
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    assert all(hooks_of(p) == 0 and p.grad is None for p in twin.parameters())
    optimizer.step()


def test_a_loaded_checkpoint_frees_the_state_that_gradients_had_left_to():
    [p] = random_parameters((300, 400))
    optimizer = offloading([p])
    give_random([p], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    gc.collect()
    held = _C.host_bytes_held()
    [gradient] = random_gradients([p], 1)
    backward_of([(p, gradient)])
    optimizer.load_state_dict(saved)
    gc.collect()
    assert _C.host_bytes_held() <= held
    assert not has_left(p) and torch.equal(p.grad.bring_back(), gradient)


# Accumulation


def test_gradients_stay_until_the_last_pass_that_was_announced():
    [p] = random_parameters()
    optimizer = offloading([p], gradient_accumulation_steps=3)
    for _ in range(3):
        for number in range(3):
            give_random([p], number)
            assert has_left(p) == (number == 2)
        optimizer.step()
        optimizer.zero_grad()


def test_a_pass_beyond_the_announced_ones_is_refused():
    p, q = random_parameters((8, 12), (8, 12))
    optimizer = offloading([p, q], gradient_accumulation_steps=2)
    give_random([p, q], 0)
    give_random([p, q], 1)
    with pytest.raises(RuntimeError, match=r"backward number 3 since the last step.*gradient_accumulation_steps=2"):
        give_random([p, q], 2)
    for start_anew in (optimizer.zero_grad, lambda: [setattr(x, "grad", None) for x in (p, q)]):
        start_anew()
        for number in range(2):
            give_random([p, q], number)
        assert has_left(p) and has_left(q)
    optimizer.step()


def test_accumulate_does_nothing_without_hooks():
    [p] = random_parameters()
    with offloading([p], offload_gradients=False).accumulate():
        give_random([p], 0)
    assert type(p.grad) is torch.Tensor


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_parameter_that_fires_twice_is_remembered_without_a_warning(use_reentrant):
    model = Shared(use_reentrant)
    optimizer = ZenFlowOptimizer(model.parameters(), offload_gradients=True, min_offload_numel=1000)
    for step in range(3):
        loss_of(model, batches(3)[step]).backward()
        assert has_left(model.head.weight) and has_left(model.embedding.weight)
        assert has_left(model.block.weight) != use_reentrant
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("announced", [None, 3])
@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("outer_first", [True, False])
def test_passes_within_a_pass_are_not_counted(announced, inner, outer_first):
    """Segments that are checkpointed with use_reentrant=True run a pass each."""
    outer, *segments = random_parameters(*[(8, 8)] * (1 + inner))
    optimizer = offloading([outer, *segments], gradient_accumulation_steps=announced)
    for _ in range(2):
        for number in range(1, (announced or 1) + 1):
            x = torch.ones(2, 8, requires_grad=True)
            x = x if outer_first else x @ outer
            for p in segments:
                x = checkpoint(lambda y, p=p: y @ p, x, use_reentrant=True)
            (x @ outer if outer_first else x).sum().backward()
            assert optimizer._offload._batches.number == number
            last = number == (announced or 1)
            assert [has_left(p) for p in (outer, *segments)] == [last] * (1 + inner)
        optimizer.step()
        optimizer.zero_grad()


def test_a_pass_within_a_function_of_the_user_is_not_counted():
    p, q = random_parameters((8, 8), (8, 8))

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                (q * 2).sum().backward()
            return g

    optimizer = offloading([p, q], gradient_accumulation_steps=1)
    for _ in range(3):
        Nested.apply(p * 3).sum().backward()
        assert has_left(p) and has_left(q)
        optimizer.step()
        optimizer.zero_grad()


# Publication


def published(optimizer, p, step):
    """Whether the backward of this step changes the weights."""
    before = p.detach().clone()
    give_random([p], step)
    changed = not torch.equal(p, before)
    optimizer.step()
    optimizer.zero_grad()
    return changed


def test_a_due_publication_rides_in_the_backward():
    [p] = random_parameters()
    optimizer = offloading([p], update_interval=2, select_interval=6, update_delay=1)
    # Windows end with steps 2, 4 and so on; step 7 selects and so publishes by itself, as step 1 does.
    assert [published(optimizer, p, step) for step in range(1, 11)] == [step in (3, 5, 9) for step in range(1, 11)]


def test_an_early_publication_counts_though_its_step_is_left_out():
    [p], [q] = random_parameters(), random_parameters()
    ours, theirs = offloading([p], update_interval=1), offloading([q], update_interval=1, offload_gradients=False)
    for parameter, optimizer in ((p, ours), (q, theirs)):
        for step in range(2):
            give_random([parameter], step)
            optimizer.step()
            optimizer.zero_grad()
    give_random([p], 2)
    shown = p.detach().clone()
    ours.zero_grad()
    assert torch.equal(p, shown)
    for parameter, optimizer in ((p, ours), (q, theirs)):
        give_random([parameter], 3)
        optimizer.step()
    assert_all_same([p], [q], "after the step")


def test_autograd_notices_weights_that_were_published_before_their_last_use():
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = offloading([p], update_interval=1)
    for _ in range(2):
        (torch.randn(3, 8) @ p).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(3, 8, requires_grad=True)
    late = x @ p.detach()
    loss = (late @ p).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_shared_by_segments_only_later_stop_the_backward_that_published_them():
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = offloading([p], update_interval=1)

    def use(times):
        x = torch.randn(3, 8, requires_grad=True)
        for _ in range(times):
            x = checkpoint(lambda y: torch.tanh(y @ p), x, use_reentrant=True)
        x.sum().backward()

    for _ in range(3):
        use(1)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="second gradient in one backward"):
        use(2)
    optimizer.zero_grad()
    for _ in range(3):
        use(2)
        optimizer.step()
        optimizer.zero_grad()


def test_in_the_first_backward_after_a_checkpoint_nothing_is_published_early():
    """Weights may be shared by segments, and no hook has seen it yet."""
    [p] = random_parameters((8, 8))
    before = offloading([p], update_interval=1)
    for step in range(3):
        give_random([p], step)
        before.step()
        before.zero_grad()
    optimizer = offloading([p], update_interval=1)
    optimizer.load_state_dict(before.state_dict())
    del before
    gc.collect()
    assert [published(optimizer, p, step) for step in range(3)] == [False, True, True]


# Clipping and finiteness


def test_max_grad_norm_takes_the_norm_of_what_left():
    p, q = random_parameters((8, 12), (5,))
    optimizer = offloading([p, q], max_grad_norm=0.5)
    gradients = random_gradients([p, q], 0)
    backward_of(zip([p, q], gradients, strict=True))
    optimizer.step()
    norm = torch.cat([g.flatten().double() for g in gradients]).norm().item()
    assert optimizer.stats().global_grad_norm == pytest.approx(norm)


@pytest.mark.parametrize(
    ("value", "skipped"), [(float("nan"), 1), (float("inf"), 1), (1e30, 0)], ids=["nan", "inf", "square overflows"]
)
def test_skip_nonfinite_looks_at_what_left(value, skipped):
    [p], [q] = random_parameters(), random_parameters()
    ours = offloading([p], skip_nonfinite=True)
    theirs = offloading([q], skip_nonfinite=True, offload_gradients=False)
    for parameter, optimizer in ((p, ours), (q, theirs)):
        for step in range(3):
            [gradient] = random_gradients([parameter], step)
            if step == 1:
                gradient[2, 3] = value
            backward_of([(parameter, gradient)])
            optimizer.step()
            optimizer.zero_grad()
    assert ours.stats().skipped_steps == theirs.stats().skipped_steps == skipped
    assert_all_same([p], [q], "after three steps")


# Refusals


def test_grad_scaler_is_refused_and_nothing_changes():
    [p] = random_parameters()
    optimizer = offloading([p])
    scaler = torch.amp.GradScaler("cpu")
    for refused in (scaler.unscale_, scaler.step):
        p.grad = None
        scaler.scale((p * torch.ones(p.shape)).sum()).backward()
        before = p.detach().clone()
        with pytest.raises(RuntimeError, match=r"GradScaler.*bfloat16.*offload_gradients=False"):
            refused(optimizer)
        scaler.update(1024.0)
        assert torch.equal(p, before)


def test_several_processes_are_refused(monkeypatch):
    [p] = random_parameters()
    optimizer = offloading([p])
    monkeypatch.setattr("zenflow.offload._processes", lambda: 2)
    with pytest.raises(RuntimeError, match="several processes"):
        give_random([p], 0)
    assert optimizer.stats().total.steps == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"offload_gradients": 1}, "offload_gradients must be True or False, got 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be an integer >= 1, got 0"),
        ({"gradient_accumulation_steps": 2.0}, "gradient_accumulation_steps must be an integer >= 1"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        offloading(random_parameters(), **setting)
