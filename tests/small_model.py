# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model for 50 steps in many ways and prints a digest of each run's bits, as JSON.

Run it under another ZENFLOW_ISA and compare what it prints.
"""

import hashlib
import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zenflow

WORDS, WIDTH, LENGTH = 61, 72, 16


class Block(nn.Module):
    """One attention head and an MLP, with odd sizes."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 201), nn.Linear(201, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Shared(nn.Module):
    """One block's weights in three checkpointed segments, and a head."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.block, self.head = nn.Embedding(WORDS, 48), nn.Linear(48, 48), nn.Linear(48, WORDS)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.embedding(x)
        for _ in range(3):
            x = checkpoint(lambda y: y + torch.relu(self.block(y)), x, use_reentrant=self.use_reentrant)
        return self.head(x)


def small_model(dtype=torch.float32):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))
    return model.to(dtype)


def batches(steps):
    return torch.randint(WORDS, (steps, 4, LENGTH + 1), generator=torch.Generator().manual_seed(6))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def digest_of(dtype, steps=50, **settings):
    """SHA-256 over the weights after every step, and over the state at the end."""
    model = small_model(dtype)
    schedule = {"update_interval": 4, "select_interval": 8, "topk_ratio": 0.15, "min_offload_numel": 1000}
    optimizer = zenflow.ZenFlowOptimizer(model.parameters(), lr=1e-3, **{**schedule, **settings})
    digest = hashlib.sha256()

    def add(tensor):
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())

    for batch in batches(steps):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            add(p)
    for state in optimizer.state_dict()["state"].values():
        for key in ("exp_avg", "exp_avg_sq", "master", "last_written"):
            add(state[key])
    return digest.hexdigest()


def main():
    torch.set_num_threads(1)  # forward and backward are not what is compared
    digests = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for rule in ("adamw", "mean"):
            for buffer in ("ring", "stream"):
                for threads in (1, 2, 3):
                    settings = {"deferred_rule": rule, "host_buffer": buffer, "num_threads": threads}
                    digests[f"{name} {rule} {buffer} {threads}"] = digest_of(dtype, **settings)
    json.dump(digests, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
