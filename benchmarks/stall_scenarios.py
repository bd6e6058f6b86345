# SPDX-License-Identifier: Apache-2.0
"""What bench_stall.py simulates: a GPU's step, its link and its host, and how they are scaled to this machine.

A scenario says, for one GPU and its share of the host: the device time of a step D, the bytes that all gradients have
(and all weights), the link's bandwidth B each way, and the time H that a host AdamW needs for every parameter once.
Here H is what our own update takes for this benchmark's parameters, measured in the same run, and the rest follows:

    device time here = H here * D / H        link here = bytes here / (device time here * copy / D),  copy = bytes / B

So host update : device work : copies are those of the scenario. H is either taken from a published synchronous step T,
H = T - D - copy (gradients leave while backward runs, so that only the weights' way back is waited for), or from memory
bandwidth, H = 28 bytes * parameters / (0.8 * bandwidth): master and both moments read and written, a bf16 gradient read
and a bf16 weight written.
"""

from dataclasses import dataclass

BYTES_PER_UPDATE = 28
SHARE_OF_PEAK = 0.8  # of memory bandwidth that streams reach
DEVICE_MEMORY_TO_LINK = 60  # bandwidths, A100: 1555 GB/s of memory to 25 GB/s of PCIe 4 x16; H100: 3350 to 50


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        title: in words, with where the numbers are from.
        device: D, seconds.
        copy: seconds in which all gradients, or all weights, cross the link.
        host: H, seconds.
    """

    title: str
    device: float
    copy: float
    host: float

    def scaled(self, host_seconds_here, bytes_here):
        """(device seconds of a step, link bytes per second) here."""
        device = host_seconds_here * self.device / self.host
        return device, bytes_here / (device * self.copy / self.device)


def published(title, parameters, link, device, synchronous):
    copy = 2 * parameters / link
    return Scenario(title, device, copy, synchronous - device - copy)


def by_bandwidth(title, parameters, link, device, bandwidth):
    return Scenario(title, device, 2 * parameters / link, BYTES_PER_UPDATE * parameters / (SHARE_OF_PEAK * bandwidth))


LLAMA, QWEN = 6.74e9 / 4, 1.54e9 / 2  # parameters of one GPU's share
PCIE4, PCIE5 = 25e9, 50e9

SCENARIOS = {
    "a100": published(
        "Llama-2-7B, a quarter of four A100s and their host; device 0.66 s, synchronous step 6.79 s (arXiv 2505.12242)",
        LLAMA, PCIE4, 0.66, 6.79,
    ),
    "a100-qwen": published(
        "Qwen2.5-1.5B, a half of two A100s and their host; device 0.240 s, synchronous step 1.365 s (DeepSpeed's study "
        "of core binding; ZenFlow there 0.569 s)",
        QWEN, PCIE4, 0.240, 1.365,
    ),
    "a100-ceiling": by_bandwidth(
        "Llama-2-7B, a quarter of four A100s; host update at memory speed: an eighth of 2 x 8 channels of DDR4-3200",
        LLAMA, PCIE4, 0.66, 410e9 / 8,
    ),
    "h100-ceiling": by_bandwidth(
        "Llama-2-7B, a quarter of four H100s; derived, not published: device 0.66 s * 312/989 (peak bf16 rates), "
        "PCIe 5, host update at memory speed: an eighth of 2 x 8 channels of DDR5-4800",
        LLAMA, PCIE5, 0.66 * 312 / 989, 614e9 / 8,
    ),
    "fits": Scenario("a host update that takes 0.3 of a step, with the A100's copies over PCIe 4 x16", 1.0, 0.20, 0.3),
    "fits-slow-link": Scenario("the same over a tenth of the link", 1.0, 2.0, 0.3),
}  # fmt: skip
