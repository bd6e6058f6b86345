# SPDX-License-Identifier: Apache-2.0
"""`python -m zenflow` prints what was built and found here, and what is missing; `python -m zenflow plan` says what a
training would take. Needs no torch."""

import argparse
import os
import sys

import zenflow
from zenflow.planning import command


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m zenflow", description="Print what was built and found here.")
    parser.add_argument("--version", action="version", version=f"zenflow {zenflow.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    words = "say what a training would take: memory, traffic, stall"
    command.add_arguments(commands.add_parser("plan", help=words, description=words.capitalize() + "."))
    parsed = parser.parse_args(arguments)
    try:
        command.run(parsed) if parsed.command else print(zenflow.config())
    except (MemoryError, RuntimeError, ValueError) as error:  # also of a ZENFLOW_ISA that is not here
        print(f"zenflow: {error}", file=sys.stderr)
        return 1
    return 0


def run():
    try:
        try:
            return main()
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # who reads has read enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there at exit
        return 0


if __name__ == "__main__":
    sys.exit(run())
