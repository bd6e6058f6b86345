# SPDX-License-Identifier: Apache-2.0
"""state_dtype=torch.bfloat16: half the bytes for the host's moments, rounded at random.

That every instruction set rounds alike, and without bias, is in tests/cpp/test_kernels.cpp.
"""

import pytest
import torch

from compare import assert_same
from small_model import LENGTH, WORDS, small_model
from zenflow import ZenFlowOptimizer
from zenflow.settings import Settings

ROWS, COLUMNS = 64, 40
BF16 = torch.bfloat16


def trained(steps, state_dtype=BF16, gradients=None, **settings):
    """(parameter, optimizer) after so many steps."""
    p = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = ZenFlowOptimizer([p], lr=1e-3, min_offload_numel=0, state_dtype=state_dtype, **settings)
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        random = torch.randn(ROWS, COLUMNS, generator=generator)
        p.grad = random if gradients is None else gradients.clone()
        optimizer.step()
    return p, optimizer


def moments(optimizer):
    state = optimizer.state_dict()["state"][0]
    return state["exp_avg"], state["exp_avg_sq"], state["selected"]


def is_bfloat16(tensor):
    return torch.equal(tensor.bfloat16().float(), tensor)


def test_deferred_moments_are_bfloat16_and_selected_ones_float32():
    _, optimizer = trained(8)
    for moment in moments(optimizer)[:2]:
        selected = moments(optimizer)[2]
        assert moment.dtype == torch.float32
        assert is_bfloat16(moment[:, ~selected])
        assert not is_bfloat16(moment[:, selected])


@pytest.mark.parametrize("settings", [{}, {"host_buffer": "stream"}, {"deferred_rule": "mean"}])
def test_they_take_four_bytes_less_an_element(settings):
    wide, narrow = (trained(4, dtype, **settings)[1].stats().host_bytes for dtype in (torch.float32, BF16))
    assert wide - narrow == 4 * ROWS * (COLUMNS - 4)


@pytest.mark.parametrize("buffer", ["ring", "stream"])
@pytest.mark.parametrize("rule", ["adamw", "mean"])
def test_a_run_repeats_itself_with_any_number_of_threads(rule, buffer):
    settings = {"deferred_rule": rule, "host_buffer": buffer, "update_interval": 3, "select_interval": 6}
    p, first = trained(20, num_threads=1, **settings)
    for threads in (1, 3):
        q, second = trained(20, num_threads=threads, **settings)
        assert_same(q, p, "weights")
        for a, b in zip(moments(second)[:2], moments(first)[:2], strict=True):
            assert_same(a, b, "moments")


def test_two_parameters_and_two_updates_are_rounded_by_different_numbers():
    p, q = (torch.nn.Parameter(torch.ones(ROWS, COLUMNS)) for _ in range(2))
    optimizer = ZenFlowOptimizer(
        [p, q], min_offload_numel=0, update_interval=1, update_delay=0, topk_ratio=0, state_dtype=BF16
    )
    seen = []
    for _ in range(2):
        p.grad, q.grad = torch.full_like(p, 0.3), torch.full_like(p, 0.3)
        optimizer.step()
        seen += [optimizer.state_dict()["state"][i]["exp_avg"] for i in (0, 1)]
    for moment in seen:
        assert len(moment.unique()) == 2  # below and above
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0] == seen[0].max(), seen[2] == seen[2].max())


def test_steps_too_small_for_bfloat16_are_not_lost():
    steps = 600
    settings = {"update_interval": 1, "update_delay": 0, "topk_ratio": 0}
    _, optimizer = trained(steps, gradients=torch.ones(ROWS, COLUMNS), **settings)
    exact = 1 - 0.999**steps
    nearest = torch.zeros(1)
    for _ in range(steps):
        nearest = (0.999 * nearest + 0.001).bfloat16().float()
    assert abs(nearest.item() / exact - 1) > 0.2  # what rounding to nearest would have made of it
    assert abs(moments(optimizer)[1].mean().item() / exact - 1) < 0.01


def test_weights_stay_near_those_of_float32_moments():
    wide, narrow = (trained(40, dtype, update_interval=4)[0] for dtype in (torch.float32, BF16))
    moved = (wide - 1).abs().mean()
    assert 0 < (wide - narrow).abs().mean() < 0.02 * moved


def test_columns_that_change_sides_keep_their_moments():
    settings = {"update_interval": 2, "select_interval": 2, "topk_ratio": 0.2, "lr": 0.0}
    p = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = ZenFlowOptimizer([p], min_offload_numel=0, state_dtype=BF16, **settings)
    for step in range(1, 13):
        before = moments(optimizer) if step > 1 else None
        p.grad = torch.zeros(ROWS, COLUMNS)
        columns = torch.arange(8) + 3 * step
        p.grad[:, columns % COLUMNS] = 1.0 + torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        if step % 2 == 1 and before is not None:  # a selection; joining columns had bfloat16 moments, and keep them
            now = moments(optimizer)
            joined = now[2] & ~before[2]
            assert joined.any()
            expected = 0.9 * before[0][:, joined] + 0.1 * p.grad[:, joined]
            torch.testing.assert_close(now[0][:, joined], expected, rtol=1e-6, atol=1e-7)


def test_checkpoints_of_either_dtype_load_into_the_other():
    _, wide = trained(9, torch.float32)
    _, narrow = trained(9, BF16)
    for source, dtype in ((wide, BF16), (narrow, torch.float32)):
        p, target = trained(1, dtype)
        target.load_state_dict(source.state_dict())
        for ours, theirs in zip(moments(target)[:2], moments(source)[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2.0**-8, atol=1e-30)
        p.grad = torch.ones_like(p)
        target.step()
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(ROWS, COLUMNS))])
    narrow.flush()
    adamw.load_state_dict(narrow.state_dict())
    assert_same(next(iter(adamw.state.values()))["exp_avg"], moments(narrow)[0], "exp_avg")


@pytest.mark.parametrize(
    ("buffer", "steps", "same"), [("ring", 4, True), ("ring", 3, False), ("stream", 3, True), ("stream", 10, False)]
)
def test_a_resumed_run_rounds_alike_until_columns_change_sides(buffer, steps, same):
    settings = {"host_buffer": buffer, "update_interval": 2, "select_interval": 8}
    p, saved = trained(steps, **settings)
    q, resumed = trained(0, **settings)
    q.data.copy_(p.detach())
    resumed.load_state_dict(saved.state_dict())
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        p.grad = torch.randn(ROWS, COLUMNS, generator=generator)
        q.grad = p.grad.clone()
        saved.step()
        resumed.step()
    assert torch.equal(p, q) == same


def test_hooks_change_no_bit():
    def run(hooks):
        model = small_model()
        optimizer = ZenFlowOptimizer(
            model.parameters(), min_offload_numel=1000, state_dtype=BF16, offload_gradients=hooks
        )
        for batch in torch.randint(WORDS, (10, 2, LENGTH + 1), generator=torch.Generator().manual_seed(1)):
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return list(model.parameters())

    for p, q in zip(run(False), run(True), strict=True):
        assert_same(q, p, "weights")


def test_short_names_mean_the_same():
    assert Settings(state_dtype="bf16") == Settings(state_dtype=torch.bfloat16)
    assert Settings(state_dtype="fp32") == Settings()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, "half", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"state_dtype must be torch.float32 or torch.bfloat16, got"):
        trained(0, dtype)
