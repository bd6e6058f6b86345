# SPDX-License-Identifier: Apache-2.0
"""Write and remove folders so that each is there whole or not at all, whatever interrupts it."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path):
    """Yield a temporary folder beside `path`; on success flush it to disk and rename it to `path`.

    An existing `path` must be an empty folder: rename(2) replaces that in one step, and nothing else.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        for item in [*temporary.rglob("*"), temporary]:
            give_usual_mode(item)  # mkdtemp and safetensors write for the user alone
            flush_to_disk(item)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_to_disk(path.parent)  # the new name itself


def remove_folder(path):
    """Take the name away first, so that nobody finds a part of the folder under it."""
    path = Path(path).absolute()
    hidden = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    path.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(parent, names):
    """What writing and removing folders of these names (a glob pattern) left behind when they were killed."""
    for hidden in Path(parent).glob(f".{names}.*"):
        shutil.rmtree(hidden)


def give_usual_mode(path):
    os.umask(umask := os.umask(0))
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def flush_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
