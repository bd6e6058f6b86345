# SPDX-License-Identifier: Apache-2.0
"""examples/resume.py: killed at random moments, what is on disk is whole, and the run ends with the same bits."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import resume  # noqa: E402
from _files import remove_folder, remove_leftovers, whole_folder  # noqa: E402

STEPS = 120
COMMAND = [sys.executable, str(EXAMPLES / "resume.py"), "--steps", str(STEPS), "--save-interval", "1", "--folder"]


def digest(value):
    """Of all bits of a checkpoint."""
    sha = hashlib.sha256()

    def add(value):
        if torch.is_tensor(value):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                sha.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """{step: digest of its checkpoint} of a run that nobody kills."""
    digests = {}

    def keep(_, step, parts):
        digests[step] = digest({"step": step, **{name: part.state_dict() for name, part in parts.items()}})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "save", keep)
        patch.setattr(sys, "argv", [*COMMAND[1:], str(tmp_path_factory.mktemp("nothing"))])
        resume.main()
    return digests


def check(folder, undisturbed):
    """Every checkpoint loads and is one of the undisturbed run; returns the newest one's step."""
    found = resume.checkpoints(folder)
    for path in found:
        saved = torch.load(path / "training.pt", weights_only=True)
        assert path.name == f"step-{saved['step']}"
        assert digest(saved) == undisturbed[saved["step"]], path.name
    return saved["step"] if found else 0


def test_killed_at_random_moments_it_ends_with_the_bits_of_an_undisturbed_run(tmp_path, undisturbed):
    moments, newest = random.Random(0), 0
    for _ in range(4):
        with subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
            while "saved" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(moments.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.returncode == -signal.SIGKILL
        before, newest = newest, check(tmp_path, undisturbed)
        assert newest > before
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True)
    assert f"goes on after step {newest}" in done.stdout, done.stderr
    assert check(tmp_path, undisturbed) == STEPS
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{STEPS - 1}", f"step-{STEPS}"]


def test_a_folder_that_is_being_written_or_removed_has_no_name(tmp_path):
    with whole_folder(tmp_path / "step-1") as temporary:
        (temporary / "file").write_text("half")
        assert not (tmp_path / "step-1").exists()
    assert (tmp_path / "step-1" / "file").read_text() == "half"
    (tmp_path / ".step-2.killed").mkdir()
    (tmp_path / ".other").mkdir()
    remove_leftovers(tmp_path, "step-*")
    remove_folder(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == [".other"]
