# SPDX-License-Identifier: Apache-2.0
"""`python -m zenflow`: prints what was built and found here, and what is missing. Needs no torch."""

import argparse
import os
import sys

import zenflow


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m zenflow", description="Print what was built and found here.")
    parser.add_argument("--version", action="version", version=f"zenflow {zenflow.__version__}")
    parser.parse_args(arguments)
    try:
        print(zenflow.config())
    except (RuntimeError, ValueError) as error:  # a ZENFLOW_ISA that is unknown, or that this CPU lacks
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
