# SPDX-License-Identifier: Apache-2.0
"""Runs a program: `python -m fault_programs NAME [ARGUMENTS]`; without a name, one after the other as stdin says."""

import faulthandler
import json
import os
import signal
import sys

import torch

from fault_programs import exceptions, exits, forks, interrupts, lives, machine, memory  # noqa: F401
from fault_programs.registry import PROGRAMS
from fault_programs.training import Training, threads


def start(name, *arguments, limit=60):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it for all that it starts
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # a hang shows where, and dies of it
    signal.alarm(limit)
    PROGRAMS[name](*arguments)


def serve():
    """Runs a program for each line of stdin, in a fork of this process, and prints its exit code.

    A line is a JSON list: files for stdout and stderr, seconds that it may take, name, arguments.
    """
    Training().optimizer.state_dict()  # imports what torch imports late
    assert threads() == 1
    print("ready", flush=True)
    for line in sys.stdin:
        output, errors, limit, name, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
            return start(name, *arguments, limit=limit)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start(*sys.argv[1:]) if sys.argv[1:] else serve()
