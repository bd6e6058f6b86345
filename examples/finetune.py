#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model on a text with ZenFlow, with AdamW, or with both on the same batches.

    python examples/finetune.py    # SmolLM2-135M on the reference text that comes with Python
    python examples/finetune.py --model gpt2 --data book.txt --optimizer zenflow --save tuned

The optimizer is made in `make_optimizer`, and `train` is an ordinary loop; what ZenFlow asks of it is
`settled()` around evaluation and `flush()` at the end. `examples/README.md` says how to read the table.
"""

import contextlib
import hashlib
import math
import os
import sys
import time
from pathlib import Path

import prepare_model
from _arguments import ZenFlowOptimizer, parse_arguments, stop
from _files import whole_folder

try:
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from _report import TITLES, Run, machine, plot, table, write_json
except ImportError as error:
    requirements = os.path.relpath(Path(__file__).parent / "requirements.txt")
    stop(f"{error.name} is not installed: run `pip install -r {requirements}`")

console = Console()


def find_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        stop(f"--device {name}: torch knows no such device; try cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        stop(f"--device {name}: torch finds {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def load(kind, name, **options):
    """`kind.from_pretrained` from a folder, without a look at the network, or from the hub."""
    folder = Path(name).expanduser()
    local = folder.is_dir()
    try:
        return kind.from_pretrained(folder if local else name, local_files_only=local, **options)
    except Exception as error:  # anything may be wrong with a model from outside
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if local:
            stop(f"--model {name}: does not load; give a folder that save_pretrained has written ({reason})")
        stop(f"--model {name}: no such folder, nor found on the hub; check name and network ({reason})")


def read_text(path):
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        stop(f"--data {path}: {error.strerror}; give a text file")
    except UnicodeDecodeError:
        stop(f"--data {path}: is not UTF-8 text; convert it first, e.g. with iconv")
    return text if text.strip() else stop(f"--data {path}: is empty; give a text file")


def split_text(text, tokenizer, args):
    """Training blocks and validation batches of `sequence_length` tokens; the last tenth is held out."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    length = args.sequence_length
    blocks = tokens[: len(tokens) // length * length].view(-1, length)
    held_out = max(args.batch_size, len(blocks) // 10)
    if len(blocks) < held_out + args.batch_size:
        needed = 2 * args.batch_size * length
        stop(f"the text has {len(tokens)} tokens and {needed} are needed: give a longer text with --data, "
             "or a smaller --batch-size or --sequence-length")  # fmt: skip
    validation = blocks[-held_out:]
    count = min(held_out, args.eval_batches * args.batch_size) // args.batch_size * args.batch_size
    chosen = torch.linspace(0, held_out - 1, count).long()  # spread over the whole held-out part
    return blocks[:-held_out], validation[chosen].split(args.batch_size)


def batches(blocks, args):
    """Batches in an order that depends on the seed alone; each pass over the text is shuffled anew."""
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(args.steps):
        while len(order) < args.batch_size:
            order = torch.cat([order, torch.randperm(len(blocks), generator=generator)])
        yield blocks[order[: args.batch_size]]
        order = order[args.batch_size :]


def make_optimizer(name, model, args):
    common = {"lr": args.lr, "betas": tuple(args.betas), "eps": args.eps, "weight_decay": args.weight_decay}
    try:
        if name == "adamw":
            return torch.optim.AdamW(model.parameters(), **common, fused=True)
        return ZenFlowOptimizer(model.parameters(), **common, max_grad_norm=args.max_grad_norm, **args.knobs)
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        stop(error)


def loss_of(model, batch):
    batch = batch.to(model.device)
    return model(input_ids=batch, labels=batch, use_cache=False).loss


@torch.no_grad()
def evaluate(model, optimizer, validation):
    # ZenFlow trains on weights that run ahead of its fp32 masters; the masters are what counts.
    with optimizer.settled() if hasattr(optimizer, "settled") else contextlib.nullcontext():
        return sum(loss_of(model, batch).item() for batch in validation) / len(validation)


def clock(device):
    if device.type == "cuda":  # the compute stream alone: copies in flight go on as without a clock
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def train(name, args, device, training, validation):
    """Return the tuned model and what was measured."""
    torch.manual_seed(args.seed)
    # from_pretrained leaves dropout off, and so do we: the runs differ in nothing but the optimizer.
    model = load(transformers.AutoModelForCausalLM, args.model, dtype=getattr(torch, args.dtype)).to(device)
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    if args.sequence_length > limit:
        stop(f"--sequence-length {args.sequence_length}: the model takes {limit} tokens at most")
    optimizer = make_optimizer(name, model, args)
    warm_up = max(1, args.steps // 16)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (1 + math.cos(math.pi * step / args.steps)) / 2)
    )
    run = Run(name, model.num_parameters(), sum(p.numel() * p.element_size() for p in model.parameters()))
    run.validation_loss.append((0, evaluate(model, optimizer, validation)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    loss_column = TextColumn("{task.fields[loss]}")
    columns = ("{task.description:8}", BarColumn(), MofNCompleteColumn(), loss_column, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(TITLES[name], total=args.steps, loss="")
        for step, batch in enumerate(batches(training, args), start=1):
            start = clock(device)
            loss = loss_of(model, batch)
            loss.backward()
            if name == "adamw" and args.max_grad_norm is not None:  # ZenFlow clips by itself
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            before = clock(device)
            optimizer.step()
            after = clock(device)
            schedule.step()
            optimizer.zero_grad()
            run.training_loss.append(loss.item())
            run.step_seconds.append(clock(device) - start)
            run.optimizer_seconds.append(after - before)
            if not math.isfinite(run.training_loss[-1]):
                stop(f"the {TITLES[name]} loss at step {step} is {run.training_loss[-1]}: use a smaller --lr")
            if step % (args.eval_interval or max(1, args.steps // 4)) == 0 and step < args.steps:
                run.validation_loss.append((step, evaluate(model, optimizer, validation)))
                progress.console.print(f"step {step}: validation loss {run.validation_loss[-1][1]:.3f}")
            progress.update(bar, advance=1, loss=f"loss {run.training_loss[-1]:.3f}")

    if name == "zenflow":
        optimizer.flush()  # training is over: no gradient may be left in an open window
    run.validation_loss.append((args.steps, evaluate(model, optimizer, validation)))
    run.measure_memory_and_traffic(optimizer, device)
    return model, run


def save(model, tokenizer, folder):
    try:
        with whole_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except (OSError, RuntimeError) as error:
        stop(f"--save {folder}: cannot write the model; free space or choose another folder ({error})")
    console.print(f"saved {folder}")


def prepare_folders(args, names):
    """Find out before the training, not after it, that a folder cannot be written."""
    folders = {name: args.save / name if len(names) > 1 else args.save for name in names if args.save}
    for option, folder in [("--output", args.output), *(("--save", folder) for folder in folders.values())]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if option == "--save" and any(folder.iterdir()):
                stop(f"--save {folder}: is not empty; remove it or choose another folder")
        except OSError as error:
            stop(f"{option} {folder}: {error.strerror}; choose another folder")
        if not os.access(folder, os.W_OK):
            stop(f"{option} {folder}: is not writable; choose another folder")
    return folders


def main():
    args = parse_arguments(__doc__)
    names = ("adamw", "zenflow") if args.optimizer == "both" else (args.optimizer,)
    device = find_device(args.device)
    if "zenflow" in names:
        make_optimizer("zenflow", torch.nn.Linear(1, 1), args)  # a bad setting shows now, not after AdamW's whole run
    text = read_text(args.data)
    transformers.utils.logging.disable_progress_bar()
    if args.model is None:
        try:
            with console.status("preparing SmolLM2-135M (once, some 20 s)"):
                args.model = str(prepare_model.prepare())
        except prepare_model.PrepareError as error:
            stop(error)
    tokenizer = load(transformers.AutoTokenizer, args.model)
    training, validation = split_text(text, tokenizer, args)
    folders = prepare_folders(args, names)

    runs = []
    for name in names:
        model, run = train(name, args, device, training, validation)
        runs.append(run)
        if args.save:
            save(model, tokenizer, folders[name])
        del model  # before the next one is loaded

    console.print(table(runs, device))
    facts = {
        "settings": vars(args),
        "machine": machine(device),
        "text": {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "blocks": {"training": len(training), "validation": sum(len(batch) for batch in validation)},
    }
    write_json(runs, facts, args.output / "results.json")
    title = f"{Path(args.model).name}, {args.batch_size} x {args.sequence_length} tokens a step"
    plot(runs, title, args.output / "loss.png")
    console.print(f"wrote {args.output / 'loss.png'} and {args.output / 'results.json'}")


if __name__ == "__main__":
    try:
        main()
    except MemoryError as error:  # from ZenFlow's first step: how much the host lacks, and which knobs help
        stop(error)
    except KeyboardInterrupt:
        print("finetune.py: interrupted", file=sys.stderr)
        sys.exit(130)
