# SPDX-License-Identifier: Apache-2.0
"""A llama of two layers with random weights, and bytes of Python's reference text to train it on."""

import os
from pydoc_data.topics import topics

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 16
# All matrices are split; windows, delays and selections come often.
SETTINGS = {"lr": 1e-2, "topk_ratio": 0.2, "update_interval": 4, "select_interval": 8, "min_offload_numel": 1000}


def new_model(width=64):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def examples(count, start=0):
    """`count` pieces of text as Trainer's datasets hold them; those of other starts overlap with none of them."""
    text = "".join(topics[key] for key in sorted(topics)).encode()
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)[start : start + count * LENGTH].long()
    return [{"input_ids": piece, "labels": piece} for piece in pieces.view(count, LENGTH)]


def batch_of(pieces):
    return {key: torch.stack([piece[key] for piece in pieces]) for key in ("input_ids", "labels")}


@torch.no_grad()
def loss_on(model, pieces):
    was_training = model.training
    loss = model.eval()(**batch_of(pieces)).loss.item()
    model.train(was_training)
    return loss


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]
