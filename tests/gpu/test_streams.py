# SPDX-License-Identifier: Apache-2.0
"""What only real streams and a real allocator can go wrong with: order, reuse of memory, other devices, captures, fork.

Compute is slowed down where a missing wait would let somebody overtake it. Results are compared with the CPU's.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strategies import BF16, FP32
from training import Pair

pytestmark = pytest.mark.gpu
MODES = pytest.mark.parametrize("hooks", [False, True], ids=["default", "offload_gradients"])
CYCLES = 20_000_000  # some 10 ms: longer than the copies that could overtake
# More than the device's ring of chunks holds, and a parameter larger than a chunk.
SHAPES = [
    ((4096, 4096), "contiguous"),
    ((2048, 2048), "transposed"),
    ((1000, 8000), "contiguous"),
    ((64,), "contiguous"),
]


def slow():
    """Holds up the current stream."""
    torch.cuda._sleep(CYCLES)


def churn():
    """Takes what memory was freed and spoils it, in pieces of many sizes, on the current stream."""
    pieces = []
    for size in (4096 * 4096, 2048 * 2048, 1000 * 8000, 2**22, 2**18, 2**12):
        for item in (2, 4):
            pieces += [torch.full((size * item,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return pieces


@MODES
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_memory_is_reused_right_after_backward_and_step(hooks, dtype):
    """Gradients are freed and overwritten while the device may still send what was made of them."""
    pair = Pair("cuda", dtype, hooks=hooks, shapes=SHAPES, max_grad_norm=50.0)
    for _ in range(9):
        pair.step(after_backward=churn, after_step=churn)
    pair.check_state()


@MODES
def test_gradients_that_are_late(hooks):
    """Nothing takes a gradient before the caller's stream has made it, nor a weight before its last use."""
    pair = Pair("cuda", BF16, hooks=hooks, shapes=SHAPES)
    for _ in range(9):
        slow()
        pair.backward()
        slow()
        used = [p.detach().clone() for p in pair.ours]  # behind the delay: before what step() writes
        before = [p.detach().clone() for p in pair.theirs]
        if not hooks:  # a due publication rides in the backward there
            slow()
        pair.finish_step(after_step=slow)
        if not hooks:
            assert all(torch.equal(a.cpu(), b) for a, b in zip(used, before, strict=True))
    pair.check_state()


@MODES
def test_each_step_on_another_stream(hooks):
    """As in a loop that runs inside `torch.cuda.stream`: the optimizer follows the current stream."""
    pair = Pair("cuda", BF16, hooks=hooks, shapes=SHAPES, max_grad_norm=50.0)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    before = torch.cuda.current_stream()
    for step in range(9):
        stream = streams[step % 3]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            slow()
            pair.step(after_backward=churn, after_step=churn)
        before = stream
    torch.cuda.current_stream().wait_stream(before)
    pair.check_state()


@MODES
def test_backward_and_step_on_two_streams(hooks):
    """The user orders them, as for any optimizer."""
    pair = Pair("cuda", FP32, hooks=hooks, shapes=SHAPES)
    side = torch.cuda.Stream()
    for _ in range(6):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            slow()
            pair.backward()
        torch.cuda.current_stream().wait_stream(side)
        pair.finish_step()
    pair.check_state()


def test_results_do_not_change_from_run_to_run():
    def bits():
        pair = Pair("cuda", BF16, hooks=True, shapes=SHAPES, max_grad_norm=50.0)
        for _ in range(6):
            pair.step(after_step=churn)
        return [p.detach().clone() for p in pair.ours]

    assert all(torch.equal(a, b) for a, b in zip(bits(), bits(), strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_around_step_is_refused_and_harms_nothing():
    pair = Pair("cuda", BF16, shapes=SHAPES[1:])
    for step in range(6):
        pair.backward()
        if step in (1, 4):
            pair.optimizer.state_dict()  # waits for the host
            with (
                torch.cuda.graph(torch.cuda.CUDAGraph()),
                pytest.raises(RuntimeError, match="captured in a CUDA graph"),
            ):
                pair.optimizer.step()
        pair.finish_step()
    pair.check_state()


# Several devices


def needs_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; there are {torch.cuda.device_count()}")


@MODES
@pytest.mark.parametrize("where", [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")], ids=" with current ".join)
def test_parameters_on_another_device_than_the_current_one(hooks, where):
    needs_two_gpus()
    with torch.cuda.device(where[1]):
        pair = Pair(where[0], BF16, hooks=hooks, shapes=SHAPES[1:], max_grad_norm=50.0)
        for _ in range(6):
            pair.step()
        assert torch.cuda.current_device() == torch.device(where[1]).index
    pair.check_state()


@MODES
def test_one_optimizer_with_parameters_on_two_gpus_and_the_cpu(hooks):
    needs_two_gpus()
    pair = Pair("cuda:0", BF16, hooks=hooks, shapes=SHAPES[1:], max_grad_norm=50.0)
    for p, device in zip(pair.ours, ("cuda:0", "cuda:1", "cpu"), strict=True):
        p.data = p.data.to(device)
    pair.optimizer = pair.new_optimizer()
    for _ in range(9):
        pair.step()
    pair.check_state()


def test_two_optimizers_on_two_gpus():
    needs_two_gpus()
    pairs = [Pair(f"cuda:{i}", BF16, hooks=True, shapes=SHAPES[1:], seed=i) for i in range(2)]
    for _ in range(6):
        for pair in pairs:
            pair.step()
    for pair in pairs:
        pair.check_state()


# Other processes and the end of this one

FORK = """
import os, torch
from training import Pair

pair = Pair("cuda", torch.bfloat16, shapes=[((512, 512), "contiguous")])
pair.step()
child = os.fork()
if child == 0:
    try:
        pair.optimizer.step()
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0, "the child's error does not speak of fork"
for _ in range(4):
    pair.step()
pair.check_state()
"""

WORK_IN_FLIGHT = """
import torch
from training import Pair

pair = Pair("cuda", torch.bfloat16, hooks=True, shapes=[((4096, 4096), "contiguous")])
for _ in range(2):
    pair.step()
pair.backward()
pair.optimizer.step()
"""


def run_script(script):
    here = Path(__file__).parent
    start = f"import sys; sys.path[:0] = {[str(here), str(here.parent), *sys.path]}\n"
    command = [sys.executable, "-c", start + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on():
    done = run_script(FORK)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interpreter_ends_with_work_in_flight():
    done = run_script(WORK_IN_FLIGHT)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


def test_an_optimizer_goes_with_work_in_flight():
    """Its memory is given back, and what is queued still uses nothing that is gone."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        pair = Pair("cuda", BF16, hooks=True, shapes=SHAPES)
        for _ in range(2):
            pair.step()
        pair.backward()
        pair.optimizer.step()
        del pair
        gc.collect()
        churn()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks for memory whose last use is over
    assert torch.cuda.memory_allocated() - before < 2**20
