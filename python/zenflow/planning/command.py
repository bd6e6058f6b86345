# SPDX-License-Identifier: Apache-2.0
"""The arguments of `python -m zenflow plan`."""

import json

from zenflow.planning.planner import plan

NUMBERS = {
    "--params": "number of parameters: 7e9, 7B",
    "--gpu-memory": "of one GPU: 24GB (10**9), 24GiB (2**30)",
    "--host-memory": "for the optimizer's state: 128GB",
    "--link-bandwidth": "each way between GPU and host, default 25GB/s (PCIe 4 x16)",
    "--host-bandwidth": "of the host update, reads and writes: 100GB/s; default: measured here, in a second or two",
    "--tokens": "per step, with --tflops",
}


def add_arguments(parser):
    parser.add_argument("model", nargs="?", help="a Hugging Face config.json, or the folder that it is in")
    for name, words in NUMBERS.items():
        parser.add_argument(name, help=words)
    parser.add_argument("--dtype", help="bf16, fp16 or fp32; default: the config's, else bf16")
    parser.add_argument("--step-seconds", type=float, help="forward and backward on the GPU, without optimizer")
    parser.add_argument("--tflops", type=float, help="that the GPU sustains, in place of --step-seconds")
    parser.add_argument("--gpus", type=int, default=1, help="processes that share the host, with a GPU each")
    parser.add_argument("--topk-ratio", type=float, default=0.1, help="share of columns updated at every step")
    parser.add_argument("--update-interval", type=_number_or_word, help="default: the smallest that hides the host")
    parser.add_argument("--update-delay", type=_number_or_word, help="steps until a window's result shows, or auto")
    parser.add_argument("--max-update-interval", type=int, default=16, help="longest window that is tried; default 16")
    parser.add_argument("--min-offload-numel", type=int, default=65536, help="smaller parameters are not split")
    parser.add_argument("--deferred-rule", default="adamw", help="adamw or mean")
    parser.add_argument("--host-buffer", default="auto", help="auto, ring or stream")
    parser.add_argument("--state-dtype", default="float32", help="of the host's moments: float32 or bfloat16")
    parser.add_argument("--offload-gradients", action="store_true", help="gradients leave during backward")
    parser.add_argument("--num-threads", type=int, help="of the host update, where it is measured")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed):
    """Prints the forecast. Raises as `plan` does."""
    if (parsed.model is None) == (parsed.params is None):
        raise ValueError("name a model's config.json, or give --params, and not both")
    options = {name: value for name, value in vars(parsed).items() if name not in ("command", "json", "link_bandwidth")}
    if parsed.link_bandwidth is not None:
        options["link_bandwidth"] = parsed.link_bandwidth
    forecast = plan(**options)
    print(json.dumps(forecast.as_dict(), indent=2) if parsed.json else forecast)


def _number_or_word(text):
    return int(text) if text.lstrip("-").isdigit() else text
