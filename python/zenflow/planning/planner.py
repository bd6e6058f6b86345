# SPDX-License-Identifier: Apache-2.0
"""`zenflow.plan()`: whether a model fits, what moves, and how long a step takes, before anything is trained.

Needs torch only for a live model, and transformers only for configs that are not like a llama's. The words are
docs/memory.md's for bytes and `pipeline.predict`'s for times. Not for: choosing in mid-training (fit.py).
"""

import contextlib
import dataclasses
import inspect
import math
import numbers
import os

from zenflow.fit import HEADROOM
from zenflow.planning.forecast import Forecast
from zenflow.planning.host_speed import measure_host_bandwidth
from zenflow.planning.model_bytes import Limits, ModelBytes
from zenflow.planning.model_shapes import item_of, of_config, of_number, of_parameters
from zenflow.planning.pipeline import predict
from zenflow.planning.units import format_bytes, parse_bytes, parse_count, parse_rate
from zenflow.settings import Settings, unexpected

PCIE4_X16 = 25e9  # bytes per second each way of pinned copies


def plan(
    model=None,
    *,
    params=None,
    dtype=None,
    gpu_memory=None,
    host_memory=None,
    link_bandwidth=PCIE4_X16,
    host_bandwidth=None,
    step_seconds=None,
    tflops=None,
    tokens=None,
    gpus=1,
    topk_ratio=0.1,
    update_interval=None,
    update_delay=None,
    **settings,
):
    """Says what training a model with ZenFlowOptimizer would take.

    Args:
        model: a torch.nn.Module, an iterable of parameters, an optimizer of them, or the path of a Hugging Face
            config.json or its folder.
        params: in place of a model, its number of parameters: 7e9 or "7B".
        dtype: of weights and gradients: "bf16", "fp16" or "fp32". None: the model's own; bf16 for a number.
        gpu_memory, host_memory: what there is, in bytes or as "24GB" or "24GiB". None: not compared.
        link_bandwidth: bytes per second each way between GPU and host, or "25GB/s". Default: PCIe 4 x16.
        host_bandwidth: of the host update, reads and writes, or "100GB/s". None: measured here, in a second or two.
        step_seconds: forward and backward on the GPU, without optimizer. None: from `tflops` that the GPU sustains and
            `tokens` per step (6 floating-point operations for each parameter and token); or unknown.
        gpus: processes, with a GPU each, that share the host's memory and bandwidth.
        topk_ratio, update_delay, settings: as for ZenFlowOptimizer.
        update_interval: likewise. None or "fit": the smallest that hides the host update, or the nearest to 4 if
            step_seconds is unknown.

    Returns:
        A `Forecast`; print it.

    Raises:
        ValueError: a value is out of its range, or the config is not known; the message says what to do.
    """
    if (model is None) == (params is None):
        raise ValueError("plan() needs a model (or a config's path), or params=, and not both")
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(settings.keys() - known):
        raise unexpected("plan", unknown[0], {*known, *inspect.signature(plan).parameters})
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus must be an integer >= 1, got {gpus!r}")
    if not 0.0 <= topk_ratio <= 1.0:
        raise ValueError(f"topk_ratio must be in [0, 1], got {topk_ratio!r}")
    shapes = _shapes_of(model, params, None if dtype is None else item_of(dtype))
    seconds = _device_seconds(step_seconds, tflops, tokens, shapes.count)
    choices = _schedules(update_interval, update_delay, settings)
    link = parse_rate(link_bandwidth, "link_bandwidth")
    given = None if host_bandwidth is None else parse_rate(host_bandwidth, "host_bandwidth") / gpus
    limits = Limits(
        gpu=None if gpu_memory is None else parse_bytes(gpu_memory, "gpu_memory"),
        host=None if host_memory is None else parse_bytes(host_memory, "host_memory") // gpus,
    )

    sizing = ModelBytes(shapes, topk_ratio, limits)
    machine = {"device_seconds": seconds, "link_bandwidth": link, "host_bandwidth": given}
    measured = _default_of(choices)
    if given is None:
        machine["host_bandwidth"] = _measured_rate(sizing, measured) / gpus
    chosen = _choose(choices, sizing, machine)
    # A longer window reads more lanes at once, which may go slower: measured too, where there is memory for it.
    while given is None and chosen.longest_interval > measured.longest_interval:
        measured = chosen
        with contextlib.suppress(MemoryError):
            machine["host_bandwidth"] = _measured_rate(sizing, measured) / gpus
        chosen = _choose(choices, sizing, machine)
    smallest = _first_hiding(_schedules(None, None, settings), sizing, machine)
    return _forecast(
        sizing,
        chosen,
        machine,
        gpus=gpus,
        host_measured=given is None and machine["host_bandwidth"] < math.inf,
        smallest_hiding=smallest and (smallest.update_interval, smallest.update_delay),
    )


def _shapes_of(model, params, item):
    if params is not None:
        return of_number(parse_count(params, "params"), item or 2)
    if isinstance(model, numbers.Real):
        raise ValueError(f"model must be a model or a config's path, got {model!r}: did you mean params={model!r}?")
    if isinstance(model, (str, os.PathLike)):
        return of_config(model, item)
    return of_parameters(model, item)


def _device_seconds(step_seconds, tflops, tokens, count):
    if step_seconds is not None:
        if not isinstance(step_seconds, numbers.Real) or not 0.0 < step_seconds < math.inf:
            raise ValueError(f"step_seconds must be a number > 0, got {step_seconds!r}")
        return float(step_seconds)
    if (tflops is None) != (tokens is None):
        raise ValueError("tflops and tokens go together: what the GPU sustains, and tokens per step")
    if tflops is None:
        return None
    if not 0.0 < tflops < math.inf:
        raise ValueError(f"tflops must be a number > 0, got {tflops!r}")
    return 6 * count * parse_count(tokens, "tokens") / (1e12 * tflops)


def _schedules(update_interval, update_delay, settings):
    """All `Settings` that these leave open, with numbers for a schedule, in the order in which they are tried."""
    if update_interval not in (None, "fit"):
        base = Settings(update_interval=update_interval, update_delay=update_delay, **settings)
        if not base.measured:
            return [base]
        return [base.with_schedule(update_interval, delay) for delay in range(1, update_interval + 1)]
    base = Settings(update_interval="fit", **settings)
    delays = None if update_delay in (None, "auto") else {update_delay}
    pairs = [
        base.with_schedule(interval, delay)
        for interval in range(1, base.longest_interval + 1)
        for delay in (range(1, interval + 1) if delays is None else delays)
        if delay <= interval
    ]
    if not pairs:
        raise ValueError(
            f"update_delay must be at most max_update_interval, got update_delay={update_delay} with "
            f"max_update_interval={base.max_update_interval}"
        )
    return pairs


def _measured_rate(sizing, settings):
    """Infinite where nothing is deferred."""
    if not sizing.deferred_bytes(settings):
        return math.inf
    stream = sizing.host_buffer(settings) == "stream"
    return measure_host_bandwidth(sizing.work(settings)["item"], settings, stream)


def _hides(settings, sizing, machine):
    """Whether no step waits for the host, with some time to spare for what a plan does not know."""
    rushed = {**machine, "host_bandwidth": HEADROOM * machine["host_bandwidth"]}
    return predict(**sizing.work(settings), **rushed).host_wait_seconds < 1e-6 * machine["device_seconds"]


def _default_of(schedules):
    """The nearest to the optimizer's own default."""
    return min(schedules, key=lambda s: (abs(s.longest_interval - Settings.update_interval), s.update_delay))


def _first_hiding(schedules, sizing, machine):
    if machine["device_seconds"] is None:
        return None
    return next((s for s in schedules if sizing.fits_host(s) and _hides(s, sizing, machine)), None)


def _choose(schedules, sizing, machine):
    """The smallest that hides the host, else the fastest for which there is memory: with the ring that is the largest,
    as update_interval="fit" takes it. The default, where the device's time is not known."""
    if len(schedules) == 1:
        return schedules[0]
    if machine["device_seconds"] is None:
        return _default_of(schedules)
    if hiding := _first_hiding(schedules, sizing, machine):
        return hiding
    fitting = [s for s in schedules if sizing.fits_host(s)] or schedules[:1]
    return min(fitting, key=lambda settings: predict(**sizing.work(settings), **machine).step_seconds)


def _forecast(sizing, settings, machine, **facts):
    work, stream = sizing.work(settings), sizing.host_buffer(settings) == "stream"
    weights, gradients, state, space = sizing.device_memory(settings)
    moved, known = sizing.deferred_bytes(settings), machine["device_seconds"] is not None
    timed = predict(**work, **{**machine, "device_seconds": machine["device_seconds"] or 1.0})
    host = sizing.host_peak(settings, stream)
    forecast = Forecast(
        parameters=sizing.model.count,
        source=sizing.model.source,
        topk_ratio=sizing.topk_ratio,
        update_interval=settings.longest_interval,
        update_delay=settings.update_delay,
        automatic=settings.automatic,
        max_update_interval=settings.max_update_interval,
        deferred_rule=settings.deferred_rule,
        host_buffer=work["host_buffer"],
        offload_gradients=settings.offload_gradients,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_device_bytes=state,
        device_work_bytes=space,
        host_bytes=sizing.host_bytes(settings, stream),
        host_peak_bytes=host,
        gpu_memory=sizing.limits.gpu,
        host_memory=sizing.limits.host,
        down_bytes=moved,
        up_bytes=moved / settings.longest_interval,
        link_bandwidth=machine["link_bandwidth"],
        host_bandwidth=machine["host_bandwidth"] if machine["host_bandwidth"] < math.inf else None,
        device_seconds=machine["device_seconds"],
        host_update_seconds=timed.host_update_seconds,
        down_seconds=timed.down_seconds,
        up_seconds=timed.up_seconds,
        prediction=timed if known else None,
        advice=(),
        **facts,
    )
    return dataclasses.replace(forecast, advice=tuple(_advice(forecast, sizing, settings)))


def _advice(forecast, sizing, settings):
    """What would make it fit, and what each would leave to do."""
    if forecast.fits_gpu is False or forecast.is_tight:
        leaving = dataclasses.replace(settings, offload_gradients=True)
        fewer = ModelBytes(sizing.model, 0.01, sizing.limits)
        if not settings.offload_gradients:
            yield f"GPU: offload_gradients=True takes {format_bytes(sum(sizing.device_memory(leaving)))} there"
        if forecast.topk_ratio > 0.01:
            yield f"GPU: topk_ratio=0.01 takes {format_bytes(sum(fewer.device_memory(settings)))} there"
        if not settings.offload_gradients and forecast.topk_ratio > 0.01:
            yield f"GPU: both take {format_bytes(sum(fewer.device_memory(leaving)))} there"
        if max(sizing.model.items, default=2) > 2:
            yield "GPU and host: bfloat16 parameters take half of the bytes of weights, gradients and lanes"
        if forecast.is_tight:
            yield "GPU: activations and CUDA itself need more than what is left"
        else:
            over = forecast.device_bytes - forecast.gpu_memory
            yield f"GPU: {format_bytes(over)} more memory than there is, or a smaller model"
    if forecast.fits_host is False:
        stream = forecast.host_buffer == "stream"
        if not stream:
            yield f'host: host_buffer="stream" takes {format_bytes(sizing.host_peak(settings, True))} there'
            shortest = settings.with_schedule(1, min(1, settings.update_delay))
            yield f"host: update_interval=1 takes {format_bytes(sizing.host_peak(shortest, False))} there"
        if settings.moment_bytes > 2:
            halved = dataclasses.replace(settings, state_dtype="bfloat16")
            yield f"host: state_dtype=torch.bfloat16 takes {format_bytes(sizing.host_peak(halved, stream))} there"
        if forecast.topk_ratio < 0.3:
            other = ModelBytes(sizing.model, 0.3, sizing.limits).host_peak(settings, stream)
            yield f"host: topk_ratio=0.3 takes {format_bytes(other)} there, and more of the GPU"
        yield f"host: {format_bytes(forecast.host_peak_bytes - forecast.host_memory)} more memory than there is"
    if forecast.prediction and not forecast.hides_host:
        if forecast.smallest_hiding:
            interval, delay = forecast.smallest_hiding
            yield f"stall: update_interval={interval}, update_delay={delay} hide the host update"
        else:
            longest = forecast.max_update_interval
            yield (
                f"stall: no interval up to max_update_interval={longest} hides the host update; a longer step (a "
                "larger batch), a larger topk_ratio or a larger max_update_interval may"
            )
