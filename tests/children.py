# SPDX-License-Identifier: Apache-2.0
"""Forked children that check something and tell by their exit code."""

import os
import signal
import sys


def in_child(function):
    """Runs function in a forked child; returns its exit code. The child's traceback goes to stderr."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(60)
        function()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
