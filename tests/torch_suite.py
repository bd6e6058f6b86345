# SPDX-License-Identifier: Apache-2.0
"""AdamW's inputs and error inputs out of PyTorch's own test suite (torch.testing._internal.common_optimizers).

They are fetched by a process of their own: importing that module sets hypothesis' profile and flags of torch for good.
As a program: writes them to stdout, pickled.
"""

import functools
import os
import pickle
import subprocess
import sys
from typing import NamedTuple

import pytest


class Input(NamedTuple):
    description: str
    settings: dict  # what AdamW's constructor gets


class ErrorInput(NamedTuple):
    description: str
    parameters: object  # None: any
    settings: dict
    error: type
    words: str


@functools.cache
def inputs():
    """(inputs on a CPU, those that PyTorch adds on a GPU, error inputs); skips the test where torch lacks them."""
    ended = subprocess.run(
        [sys.executable, __file__], capture_output=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    if ended.returncode:
        last_line = ended.stderr.decode().strip().splitlines()[-1]
        pytest.skip(f"torch.testing._internal.common_optimizers has no AdamW here: {last_line}")
    return pickle.loads(ended.stdout)


def main():
    import torch
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

    (info,) = (info for info in optim_db if info.optim_cls is torch.optim.AdamW)

    def inputs_on(device):
        return [Input(i.desc, i.kwargs) for i in info.optim_inputs_func(device=device)]

    errors = []
    for case in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR, case
        given = case.optimizer_error_input
        errors.append(ErrorInput(given.desc, given.params, given.kwargs, case.error_type, case.error_regex))
    on_cpu = inputs_on("cpu")
    pickle.dump((on_cpu, inputs_on("cuda")[len(on_cpu) :], errors), sys.stdout.buffer)


if __name__ == "__main__":
    sys.modules["torch_suite"] = sys.modules["__main__"]  # where the reader finds these classes
    for kind in (Input, ErrorInput):
        kind.__module__ = "torch_suite"
    main()
