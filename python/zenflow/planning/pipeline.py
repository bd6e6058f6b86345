# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: device, link and host as three workers that wait for each other as `step()` makes them.

The device runs forward and backward; gradients of deferred columns leave over the link (down); the host updates them
once a window; the result returns (up). Not for: how fast each worker is, which the caller knows or measures.
"""

import dataclasses

from zenflow.sizes import CHUNK_BYTES, DOWN_CHUNKS, moved_bytes

WINDOWS_BEFORE, WINDOWS_COUNTED = 8, 8  # by then every queue is as long as it gets


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of a steady step; seconds.

    Attributes:
        step_seconds: all of it. stall_seconds: what forward and backward do not account for; its parts:
        host_wait_seconds: the device waits for the host update; upload_seconds: for weights on their way back;
        download_seconds: for gradients on their way out.
        host_update_seconds: what the host works for one window.
        down_seconds: of the link for one step's gradients; up_seconds: for one window's weights.
    """

    step_seconds: float
    stall_seconds: float
    host_wait_seconds: float
    upload_seconds: float
    download_seconds: float
    host_update_seconds: float
    down_seconds: float
    up_seconds: float


def predict(
    *,
    deferred,
    item,
    device_seconds,
    host_bandwidth,
    link_bandwidth,
    update_interval=4,
    update_delay=1,
    deferred_rule="adamw",
    host_buffer="ring",
    moment=4,
    offload_gradients=False,
    forward_share=1 / 3,
):
    """Predicts a steady step, without selections.

    Args:
        deferred: elements in deferred columns.
        item: bytes of an element, of its gradient and of its weight.
        device_seconds: forward and backward, and what else the device does in a step.
        host_bandwidth: bytes per second of the host update, reads and writes as `sizes.moved_bytes` counts them.
        link_bandwidth: bytes per second each way, both at once; or (down, up).
        update_interval, update_delay, deferred_rule, host_buffer, offload_gradients: as for ZenFlowOptimizer, numbers
            and choices made.
        moment: bytes of an element of a moment, as state_dtype says.
        forward_share: of device_seconds; matters with offload_gradients only.

    Returns:
        A `Prediction`.
    """
    down, up = link_bandwidth if isinstance(link_bandwidth, (tuple, list)) else (link_bandwidth, link_bandwidth)
    mean, stream = deferred_rule == "mean", host_buffer == "stream"
    closing, folding = moved_bytes(item, update_interval, mean=mean, stream=stream, moment=moment)
    times = _Times(
        forward=forward_share * device_seconds,
        backward=(1 - forward_share) * device_seconds,
        down=deferred * item / down,
        up=deferred * item / up,
        closing=deferred * closing / host_bandwidth,
        folding=deferred * folding / host_bandwidth,
        in_flight=DOWN_CHUNKS * CHUNK_BYTES / down,
    )
    machine = _Machine(times, update_interval, update_delay, host_buffer == "stream", offload_gradients)
    for _ in range(WINDOWS_BEFORE * update_interval):
        machine.step()
    before = machine.waits()
    steps = WINDOWS_COUNTED * update_interval
    for _ in range(steps):
        machine.step()
    now, *waits = ((b - a) / steps for a, b in zip(before, machine.waits(), strict=True))
    return Prediction(
        step_seconds=now,
        stall_seconds=sum(waits),
        host_wait_seconds=waits[0],
        upload_seconds=waits[1],
        download_seconds=waits[2],
        host_update_seconds=times.closing + (update_interval - 1) * times.folding,
        down_seconds=times.down,
        up_seconds=times.up,
    )


@dataclasses.dataclass(frozen=True)
class _Times:
    """Seconds of each piece of work; in_flight: of the chunks that may wait for the link while backward goes on."""

    forward: float
    backward: float
    down: float
    up: float
    closing: float
    folding: float
    in_flight: float


class _Machine:
    """The three workers. All times are of one clock."""

    def __init__(self, times, interval, delay, stream, hooks):
        self.times, self.interval, self.delay, self.stream, self.hooks = times, interval, delay, stream, hooks
        self.now = 0.0  # how far the device is
        self.down_free = 0.0  # when the link down and the host have done all they were given
        self.host_free = 0.0
        self.count = 0
        self.result_at = {}  # step that publishes: when the host has its result
        self.lane_read = [0.0] * (1 + delay)  # streaming: when the job that reads each step's lane has finished
        self.host_wait = self.upload = self.download = 0.0

    def waits(self):
        return self.now, self.host_wait, self.upload, self.download

    def step(self):
        self.count += 1
        times = self.times
        self.now += times.forward
        publishes = self.count in self.result_at
        if self.hooks:
            self._use_lane()
            began = self.now
            self.now += times.backward
            if publishes:
                self._publish_beside_backward(began)
            self.down_free = max(self.now, max(self.down_free, began) + times.down)
            self.download += self._wait_until(self.down_free - times.in_flight)
        else:
            self.now += times.backward
            self._use_lane()
            self.down_free = max(self.down_free, self.now) + times.down
            if publishes:
                self._publish()
        if self.stream or self.count % self.interval == 0:
            self._submit()

    def _use_lane(self):
        if self.stream:
            self.host_wait += self._wait_until(self.lane_read[self.count % len(self.lane_read)])

    def _submit(self):
        ends = self.count % self.interval == 0
        self.host_free = max(self.host_free, self.now, self.down_free) + (
            self.times.closing if ends else self.times.folding
        )
        self.lane_read[self.count % len(self.lane_read)] = self.host_free
        if ends:
            self.result_at[self.count + self.delay] = self.host_free
            if self.delay == 0:
                self._publish()

    def _publish(self):
        self.host_wait += self._wait_until(self.result_at.pop(self.count))
        self.now += self.times.up
        self.upload += self.times.up

    def _publish_beside_backward(self, began):
        """Each layer waits for its own result, and its weights leave then: the host has the layers in this order."""
        result = self.result_at.pop(self.count)
        self.host_wait += self._wait_until(result)
        self.upload += self._wait_until(max(began, result - self.times.closing) + self.times.up)

    def _wait_until(self, time):
        waited = max(0.0, time - self.now)
        self.now += waited
        return waited
