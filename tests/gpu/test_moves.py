# SPDX-License-Identifier: Apache-2.0
"""A model that is moved between the CPU and a device, as model.to(device) does, at any time.

On the emulated device CPU tensors stand for a GPU's and a flag says where they are; on the CPU alone nothing moves, and
the test itself is known to work.
"""

import contextlib
import itertools
import sys

import pytest
import torch
from torch import nn

from strategies import BF16, FP32
from training import SMALL, Pair
from zenflow import devices

MODES = pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
SCHEDULE = {"update_interval": 3, "update_delay": 2, "select_interval": 6, "shapes": SMALL}


def move(parameters, device):
    """To a device, or to the "host"."""
    emulated = sys.modules.get("emulated_gpu")
    if emulated:
        for p in parameters:
            emulated.move(p, to_host=device == "host")
    else:
        nn.ParameterList(parameters).to("cpu" if device == "host" else device)


def places(device):
    while True:
        yield "host"
        yield device


@MODES
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"deferred_rule": "mean"},
        {"host_buffer": "stream"},
        {"full_warm_up_rounds": 2, "max_grad_norm": 50.0},
        {"update_interval": "auto", "update_delay": 1, "select_interval": 16},
    ],
    ids=lambda changed: ",".join(map(str, changed)) or "default",
)
def test_a_model_moves_at_every_step_of_a_schedule(device, hooks, changed):
    pair = Pair(device, BF16, hooks=hooks, **{**SCHEDULE, **changed})
    for _, place in zip(range(14), places(device), strict=False):
        move(pair.ours, place)
        pair.check(f"moved to {place}")
        pair.step()
    pair.check_state()
    held = {devices.device_of(p) for p in pair.ours}
    assert {record.device for record in pair.optimizer._store.records.values()} == held


@MODES
@pytest.mark.parametrize("steps", range(7))
def test_a_moved_models_state_is_what_it_was(device, hooks, steps):
    pair = Pair(device, FP32, hooks=hooks, **SCHEDULE)
    for _ in range(steps):
        pair.step()
    move(pair.ours, "host")
    pair.check_state()
    move(pair.ours, device)
    for optimizer in (pair.optimizer, pair.twin):
        optimizer.flush()
    pair.check("after flush()")


@MODES
def test_a_model_moves_between_backward_and_step(device, hooks):
    pair = Pair(device, FP32, hooks=hooks, **SCHEDULE)
    with pytest.warns(UserWarning, match="brought back") if hooks and device == "cuda" else contextlib.nullcontext():
        for _, place in zip(range(9), places(device), strict=False):
            pair.step(after_backward=lambda place=place: move(pair.ours, place))
    pair.check_state()


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_model_moves_inside_settled_and_gets_its_training_weights_back(device, steps):
    pair = Pair(device, BF16, **SCHEDULE)
    for _ in range(steps):
        pair.step()
    with pair.optimizer.settled(), pair.twin.settled():
        move(pair.ours, "host")
        pair.check("inside, moved")
        pair.optimizer.state_dict()
        pair.check("inside, after state_dict()")
        move(pair.ours, device)
        move(pair.ours, "host")
    pair.check("after settled()")
    for _ in range(4):
        pair.step()
    pair.check_state()


def test_a_weight_that_is_edited_and_moved_is_where_training_goes_on(device):
    pair = Pair(device, BF16, **SCHEDULE)
    for _, place in zip(range(9), places(device), strict=False):
        pair.step()
        with torch.no_grad():
            for p in (*pair.ours, *pair.theirs):
                p[..., 1:3] = 0.5
        move(pair.ours, place)
    pair.check_state()


def test_a_move_that_was_refused_memory_can_be_repeated(device, monkeypatch):
    """The call that needs the moved state raises, each time later in the move, and then goes through."""
    empty = devices.empty
    for granted in itertools.count():
        pair = Pair(device, BF16, **SCHEDULE)
        for _ in range(5):
            pair.step()
        move(pair.ours, "host")
        pair.step()
        move(pair.ours, device)
        left = iter(range(granted))

        def refuse(shape, where, left=left):
            if next(left, None) is None:
                raise torch.cuda.OutOfMemoryError("refused by a test")
            return empty(shape, where)

        refused = False
        with monkeypatch.context() as patch:
            patch.setattr(devices, "empty", refuse)
            try:
                pair.optimizer.synchronize()
            except torch.cuda.OutOfMemoryError:
                refused = True
        pair.optimizer.synchronize()
        pair.twin.synchronize()
        pair.check("after the move")
        for _ in range(4):
            pair.step()
        pair.check_state()
        if not refused:
            break
    if device == "cuda":
        assert granted >= 3 * len(pair.ours)
