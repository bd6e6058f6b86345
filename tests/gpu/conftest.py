# SPDX-License-Identifier: Apache-2.0
"""`machine`: where device code runs: a GPU, under the marker `gpu`; and the emulated device, if zenflow is built on it
(as tests/cuda_emulation/CMakeLists.txt says). `device`: where parameters are: on a GPU, under the marker; and on the
CPU, which with `-p emulated_gpu` stands for the emulated device.
"""

import pytest

import machines


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), *(["emulated"] if machines.EMULATED else [])])
def machine(request):
    found = machines.Gpu() if request.param == "cuda" else machines.Emulated()
    yield found
    found.check_guards()
    found.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _skip_without_a_gpu(request):
    if request.node.get_closest_marker("gpu") and (reason := machines.why_no_gpu()):
        pytest.skip(reason)
