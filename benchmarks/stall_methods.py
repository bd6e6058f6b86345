# SPDX-License-Identifier: Apache-2.0
"""The ways to train that bench_stall.py compares."""

from dataclasses import dataclass

TOPK_RATIO = 0.1
FORWARD_SHARE = 1 / 3  # of the device time of forward and backward
NEVER = 1 << 30  # steps between selections: the selection does not change here, as it hardly does in the literature


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        settings: of ZenFlowOptimizer; None: no optimizer at all.
    """

    label: str
    settings: dict | None


def _leaving(**settings):
    return {"offload_gradients": True, **settings}


METHODS = {
    "none": Method("no offload: forward and backward alone", None),
    "synchronous": Method(
        "synchronous offload (ZeRO-Offload's schedule)",
        _leaving(topk_ratio=0, update_interval=1, update_delay=0, lookahead=0, select_interval=NEVER),
    ),
    "delay-by-one": Method(
        "the same, one step late",
        _leaving(topk_ratio=0, update_interval=1, update_delay=1, lookahead=0, select_interval=NEVER),
    ),
    "published": Method(
        "ZenFlow as published (mean, S=4, delay 4)",
        _leaving(update_interval=4, update_delay=4, deferred_rule="mean", lookahead=0, select_interval=NEVER),
    ),
    "default": Method("zenflow, default (S=4, delay 1)", {"select_interval": NEVER}),
    "leaving": Method("zenflow, offload_gradients (S=4, delay 1)", _leaving(select_interval=NEVER)),
    "fit": Method('zenflow, offload_gradients, "fit"', _leaving(update_interval="fit", select_interval=NEVER)),
}
