# SPDX-License-Identifier: Apache-2.0
"""`machine`: where device code runs. Each test that takes it runs on a GPU, under the marker `gpu`, and on the emulated
device if zenflow is built on it (PYTHONPATH=... as tests/cuda_emulation/CMakeLists.txt says)."""

import pytest

import machines


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), *(["emulated"] if machines.EMULATED else [])])
def machine(request):
    found = machines.Gpu() if request.param == "cuda" else machines.Emulated()
    yield found
    found.check_guards()
    found.close()


@pytest.fixture(autouse=True)
def _skip_without_a_gpu(request):
    if request.node.get_closest_marker("gpu") and (reason := machines.why_no_gpu()):
        pytest.skip(reason)
