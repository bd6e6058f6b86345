# SPDX-License-Identifier: Apache-2.0
"""A thread that forks holds the GIL, which a step needs where it asks torch for memory: neither waits for the other."""

import subprocess
import sys
from pathlib import Path

from machines import EMULATED

PROGRAM = """
import os
import sys
import threading

import torch
from zenflow import ZenFlowOptimizer

if sys.argv[2] == "True":
    import emulated_gpu
p = torch.nn.Parameter(torch.randn(64, 96, device=sys.argv[1]))
# columns change sides at every step, through memory that is asked for anew
optimizer = ZenFlowOptimizer([p], min_offload_numel=0, update_interval=1, select_interval=1, topk_ratio=0.3)


def fork_often():
    for _ in range(60):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


thread = threading.Thread(target=fork_often)
thread.start()
while thread.is_alive():
    p.grad = torch.randn_like(p)
    optimizer.step()
thread.join()
"""


def test_a_second_thread_may_fork_while_a_step_asks_for_memory(device):
    paths = [str(Path(__file__).parent.parent), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n" + PROGRAM, device, str(EMULATED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
