# SPDX-License-Identifier: Apache-2.0
"""Ends of the process."""

import atexit
import faulthandler
import os
import sys
import threading

from fault_programs.registry import program
from fault_programs.training import Training


@program
def leaves(how):
    """Ends in one of many ways, with a host update in flight or a window open."""
    training = Training(scale=40).until_in_flight()
    if how == "window open":
        training.train(2)
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "os._exit":
        os._exit(4)
    elif how == "exception":
        raise ValueError("on purpose")
    elif how == "abort":
        faulthandler.enable()
        os.abort()
    elif how == "step hook":
        training.optimizer.register_step_post_hook(lambda *_: sys.exit(5))
        training.train()
    elif how == "abandoned":
        threading.Thread(target=training.train, args=(10,)).start()
    elif how == "cycle":
        training.cycle = [training]
    elif how == "atexit":
        atexit.register(training.train, 4)
