# SPDX-License-Identifier: Apache-2.0
"""What the accuracy benchmark fine-tunes: a model's start, rows of data, and the loss.

gpt: a byte-level GPT of 0.85M parameters, pre-trained here on Jane Austen, on Python's reference text.
minilm: all-MiniLM-L6-v2 with a new head of 2 classes, on snippets of movie reviews.
smollm: SmolLM2-135M on Jane Austen.

The quick form has tiny models with random weights, on Python's reference text: it shows that all works.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import accuracy_data
from step_model import Block

os.environ["HF_HUB_OFFLINE"] = "1"
DATA = "data"  # folder in the cache


@dataclass(frozen=True)
class Schedule:
    """What is trained how long. Cases are (steps, learning rate)."""

    cases: tuple
    long_cases: tuple
    seeds: int
    batch: int
    step_seconds: float  # rough, of a step on one core, for the estimate at the start
    settings: dict = field(default_factory=dict)  # of ZenFlowOptimizer, beside a method's own


# min_offload_numel is 4096 for the small GPT, else only a third of it would be split: so all its matrices are.
# SmolLM2 takes the host buffer that needs less memory; the bits are the same.
SCHEDULES = {
    "gpt": Schedule(((160, 3e-4), (160, 1e-3), (600, 3e-4)), ((600, 1e-3),), 3, 12, 0.12, {"min_offload_numel": 4096}),
    "minilm": Schedule(((96, 1e-4), (96, 3e-5)), ((384, 1e-4), (384, 3e-5)), 2, 16, 1.0),
    "smollm": Schedule(((40, 2e-5),), ((160, 2e-5),), 1, 4, 3.5, {"host_buffer": "stream"}),
}
QUICK = Schedule(((12, 1e-3),), (), 2, 4, 0.02, {"min_offload_numel": 1000})
TINY = {"vocab_size": 256, "max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 64}
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def schedule_of(name, quick):
    return QUICK if quick else SCHEDULES[name]


@dataclass(frozen=True)
class Task:
    new_model: Callable[[], nn.Module]  # with dropout off; what is random in it depends on torch's seed
    loss: Callable  # (model, *columns of a batch's rows) -> mean loss
    training: tuple[torch.Tensor, ...]  # columns of equal length
    validation: tuple[torch.Tensor, ...]


def load(name, cache, quick, advance=lambda: None):
    """The task; `advance` is called now and then while it is prepared for the first time."""
    return {"gpt": gpt, "minilm": minilm, "smollm": smollm}[name](cache, quick, advance)


def batches(columns, size, steps, seed):
    """Batches of rows in an order that depends on the seed alone; each pass over the rows is shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(columns[0]), generator=generator)])
        yield tuple(column[order[:size]] for column in columns)
        order = order[size:]


def held_out(columns, count):
    """(training, validation): the last tenth of the rows is kept from training; `count` of them, spread, are used."""
    rows = len(columns[0])
    start = rows - rows // 10
    chosen = torch.linspace(start, rows - 1, min(count, rows - start)).long()
    return tuple(column[:start] for column in columns), tuple(column[chosen] for column in columns)


def bytes_in_rows(text, length):
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return content[: len(content) // length * length].view(-1, length)


# A byte-level GPT


class ByteGPT(nn.Module):
    """Causal transformer over bytes, with learned positions and a tied head."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width * 11 // 4, heads=4) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


def next_byte_loss(model, rows):
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def gpt(cache, quick, advance):
    width, layers, length, steps = (32, 1, 16, 8) if quick else (128, 4, 96, 600)
    target = accuracy_data.reference_text()
    start = cache / f"byte-gpt-{width}-{layers}-{length}-{steps}-torch-{torch.__version__}.pt"
    if not start.is_file():
        # Text alone: the quick form does without the novels.
        source = target[: len(target) // 2] if quick else accuracy_data.austen(cache / DATA)
        torch.manual_seed(0)
        model = pretrained(ByteGPT(width, layers, length), bytes_in_rows(source, length + 1), steps, advance)
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), start.with_suffix(".part"))
        start.with_suffix(".part").replace(start)

    def new_model():
        model = ByteGPT(width, layers, length)
        model.load_state_dict(torch.load(start, weights_only=True))
        return model

    return Task(new_model, next_byte_loss, *held_out((bytes_in_rows(target, length + 1),), 8 if quick else 480))


def pretrained(model, rows, steps, advance):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for (batch,) in batches((rows,), 24, steps, seed=0):
        next_byte_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        advance()
    return model


# MiniLM with a new head


def minilm(cache, quick, advance):
    import transformers  # takes seconds; the GPT does without

    transformers.utils.logging.set_verbosity_error()  # that the head is new is meant so
    transformers.utils.logging.disable_progress_bar()
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    kind = transformers.BertForSequenceClassification
    if quick:
        config = transformers.BertConfig(**TINY, num_labels=2, **no_dropout)
        rows = bytes_in_rows(accuracy_data.reference_text()[:4000], 16)
        new_model, columns = (lambda: kind(config)), (rows, rows > 0, rows[:, 0] % 2)
    else:
        folder = accuracy_data.minilm_folder(cache / DATA)
        found = [(text, score) for text, score in accuracy_data.snippets(cache / DATA) if abs(score) >= 0.5]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        found = [found[i] for i in order]
        tokens = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)(
            [text for text, _ in found], padding="max_length", truncation=True, max_length=64, return_tensors="pt"
        )
        labels = torch.tensor([int(score > 0) for _, score in found])
        columns = tokens["input_ids"], tokens["attention_mask"], labels

        def new_model():
            return kind.from_pretrained(folder, num_labels=2, local_files_only=True, **no_dropout)

    return Task(new_model, classification_loss, *held_out(columns, 8 if quick else 256))


def classification_loss(model, tokens, mask, labels):
    return functional.cross_entropy(model(input_ids=tokens, attention_mask=mask).logits, labels)


# SmolLM2


def smollm(cache, quick, advance):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = transformers.LlamaForCausalLM
    if quick:
        config = transformers.LlamaConfig(**TINY)
        new_model, rows = (lambda: kind(config)), bytes_in_rows(accuracy_data.reference_text()[:4000], 16)
    else:
        folder = accuracy_data.smollm_folder(cache / DATA)
        text = accuracy_data.austen(cache / DATA)[:600_000]
        tokens = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)(text, verbose=False)
        tokens = torch.tensor(tokens["input_ids"])
        rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)

        def new_model():
            return kind.from_pretrained(folder, local_files_only=True, dtype=torch.float32)

    return Task(new_model, next_token_loss, *held_out((rows,), 8 if quick else 32))


def next_token_loss(model, rows):
    return model(input_ids=rows, labels=rows, use_cache=False).loss
