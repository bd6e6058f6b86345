# SPDX-License-Identifier: Apache-2.0
"""The canonical state: what a checkpoint holds, and how it goes to and from the native engine.

Per parameter, full-shaped whatever the schedule, the host buffer and the step: `step`, `exp_avg`, `exp_avg_sq` as in
torch.optim.AdamW, with every received gradient folded in; `master`; `last_written` and `pending_output` in the
parameter's dtype (what it holds, and what the window in flight will write); `selected` (columns) and `has_selection`
(whether they were chosen yet); `window` (the open window: count, sum of learning rates, product of decays, and the last
gradient's lr, betas, eps, weight_decay); for `deferred_rule="mean"` also `window_sum` and `column_steps`, for
`update_interval="auto"` also `vote` (sums of root mean square gradients, selected and deferred, and their count).
Scalars of the schedule travel in every parameter group, under keys that begin with `zenflow_`; and once more in each
parameter's `schedule`, since torch.distributed.checkpoint leaves out keys that the groups of a new optimizer do not
have.

Not for: reading or writing files.
"""

import dataclasses
import json

import torch

from zenflow.settings import UNSUPPORTED_OPTIONS
from zenflow.sizes import matrix_shape
from zenflow.templates import InStateDict
from zenflow.tensors import DTYPE_CODES, addresses, same_bits

FORMAT = 1
PREFIX = "zenflow_"
ADAMW_ONLY = {*UNSUPPORTED_OPTIONS, "decoupled_weight_decay"}
LAYOUT_KEYS = ("topk_ratio", "split")
NO_VOTE = (0.0, 0.0, 0.0)
NO_WINDOW = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SCHEDULE_BYTES = 1024  # of JSON and spaces: the same shape at every step
ADAMW_NAMES = ("step", "exp_avg", "exp_avg_sq")
NAMES = (
    *ADAMW_NAMES,
    "master",
    "last_written",
    "pending_output",
    "selected",
    "has_selection",
    "window",
    "schedule",
)
MEAN_NAMES = ("window_sum", "column_steps")
AUTOMATIC_NAMES = ("vote",)


def live_state(step, settings):
    """What stands in optimizer.state for a parameter: all names of its canonical state, and its step count."""
    mean = MEAN_NAMES if settings.deferred_rule == "mean" else ()
    automatic = AUTOMATIC_NAMES if settings.automatic else ()
    return {name: InStateDict(name) for name in (*NAMES, *mean, *automatic)} | {"step": step}


def export_parameter(engine, record, settings):
    """The canonical tensors of one parameter, newly made on the CPU; shares nothing with the live state."""
    shape, dtype, mean = record.shape, record.dtype, settings.deferred_rule == "mean"

    def new(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever torch's defaults are

    tensors = {
        "exp_avg": new(shape, torch.float32),
        "exp_avg_sq": new(shape, torch.float32),
        "master": new(shape, torch.float32),
        "last_written": new(shape, dtype),
        "pending_output": new(shape, dtype),
        "selected": new(record.columns, torch.bool),
        "window_sum": new(shape, torch.float32) if mean else None,
        "column_steps": new(record.columns, torch.int32) if mean else None,
    }
    engine.export_state(record.index, addresses(tensors))
    state = {"step": torch.tensor(engine.steps(record.index), dtype=torch.float32, device="cpu")}
    state |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    state["has_selection"] = torch.tensor(engine.has_selection(record.index), device="cpu")
    state["window"] = torch.tensor(engine.window(record.index), dtype=torch.float64, device="cpu")
    if settings.automatic:
        state["vote"] = torch.tensor(engine.vote(record.index), dtype=torch.float64, device="cpu")
    return state


def import_parameter(engine, record, p, state, *, mean, in_flight, has_selection):
    """Takes over one parameter's canonical state, or torch.optim.AdamW's (exp_avg, exp_avg_sq, step): it owes nothing.

    Memory for the selected columns must have been lent. The tensors are read, not kept.
    """

    def full(name, dtype, default):
        value = state.get(name)
        value = default if value is None else value
        return None if value is None else value.detach().to("cpu", dtype).reshape(record.shape).contiguous()

    live = p.detach()
    steps = int(state["step"])
    tensors = {
        "exp_avg": full("exp_avg", torch.float32, None),
        "exp_avg_sq": full("exp_avg_sq", torch.float32, None),
        "master": full("master", torch.float32, live),
        "last_written": full("last_written", record.dtype, live),
        "pending_output": full("pending_output", record.dtype, state.get("last_written", live)),
        "selected": selected_mask(state if has_selection else {}, record),
        "window_sum": full("window_sum", torch.float32, None),
        "column_steps": None,
    }
    if mean:
        counts = state.get("column_steps", torch.full((record.columns,), steps, device="cpu"))
        tensors["column_steps"] = counts.detach().to("cpu", torch.int32).contiguous()
    window, vote = (
        default if state.get(name) is None else tuple(state[name].to(torch.float64).tolist())
        for name, default in (("window", NO_WINDOW), ("vote", NO_VOTE))
    )
    engine.import_state(record.index, addresses(tensors), steps, has_selection, in_flight, window, vote)


def selected_mask(state, record):
    """The selection of a canonical state as a bool tensor [columns]; none if it has none."""
    mask = state.get("selected")
    if mask is None or not record.split:
        return torch.zeros(record.columns, dtype=torch.bool, device="cpu")
    return mask.detach().to("cpu", torch.bool).contiguous()


def has_selection(state):
    """Whether a canonical state's columns were chosen; AdamW's were not."""
    return bool(state.get("has_selection", False))


def saved_dtype(state, p):
    """The dtype that p had when its state was saved."""
    dtype = state["last_written"].dtype if "last_written" in state else p.dtype
    return dtype if dtype in DTYPE_CODES else p.dtype


def follow_move(state, p, shows_settled):
    """A canonical state for p, which has moved to another device or dtype, with the user's edits taken over.

    What only rounding changed is no edit: it keeps its fp32 master. Where p may show settled masters, it gets its
    training weights back.
    """
    state, live = dict(state), p.detach().cpu()
    settled = state["master"].to(state["last_written"].dtype).to(p.dtype)
    for name in ("last_written", "pending_output"):
        state[name] = state[name].to(p.dtype)
    edited = ~same_bits(live, state["last_written"])
    if shows_settled:
        edited &= ~same_bits(live, settled)
    # Columns that are not deferred hold what their masters round to, in any dtype.
    for name in ("last_written", "pending_output"):
        state[name] = torch.where(elements_not_deferred(state, p), state["master"].to(p.dtype), state[name])
        state[name] = torch.where(edited, live, state[name])
    state["master"] = torch.where(edited, live.float(), state["master"])
    if not same_bits(live, state["last_written"]).all():
        with torch.no_grad():
            p.copy_(state["last_written"])
    return state


def elements_not_deferred(state, p):
    """A bool tensor of p's shape: before a first selection nothing is deferred."""
    columns = state["selected"] if has_selection(state) else torch.ones_like(state["selected"])
    if p.dim() <= 3:
        return columns.reshape(p.shape[-1:] if p.dim() else ()).expand(p.shape)
    return columns.reshape(p.shape[1:]).expand(p.shape)


def match_parameters(groups, saved_groups):
    """The live parameter of each saved id; raises torch's own errors for groups that do not match."""
    if any(saved.get("amsgrad") for saved in saved_groups):
        raise ValueError(
            "the checkpoint is of AdamW with amsgrad=True, which ZenFlow does not have: use torch.optim.AdamW"
        )
    if len(groups) != len(saved_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    pairs = list(zip(groups, saved_groups, strict=True))
    if any(len(group["params"]) != len(saved["params"]) for group, saved in pairs):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    return {key: p for group, saved in pairs for p, key in zip(group["params"], saved["params"], strict=True)}


def saved_layouts(groups, saved_groups):
    """The live groups with the topk_ratio and split of the checkpoint, where it has them."""
    return [
        {**group, **{key: saved[key] for key in LAYOUT_KEYS if key in saved}}
        for group, saved in zip(groups, saved_groups, strict=True)
    ]


def own_part(states, saved_groups):
    """(states, groups) without what is ours if another optimizer has held them since: it is out of date then.

    torch's optimizers carry along what they do not know, but cast it to the parameter's dtype.
    """
    if all(state["selected"].dtype is torch.bool for state in states.values() if "selected" in state):
        return states, saved_groups
    states = {p: {key: state[key] for key in ADAMW_NAMES if key in state} for p, state in states.items()}
    return states, [{key: g[key] for key in g if not key.startswith(PREFIX)} for g in saved_groups]


def check_states(states, name):
    """Raises for states by parameter that do not fit; nothing has changed then."""
    for p, state in states.items():
        for key in ADAMW_NAMES:
            if key not in state:
                raise ValueError(f"the state of {name(p)} lacks {key!r}: it is not from AdamW or ZenFlowOptimizer")
        columns = (matrix_shape(p.shape)[1],)
        shapes = {"selected": columns, "column_steps": columns, "window": (len(NO_WINDOW),), "vote": (len(NO_VOTE),)}
        shapes["schedule"] = (SCHEDULE_BYTES,)
        for key in ("exp_avg", "exp_avg_sq", "master", "last_written", "pending_output", "window_sum", *shapes):
            shape = shapes.get(key, tuple(p.shape))
            if key in state and tuple(state[key].shape) != shape:
                raise ValueError(
                    f"the state of {name(p)} has {key} of shape {tuple(state[key].shape)}, but a parameter of shape "
                    f"{tuple(p.shape)} needs {shape}"
                )


def check_complete(states, scalars, name):
    """Raises for states that have lost what belongs to the schedule that they were saved under, as happens where
    torch.distributed.checkpoint loads them by the names of an optimizer with another one."""
    wanted = [("deferred_rule", '"mean"', MEAN_NAMES)] if scalars.get("mean") else []
    wanted += [("update_interval", '"auto"', AUTOMATIC_NAMES)] if scalars.get("automatic") else []
    for setting, value, names in wanted:
        for p, state in states.items():
            if lost := [key for key in names if key not in state]:
                raise ValueError(
                    f"the state of {name(p)} was saved with {setting}={value} and has lost its {lost[0]!r}: load it "
                    f"into an optimizer with {setting}={value}, call flush(), and save it again"
                )


def merge_groups(groups, saved_groups):
    """The loaded groups around the live parameters; topk_ratio and split stay the constructor's."""
    merged = []
    for group, saved in zip(groups, saved_groups, strict=True):
        new = {key: value for key, value in saved.items() if key not in ADAMW_ONLY}
        new |= {key: group[key] for key in group if key not in new or key == "params" or key in LAYOUT_KEYS}
        merged.append(new)
    return merged


def saved_settings(settings, scalars):
    """The settings that a checkpoint's open window was begun under; `settings` itself if they agree."""
    if not scalars:
        return settings
    automatic, interval = bool(scalars["automatic"]), int(scalars["update_interval"])
    saved = {
        "update_interval": "auto" if automatic else interval,
        "deferred_rule": "mean" if scalars["mean"] else "adamw",
        "min_offload_numel": int(scalars["min_offload_numel"]),
    }
    if all(getattr(settings, name) == value for name, value in saved.items()):
        return settings
    if automatic:
        saved["max_update_interval"] = interval
    return dataclasses.replace(
        settings, **saved, update_delay=int(scalars["update_delay"]), select_interval=None, steps_per_epoch=None
    )


def saved_clock(states, scalars):
    """(step, step in the window, last selection, next publication); AdamW's steps count towards warm-up."""
    if scalars:
        return tuple(int(scalars[name]) for name in ("step", "window_step", "last_selection", "publish_at"))
    return (max((int(state["step"]) for state in states.values()), default=0), 0, 0, 0)


def schedule_scalars(settings, clock, fitted):
    """What travels in the saved parameter groups; plain numbers. fitted: the schedule was measured, and is kept."""
    step, window_step, last_selection, publish_at = clock
    return {
        PREFIX + "format": FORMAT,
        PREFIX + "step": step,
        PREFIX + "window_step": window_step,
        PREFIX + "last_selection": last_selection,
        PREFIX + "publish_at": publish_at,
        PREFIX + "update_interval": int(settings.longest_interval),
        PREFIX + "automatic": settings.automatic,
        PREFIX + "fitted": fitted,
        PREFIX + "update_delay": int(settings.update_delay),
        PREFIX + "mean": settings.deferred_rule == "mean",
        PREFIX + "min_offload_numel": int(settings.min_offload_numel),
    }


def without_live_tensors(groups):
    """Parameter groups with copies of their tensors, such as a learning rate; one that groups share stays shared."""
    copies = {}

    def copy_of(value):
        return copies.setdefault(id(value), value.detach().clone()) if isinstance(value, torch.Tensor) else value

    return [{key: copy_of(value) for key, value in group.items()} for group in groups]


def schedule_tensor(scalars):
    """The schedule's scalars as a tensor, for each parameter's state."""
    text = json.dumps(scalars).encode()
    return torch.frombuffer(bytearray(text.ljust(SCHEDULE_BYTES)), dtype=torch.uint8)


def take_scalars(groups, states):
    """Removes the schedule's scalars from loaded parameter groups; returns those of the first, without the prefix, or
    those of a parameter where the groups have lost theirs."""
    taken = [{key: group.pop(key) for key in list(group) if key.startswith(PREFIX)} for group in groups]
    scalars = taken[0] if taken else {}
    schedule = next((state["schedule"] for state in states.values() if "schedule" in state), None)
    if not scalars and schedule is not None:
        scalars = json.loads(bytes(schedule.tolist()))
    scalars = {key[len(PREFIX) :]: value for key, value in scalars.items()}
    if scalars.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"the checkpoint has ZenFlow format {scalars['format']}, this version reads {FORMAT}: update zenflow"
        )
    return scalars
