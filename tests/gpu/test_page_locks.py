# SPDX-License-Identifier: Apache-2.0
"""Where the system refuses to page-lock memory, one warning says what to do (that results are the same:
cuda_emulation/test_device_training.cpp)."""

import warnings

import pytest
import torch

from machines import EMULATED
from zenflow import _C, ZenFlowOptimizer


@pytest.mark.skipif(not EMULATED, reason="a refusal can be ordered from the emulated device alone")
def test_a_refused_page_lock_is_warned_of_once_where_step_was_called():
    p = torch.nn.Parameter(torch.ones(64, 70))
    optimizer = ZenFlowOptimizer([p], min_offload_numel=0, update_interval=2)
    _C.emulation.fail_host_register(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                p.grad = torch.ones_like(p)
                optimizer.step()
    finally:
        _C.emulation.fail_host_register(False)
    (warning,) = caught
    assert "ulimit -l" in str(warning.message)
    assert warning.filename == __file__
