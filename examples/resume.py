#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train with checkpoints that survive a kill at any moment: start it again, and it goes on with the same bits.

    python examples/resume.py --steps 200    # interrupt or kill it, and run the same command again

A small network learns to guess the next byte of Python's reference text. What to copy are `save`, `newest` and the
three loads in `main`; docs/checkpoints.md says why.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

from _files import remove_folder, remove_leftovers, whole_folder
from zenflow import ZenFlowOptimizer

CONTEXT = 16  # bytes that the next one is guessed from
KEPT = 2  # checkpoints: the newest, and one more


def save(folder, step, parts):
    """The checkpoint of a step, whole or not at all; then the oldest ones go."""
    with whole_folder(folder / f"step-{step}") as temporary:
        torch.save(
            {"step": step, **{name: part.state_dict() for name, part in parts.items()}}, temporary / "training.pt"
        )
    for old in checkpoints(folder)[:-KEPT]:
        remove_folder(old)


def newest(folder):
    """What the newest checkpoint holds; None if there is none."""
    found = checkpoints(folder)
    return torch.load(found[-1] / "training.pt", weights_only=True) if found else None


def checkpoints(folder):
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def batch_of(text, step):
    """The same for the same step, in whichever process."""
    starts = torch.randint(len(text) - CONTEXT, (64, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-interval", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums are added up in the order of the threads: the same bits need the same number
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    )
    optimizer = ZenFlowOptimizer(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    remove_leftovers(args.folder, "step-*")
    done = 0
    if saved := newest(args.folder):
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["step"]
        print(f"goes on after step {done}", flush=True)
    for step in range(done + 1, args.steps + 1):
        context, target = batch_of(text, step)
        loss = nn.functional.cross_entropy(model(context), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.save_interval == 0 or step == args.steps:
            save(args.folder, step, parts)
            print(f"step {step}: loss {loss.item():.3f}, saved", flush=True)


if __name__ == "__main__":
    main()
