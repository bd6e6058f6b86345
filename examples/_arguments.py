# SPDX-License-Identifier: Apache-2.0
"""The command line of finetune.py: its options, ZenFlow's settings among them, and one-line errors."""

import argparse
import ast
import inspect
import os
import re
import sys
from pathlib import Path

try:
    from zenflow import ZenFlowOptimizer
except ImportError as error:
    ZenFlowOptimizer, no_zenflow = None, error

OUTPUT = Path(os.path.relpath(Path(__file__).parent / "output"))


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


def described():
    """{setting: what ZenFlowOptimizer's docstring says of it}, for argparse."""
    _, _, arguments = (inspect.getdoc(ZenFlowOptimizer) or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", arguments, re.MULTILINE)
    return {
        name: " ".join(text.split()).rstrip(".").replace("%", "%%")
        for names, text in entries
        for name in names.split(", ")
    }


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
    add("--optimizer", choices=("adamw", "zenflow", "both"), default="both", help="which to train with (%(default)s)")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights (%(default)s)")
    add = parser.add_argument_group("training, the same for every optimizer").add_argument
    add("--steps", type=positive, default=80, help="calls of the optimizer's step() (%(default)s)")
    add("--batch-size", type=positive, default=4, help="examples per step (%(default)s)")
    add("--sequence-length", type=positive, default=64, help="tokens per example (%(default)s)")
    add("--lr", type=float, default=5e-5, help="peak, after a short warm-up; then cosine to 0 (%(default)s)")
    pair = {"nargs": 2, "metavar": ("BETA1", "BETA2"), "default": (0.9, 0.999)}
    add("--betas", type=float, help="how much of each moment a step keeps (0.9 0.999)", **pair)
    add("--eps", type=float, default=1e-8, help="added to the root of the second moment (%(default)s)")
    add("--weight-decay", type=float, default=1e-2, help="weights shrink by lr times this per step (%(default)s)")
    add("--max-grad-norm", type=float, help="clip gradients to this global norm (no clipping)")
    add("--seed", type=int, default=0, help="fixes the order of the data (%(default)s)")
    add("--eval-batches", type=positive, default=12, help="batches of held-out text per evaluation (%(default)s)")
    add("--eval-interval", type=positive, help="steps between evaluations (a quarter of --steps)")
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=OUTPUT, help="folder for plot and JSON (%(default)s)")
    add("--save", type=Path, help="folder for the tuned model; with both optimizers one below it for each")
    add = parser.add_argument_group("ZenFlow" if ZenFlowOptimizer else "ZenFlow (not installed)").add_argument
    # ZenFlow's settings are flags, with the optimizer's own defaults, select_interval's apart.
    knobs, notes = [], described() if ZenFlowOptimizer else {}
    for knob in inspect.signature(ZenFlowOptimizer).parameters.values() if ZenFlowOptimizer else ():
        if knob.kind is knob.KEYWORD_ONLY and knob.name not in ("max_grad_norm", "maximize"):
            default = "4 windows here, to show several hand-overs" if knob.name == "select_interval" else "%(default)s"
            note = f"{notes.get(knob.name, 'see ZenFlowOptimizer')} ({default})"
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
