# SPDX-License-Identifier: Apache-2.0
"""The command line of finetune.py: its options, ZenFlow's settings among them, and one-line errors."""

import argparse
import ast
import inspect
import os
import sys
from pathlib import Path

try:
    from zenflow import ZenFlowOptimizer
except ImportError as error:
    ZenFlowOptimizer, no_zenflow = None, error

OUTPUT = Path(os.path.relpath(Path(__file__).parent / "output"))

# ZenFlow's settings become flags, with the optimizer's own defaults; what the more important ones do:
KNOBS = {
    "topk_ratio": "share of the gradient columns that is updated on the device at every step",
    "update_interval": "steps whose gradients of the other columns go into one host update",
    "select_interval": "steps between selections; here 4 windows, to show several hand-overs in a short run",
    "update_delay": "steps that the host has for an update before it must be visible",
    "deferred_rule": "adamw, or mean as published",
    "lookahead": "steps by which deferred weights are predicted ahead; auto is the update delay",
    "full_warm_up_rounds": "first steps that update every column at once",
    "min_offload_numel": "parameters with fewer elements are never split",
    "num_threads": "threads of the host update",
    "host_buffer": "ring (faster), stream (less host memory) or auto",
    "offload_gradients": "True: gradients leave during backward and their memory is freed",
}


def stop(message):
    """Say in one line what to do, and leave."""
    print(f"finetune.py: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        stop(f"{message} (--help lists the options)")


def literal(text):
    """A knob's value as Python would read it, else the text itself: 0.1, 4, None, auto."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_arguments(description):
    """The options of finetune.py; `knobs` holds what goes to ZenFlowOptimizer alone."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what to train").add_argument
    add("--model", help="folder or hub name of a causal LM (SmolLM2-135M, converted at first use)")
    add("--data", type=Path, help="UTF-8 text file (the reference text that comes with Python)")
    add("--optimizer", choices=("adamw", "zenflow", "both"), default="both", help="(%(default)s)")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    add = parser.add_argument_group("training, the same for every optimizer").add_argument
    add("--steps", type=positive, default=80, help="(%(default)s)")
    add("--batch-size", type=positive, default=4, help="(%(default)s)")
    add("--sequence-length", type=positive, default=64, help="tokens per example (%(default)s)")
    add("--lr", type=float, default=5e-5, help="peak, after a short warm-up; then cosine to 0 (%(default)s)")
    add("--betas", type=float, nargs=2, default=(0.9, 0.999), help="(%(default)s)")
    add("--eps", type=float, default=1e-8, help="(%(default)s)")
    add("--weight-decay", type=float, default=1e-2, help="(%(default)s)")
    add("--max-grad-norm", type=float, help="clip gradients to this global norm (no clipping)")
    add("--seed", type=int, default=0, help="fixes the order of the data (%(default)s)")
    add("--eval-batches", type=positive, default=12, help="(%(default)s)")
    add("--eval-interval", type=positive, help="steps between evaluations (a quarter of --steps)")
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=OUTPUT, help="folder for plot and JSON (%(default)s)")
    add("--save", type=Path, help="folder for the tuned model; with both optimizers one below it for each")
    add = parser.add_argument_group("ZenFlow" if ZenFlowOptimizer else "ZenFlow (not installed)").add_argument
    knobs = []
    for knob in inspect.signature(ZenFlowOptimizer).parameters.values() if ZenFlowOptimizer else ():
        if knob.kind is knob.KEYWORD_ONLY and knob.name not in ("max_grad_norm", "maximize"):
            note = f"{KNOBS.get(knob.name, 'see ZenFlowOptimizer')} (%(default)s)"
            add(f"--{knob.name.replace('_', '-')}", type=literal, default=knob.default, help=note)
            knobs.append(knob.name)

    args, unknown = parser.parse_known_args()
    if args.optimizer != "adamw" and ZenFlowOptimizer is None:
        stop(f"zenflow is not installed ({no_zenflow}): run `pip install .`, or use --optimizer adamw")
    if unknown:
        parser.error(f"unknown option {unknown[0]}")
    args.knobs = {name: vars(args).pop(name) for name in knobs}
    interval = args.knobs.get("update_interval")
    if args.knobs.get("select_interval", 0) is None and isinstance(interval, int):
        args.knobs["select_interval"] = 4 * interval
    return args
