# SPDX-License-Identifier: Apache-2.0
"""A llama-like language model out of sizes, with random weights: what a step costs does not depend on them."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Causal attention and a gated MLP, without biases. Positions are left out: they cost next to nothing."""

    def __init__(self, hidden, intermediate, heads, **factory):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, **factory), nn.RMSNorm(hidden, **factory)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False, **factory) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False, **factory) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False, **factory)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Returns the loss of predicting each next token of [batch, sequence + 1] tokens.

    Args:
        checkpoints: recompute each block in backward instead of keeping its activations.
    """

    def __init__(self, *, layers, hidden, intermediate, heads, vocabulary, checkpoints, device, dtype):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(vocabulary, hidden, **factory)
        self.blocks = nn.ModuleList(Block(hidden, intermediate, heads, **factory) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, **factory)
        self.head = nn.Linear(hidden, vocabulary, bias=False, **factory)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_model(args, device):
    torch.manual_seed(0)
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "intermediate", "heads", "vocabulary")}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    return Model(**sizes, checkpoints=args.checkpoint, device=device, dtype=dtype)


def make_batches(args, device, count):
    generator = torch.Generator().manual_seed(1)
    shape = (count, args.batch, args.sequence + 1)
    return torch.randint(args.vocabulary, shape, generator=generator).to(device)
