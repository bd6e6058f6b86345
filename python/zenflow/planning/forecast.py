# SPDX-License-Identifier: Apache-2.0
"""What `zenflow.plan()` returns, and how it reads."""

import dataclasses

from zenflow.planning.pipeline import Prediction
from zenflow.planning.units import format_bytes, format_count, format_seconds


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Of one process with one GPU, in bytes and seconds. `print()` it.

    Attributes:
        parameters: that are trained; source: where their shapes come from.
        topk_ratio, update_interval, update_delay, deferred_rule, host_buffer, offload_gradients: what it is for; what
            was left open is chosen. automatic: update_interval="auto": the interval is the longest window.
        max_update_interval: up to which intervals were tried.
        weight_bytes, gradient_bytes, optimizer_device_bytes, device_work_bytes: on the GPU: gradients at their most,
            selected and unsplit state, chunks on their way and column maps. Activations are not in it.
        host_bytes: what stats().host_bytes will be. host_peak_bytes: what the first step asks the host for.
        gpu_memory, host_memory: what there is for this process; None: not known.
        down_bytes, up_bytes: that cross the link in a step, on average.
        link_bandwidth, host_bandwidth: bytes per second for this process; host_measured: whether here.
            host_bandwidth is None where nothing is deferred, so that nothing was measured.
        device_seconds: forward and backward; None: not known.
        host_update_seconds: for one window. down_seconds: of the link for one step's gradients; up_seconds: for one
            window's weights.
        prediction: of a step's time (zenflow.planning.Prediction); None where device_seconds is.
        hides_host: whether no step waits for the host; smallest_hiding: the smallest (update_interval, update_delay)
            that does so and fits; None: there is none, or device_seconds is not known.
        gpus: processes that share the host.
        advice: what to change where something does not fit, or stalls.
    """

    parameters: int
    source: str
    topk_ratio: float
    update_interval: int
    update_delay: int
    automatic: bool
    max_update_interval: int
    deferred_rule: str
    host_buffer: str
    offload_gradients: bool
    weight_bytes: int
    gradient_bytes: int
    optimizer_device_bytes: int
    device_work_bytes: int
    host_bytes: int
    host_peak_bytes: int
    gpu_memory: int | None
    host_memory: int | None
    down_bytes: int
    up_bytes: float
    link_bandwidth: float
    host_bandwidth: float | None
    host_measured: bool
    device_seconds: float | None
    host_update_seconds: float
    down_seconds: float
    up_seconds: float
    prediction: Prediction | None
    smallest_hiding: tuple[int, int] | None
    gpus: int
    advice: tuple[str, ...]

    @property
    def device_bytes(self):
        """On the GPU, without activations."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_device_bytes + self.device_work_bytes

    @property
    def fits_gpu(self):
        return None if self.gpu_memory is None else self.device_bytes <= self.gpu_memory

    @property
    def is_tight(self):
        """Whether it fits, and leaves less than a twentieth of the GPU to activations and everything else."""
        return bool(self.fits_gpu) and self.gpu_memory - self.device_bytes < self.gpu_memory / 20

    @property
    def fits_host(self):
        return None if self.host_memory is None else self.host_peak_bytes <= self.host_memory

    @property
    def hides_host(self):
        return self.prediction is not None and self.prediction.host_wait_seconds < 1e-6 * self.device_seconds

    def as_dict(self):
        """Plain values, for JSON."""
        derived = ("device_bytes", "fits_gpu", "fits_host", "hides_host")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self):
        rows = [
            ("model", f"{format_count(self.parameters)} parameters ({self.source})"),
            ("schedule", self._schedule()),
            ("GPU memory", self._gpu()),
            ("", self._compared(self.device_bytes, self.gpu_memory, self._rest_of_gpu())),
            ("host memory", f"{format_bytes(self.host_peak_bytes)} ({self.host_buffer})"),
            ("", self._compared(self.host_peak_bytes, self.host_memory, "for everything else")),
            (
                "link",
                f"{format_bytes(self.down_bytes)} down, {format_bytes(self.up_bytes)} up a step on average; "
                f"at {self.link_bandwidth / 1e9:.3g} GB/s each way",
            ),
            ("host update", self._host_update()),
            *self._time(),
            *(("to change", line) for line in self.advice),
            *(("note", line) for line in self._notes()),
        ]
        return "\n".join(["ZenFlow plan", *(f"  {name:<14} {value}" for name, value in rows if value)])

    def _schedule(self):
        steps = "1 step" if self.update_interval == 1 else f"{self.update_interval} steps"
        window = f"windows of {'at most ' if self.automatic else ''}{steps}"
        return (
            f"{window}, visible {self.update_delay} later; topk_ratio {self.topk_ratio:g}"
            + (", gradients leave in backward" if self.offload_gradients else "")
            + (", mean rule" if self.deferred_rule == "mean" else "")
        )

    def _gpu(self):
        return (
            f"{format_bytes(self.device_bytes)}: weights {format_bytes(self.weight_bytes)}, gradients "
            f"{format_bytes(self.gradient_bytes)}, optimizer {format_bytes(self.optimizer_device_bytes)}, on the way "
            f"{format_bytes(self.device_work_bytes)}"
        )

    def _rest_of_gpu(self):
        return "for activations" + (": TOO LITTLE" if self.is_tight else "")

    @staticmethod
    def _compared(size, limit, rest):
        if limit is None:
            return ""
        if size > limit:
            return f"DOES NOT FIT in {format_bytes(limit)}: {format_bytes(size - limit)} short"
        return f"fits in {format_bytes(limit)}: {format_bytes(limit - size)} left {rest}"

    def _host_update(self):
        if self.host_bandwidth is None:
            return "none: no column is deferred"
        measured = " (measured here)" if self.host_measured else ""
        return f"{format_seconds(self.host_update_seconds)} a window, at {self.host_bandwidth / 1e9:.3g} GB/s{measured}"

    def _time(self):
        if self.prediction is None:
            wait = (
                f"max(0, {format_seconds(self.host_update_seconds)} - {self.update_delay} x forward and backward) + "
                f"{format_seconds(self.up_seconds)} for weights"
            )
            yield "stall", f"about ({wait}) / {self.update_interval} a step; give --step-seconds for more"
            return
        p = self.prediction
        yield "step", f"{format_seconds(p.step_seconds)}, {format_seconds(self.device_seconds)} of it on the device"
        yield (
            "stall",
            f"{format_seconds(p.stall_seconds)} a step ({p.stall_seconds / p.step_seconds:.1%}): host "
            f"{format_seconds(p.host_wait_seconds)}, weights {format_seconds(p.upload_seconds)}, gradients "
            f"{format_seconds(p.download_seconds)}",
        )
        if self.smallest_hiding is None:
            yield (
                "hides the host",
                f"no interval up to {self.max_update_interval}{' that fits' * bool(self.host_memory)}",
            )
        else:
            interval, delay = self.smallest_hiding
            yield "hides the host", f"from update_interval={interval}, update_delay={delay}"

    def _notes(self):
        yield "activations, and what torch keeps beside tensors, come on top of GPU memory"
        if self.gpus > 1:
            yield (
                f"{self.gpus} separate trainings share the host, each with its part of memory and bandwidth; one "
                "training over several processes (DDP, FSDP) is not supported yet"
            )
