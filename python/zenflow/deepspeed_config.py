# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration as ZenFlowOptimizer's settings. Needs no DeepSpeed.

A key's meaning and default are those of DeepSpeed 0.19.6. What the keys decide there and here is in
docs/from-deepspeed.md. Not for: launching, batch sizes, precision, schedulers, which DeepSpeed's engine reads too.
"""

import math

from zenflow.json_block import Block, is_auto, load

# What to do about a key that is not used, where there is something to do.
ADVICE = {
    "scheduler": "build the scheduler yourself, on this optimizer (torch.optim.lr_scheduler)",
    "fp16": "scale the loss with torch.amp.GradScaler",
    "bf16": "convert the model yourself (model.to(torch.bfloat16)); masters and moments are float32",
    "bfloat16": "convert the model yourself (model.to(torch.bfloat16)); masters and moments are float32",
    "amp": "use torch.autocast and torch.amp.GradScaler",
    "torch_autocast": "use torch.autocast",
    "zero_optimization.offload_param": "weights and gradients stay where the model has them",
    "zero_optimization.offload_optimizer.nvme_path": "state is kept in host memory",
    "zero_optimization.zenflow.offload": "selected columns keep their state on the device",
    "zero_optimization.zenflow.auto_ratio": 'counts with update_interval "auto" only',
    "zero_optimization.zenflow.steps_per_epoch": "counts where columns are selected by epochs, and is not overridden",
    "optimizer.params.fp32_optimizer_states": "moments are float32",
}


def read(config, overrides):
    """What to pass to ZenFlowOptimizer, and what to tell the user.

    Args:
        config: the configuration as a dict, or the path of a JSON file.
        overrides: settings that win over the configuration, under ZenFlowOptimizer's names.

    Returns:
        (keyword arguments for ZenFlowOptimizer, text of the warning that is due or None). Every key of the
        configuration either became an argument or is named in the text.

    Raises:
        ValueError: a key asks for what ZenFlow does not do, is "auto" where only the user knows the number, or is
            one that DeepSpeed refuses too; the message names its path.
    """
    root = Block(load(config))
    settings, notes = dict(overrides), []
    _read_optimizer(root, settings, notes)
    _read_engine(root, settings, notes)
    zero = root.block("zero_optimization")
    _read_offload(zero, notes)
    if "zenflow" in zero:
        _read_zenflow(zero.block("zenflow"), settings, notes)
    else:
        zero.take("zenflow")
        notes.append("no block zero_optimization.zenflow: ZenFlow's own defaults, not the published ones")
    return settings, _text(notes, root.unused())


def _read_optimizer(root, settings, notes):
    if "optimizer" not in root:
        root.take("optimizer")
        if "lr" not in settings:
            raise ValueError("the configuration has no block optimizer: pass lr=... (and betas, eps, weight_decay)")
        return
    block = root.block("optimizer")
    name = block.take("type")
    if not isinstance(name, str) or name.lower() not in ("adam", "adamw"):
        raise ValueError(f'{block.path("type")} must be "AdamW" or "Adam", got {name!r}: ZenFlow has no other rule')
    params = block.block("params")
    # DeepSpeed's "Adam" is AdamW unless told otherwise, its "AdamW" always.
    if not _take_flag(params, "adam_w_mode", True) and name.lower() == "adam":
        raise ValueError(
            f"{params.path('adam_w_mode')} is false: ZenFlow decouples weight decay, as AdamW does. Set it to true, or "
            "train with torch.optim.Adam"
        )
    if not _take_flag(params, "bias_correction", True):
        raise ValueError(f"{params.path('bias_correction')} is false: ZenFlow always corrects the moments' bias")
    if _take_flag(params, "amsgrad", False):
        raise ValueError(f"{params.path('amsgrad')} is true: ZenFlow has no AMSGrad; use torch.optim.AdamW for it")
    if "max_grad_norm" in params:
        raise ValueError(f"{params.path('max_grad_norm')}: write gradient_clipping instead, as DeepSpeed demands too")
    for key in ("torch_adam", "foreach", "fused"):
        params.take_if(key, True, False)  # other code for the same rule
    params.take_if("fp32_optimizer_states", True)
    params.take_if("capturable", False)
    params.take_if("differentiable", False)
    if "weight_decay" not in params and "weight_decay" not in settings:
        settings["weight_decay"] = 0.0
        notes.append("no optimizer.params.weight_decay: 0, as in DeepSpeed's host optimizer (torch's default is 0.01)")
    for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
        _take_number(params, key, key, settings)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])


def _read_engine(root, settings, notes):
    if "gradient_clipping" not in root and "max_grad_norm" not in settings:
        settings["max_grad_norm"] = 1.0
        notes.append(
            "no gradient_clipping: 1.0, the default of DeepSpeed 0.19.6 (older ones do not clip); max_grad_norm=None "
            "turns it off"
        )
    _take_number(root, "gradient_clipping", "max_grad_norm", settings)
    if settings.get("max_grad_norm") == 0:
        settings["max_grad_norm"] = None
    steps = root.take("gradient_accumulation_steps")
    if "gradient_accumulation_steps" in settings or steps in (None, 1):
        pass
    elif is_auto(steps):
        notes.append(
            'gradient_accumulation_steps is "auto": your loop decides; with offload_gradients=True pass the number'
        )
    else:
        settings["gradient_accumulation_steps"] = steps
        notes.append(
            f"gradient_accumulation_steps is {steps}: accumulate in your loop; a window counts calls of step(), where "
            "DeepSpeed's ZenFlow ignores this number and counts backward passes"
        )
    for key in ("fp16", "bf16", "bfloat16", "amp", "torch_autocast"):
        root.take_if_off(key)


def _read_offload(zero, notes):
    device = None
    if "offload_optimizer" in zero:
        block = zero.block("offload_optimizer")
        device = block.take("device", auto_is_absent=True)
        block.take_if("pin_memory", True)
    if device != "cpu":
        notes.append(
            f'zero_optimization.offload_optimizer.device is "{device or "none"}": deferred columns have their state in '
            "host memory in any case"
        )


def _read_zenflow(block, settings, notes):
    """The schedule, with the published rule and delay and without look-ahead."""
    for key in ("topk_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc"):
        value = block.take(key, auto_is_absent=True)
        if value is not None:
            settings.setdefault(key, value)
    settings.setdefault("deferred_rule", "mean")
    settings.setdefault("lookahead", 0)
    block.take_if("offload", False)

    settings.setdefault("update_interval", block.take("update_interval", "auto"))
    interval = settings["update_interval"]
    if is_auto(interval):
        settings.setdefault("auto_ratio", block.take("auto_ratio", 0.99, auto_is_absent=True))
    if not _take_flag(block, "overlap_step", False):
        settings.setdefault("update_delay", 0)
    elif is_auto(interval):
        settings.setdefault("update_delay", 1)
    elif _is_whole(interval):
        settings.setdefault("update_delay", interval)
    _read_selection(block, settings, notes)


def _read_selection(block, settings, notes):
    strategy = block.take("select_strategy", "auto")
    every = block.take("select_interval", "auto")
    if "select_interval" in settings:
        return
    if strategy not in ("auto", "step", "epoch"):
        raise ValueError(f'{block.path("select_strategy")} must be "auto", "step" or "epoch", got {strategy!r}')
    if strategy == "auto":
        if not is_auto(every):
            raise ValueError(
                f'{block.path("select_interval")} is {every!r}, but select_strategy "auto" selects at each epoch: set '
                'select_strategy to "step" or "epoch"'
            )
        strategy, every = "epoch", 1
    if not _is_whole(every):
        raise ValueError(
            f'{block.path("select_interval")} must be an integer with select_strategy "{strategy}", got {every!r}'
        )
    if strategy == "epoch":
        steps = settings.pop("steps_per_epoch", None)
        if steps is None:
            steps = block.take("steps_per_epoch")
        if steps is None:
            raise ValueError(
                f"{block.path('select_strategy')} selects columns by epochs: pass steps_per_epoch=..., the calls of "
                "step() in an epoch, or select_interval=..., a number of steps"
            )
        if every == 1:
            settings.update(select_interval="epoch", steps_per_epoch=steps)
            return
        every *= steps
    interval = settings["update_interval"]
    settings["select_interval"] = every
    if _is_whole(interval) and interval > 0 and every % interval:
        settings["select_interval"] = math.ceil(every / interval) * interval
        notes.append(
            f"columns are selected every {settings['select_interval']} steps instead of {every}: when a window of "
            f"{interval} steps starts"
        )


def _take_flag(block, key, default):
    value = block.take(key, default, auto_is_absent=True)
    if not isinstance(value, bool):
        raise ValueError(f"{block.path(key)} must be true or false, got {value!r}")
    return value


def _take_number(block, key, name, settings):
    """Gives the setting `name` the key's value, unless it was overridden."""
    value = block.take(key)
    if value is None or name in settings:
        return
    if is_auto(value):
        raise ValueError(
            f'{block.path(key)} is "auto", for Hugging Face\'s Trainer to fill in: write the value, or pass {name}=...'
        )
    settings[name] = value


def _text(notes, unused):
    """The warning's text, or None."""
    plain = []
    for path, close in unused:
        if close:
            notes.append(f"{path} is not used; did you mean {close}?")
        elif path in ADVICE:
            notes.append(f"{path} is not used: {ADVICE[path]}")
        else:
            plain.append(path)
    if plain:
        notes.append(f"not used, ZenFlow has nothing like it: {', '.join(plain)}")
    return "\n- ".join(["DeepSpeed configuration:", *notes]) if notes else None


def _is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)
