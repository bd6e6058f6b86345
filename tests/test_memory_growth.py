# SPDX-License-Identifier: Apache-2.0
"""What a process grows by when its optimizer is ours: the bytes that stats(), the plan and docs/memory.md name."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import psutil, torch
from torch import nn
import zenflow

settings = json.loads(sys.argv[1])
dtype = getattr(torch, settings.pop("dtype"))
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1536), nn.GELU(), nn.Linear(1536, 1024))]
model = nn.Sequential(nn.Embedding(2000, 1024), *layers).to(dtype)  # 27M parameters
tokens = torch.randint(2000, (4,))


def backward():
    model.zero_grad()
    model(tokens).float().square().mean().backward()
    return psutil.Process().memory_info().rss


small = nn.Parameter(torch.ones(300, 300))  # starts threads, and what else comes once
first = zenflow.ZenFlowOptimizer([small], num_threads=2)
small.grad = small.detach().clone()
first.step()
before = [backward() for _ in range(3)][-1]
optimizer = zenflow.ZenFlowOptimizer(model.parameters(), num_threads=2, **settings)
for _ in range(3 * 4 + 2):
    backward()
    optimizer.step()
grown = backward() - before
plan, stats = zenflow.plan(model, host_bandwidth=1e9, **settings), optimizer.stats()
planned = plan.host_bytes + plan.optimizer_device_bytes  # on the CPU all of it is in host memory
print(json.dumps({"grown": grown, "planned": planned, "held": stats.host_bytes + stats.device_bytes}))
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "update_interval": 4, "host_buffer": "ring"},
        {"dtype": "float32", "update_interval": 4, "host_buffer": "stream", "deferred_rule": "mean"},
        {"dtype": "bfloat16", "update_interval": "auto", "max_update_interval": 4, "full_warm_up_rounds": 2},
    ],
    ids=["bf16, ring", "fp32, stream, mean", "bf16, auto, warm-up"],
)
def test_a_process_grows_by_what_is_planned(settings):
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["held"] == found["planned"]
    assert found["grown"] == pytest.approx(found["planned"], rel=0.05), found
