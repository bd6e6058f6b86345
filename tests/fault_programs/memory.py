# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out."""

import os
import resource

import torch
from torch import nn

from children import in_child
from fault_programs.registry import program
from fault_programs.training import Training, check_same, snapshot
from zenflow import _C, ZenFlowOptimizer


@program
def less_memory_than_needed():
    """MemoryError before anything changes, with the shortfall and the knobs; "auto" streams if that fits."""
    real, training = _C.available_host_bytes, Training(update_interval=6)
    weights = [p.detach().clone() for p in training.parameters]
    _C.available_host_bytes = lambda: 1000
    for _ in range(2):
        training.backward()
        try:
            training.optimizer.step()
        except MemoryError as error:
            message = str(error)
        else:
            raise AssertionError("no error")
        assert "short" in message and "GiB" in message, message
        for knob in ("topk_ratio", "split=False", "bfloat16"):
            assert knob in message, message
        assert _C.host_bytes_held() == 0
        assert training.optimizer.stats().host_bytes == 0
        assert all(torch.equal(p, w) for p, w in zip(training.parameters, weights, strict=True))
        assert not training.optimizer.state
    needed = {}
    for buffer in ("ring", "stream"):
        other = Training(update_interval=6, host_buffer=buffer)
        needed[buffer] = least_memory(other)
    assert needed["stream"] < needed["ring"]
    _C.available_host_bytes = lambda: needed["ring"] - 1
    training.train(13)
    assert training.optimizer.stats().host_buffer == "stream"
    try:
        Training(update_interval=6, host_buffer="ring").train()
    except MemoryError as error:
        for knob in ('host_buffer="stream"', "update_interval"):
            assert knob in str(error), error
    else:
        raise AssertionError("no error")
    _C.available_host_bytes = real
    end = snapshot(training)
    check_same(end, snapshot(Training(update_interval=6, host_buffer="ring").train(13)), "ring")


@program
def less_memory_than_needed_in_backward():
    """With gradients that leave in backward: the error comes there, and the same step goes on once there is memory."""
    real, training = _C.available_host_bytes, Training(offload_gradients=True)
    for _ in range(2):
        _C.available_host_bytes = lambda: 1000
        try:
            training.train()
        except MemoryError as error:
            assert "short" in str(error), error
        else:
            raise AssertionError("no error")
        finally:
            _C.available_host_bytes = real
        assert training.steps == 0
        assert not training.optimizer.state
    check_same(snapshot(training.train(9)), snapshot(Training().train(9)), "after the error")


def least_memory(training):
    """The bytes with which the first step goes through, by bisection."""
    low, high = 0, 1 << 24
    training.backward()
    while low < high:
        middle = (low + high) // 2
        _C.available_host_bytes = lambda bytes=middle: bytes
        try:
            training.optimizer._make_room([])
        except MemoryError:
            low = middle + 1
        else:
            training.optimizer._store = None
            high = middle
    return low


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@program
def address_space_runs_out(host_buffer):
    """Allocations fail anywhere inside; the same step, with the limit raised again, has the right bits."""
    settings = {"scale": 40, "host_buffer": host_buffer, "num_threads": 2}
    ends = [snapshot(Training(**settings).train(n)) for n in (9,)]
    failures = 0
    for slack in range(0, 36 << 20, 3 << 20):

        def attempt(slack=slack):
            training, failed = Training(**settings), 0
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            while training.steps < 9:
                training.backward()
                resource.setrlimit(resource.RLIMIT_AS, (address_space() + slack, resource.RLIM_INFINITY))
                try:
                    training.optimizer.step()
                except (MemoryError, RuntimeError) as error:
                    assert isinstance(error, MemoryError) or "alloc" in str(error), error
                    failed += 1
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    training.optimizer.step()
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            check_same(snapshot(training), ends[0], f"slack {slack}")
            os._exit(10 + failed)

        code = in_child(attempt)
        assert code >= 10, f"slack {slack}: exit code {code}"
        failures += code - 10
    assert failures >= 3, failures
    print(failures)


@program
def step_fails_half_way():
    """No memory to make a strided gradient contiguous, where gradients already count: the run is over, and says so."""
    p = nn.Parameter(torch.zeros(1 << 21))
    optimizer = ZenFlowOptimizer([p], num_threads=1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.ones(1 << 22)[::2]
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 20), resource.RLIM_INFINITY))
    errors = []
    for call in (optimizer.step, optimizer.step, optimizer.state_dict):
        try:
            call()
        except (MemoryError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(errors) == 3, errors
    assert errors[0].startswith("MemoryError"), errors
    for error in errors[1:]:
        assert error.startswith("RuntimeError") and "half-way" in error and "checkpoint" in error, errors
