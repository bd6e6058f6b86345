# SPDX-License-Identifier: Apache-2.0
"""Forks, and processes that begin with one."""

import multiprocessing
import os
import pickle
import threading

import torch

from children import in_child
from fault_programs.registry import program
from fault_programs.training import Training, check_same, check_undisturbed, snapshot
from reference import same_bits


@program
def fork_with_work_in_flight():
    training = Training(scale=40).until_in_flight()
    assert in_child(lambda: check_undisturbed(training, scale=40, what="child")) == 0
    check_undisturbed(training, scale=40, what="parent")


@program
def fork_and_leave():
    """The child steps and ends as a program ends, by its interpreter's exit."""
    training = Training(scale=40).until_in_flight()
    child = os.fork()
    training.train(4)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_undisturbed(training, scale=40)
    print("parent" if child else "child")


@program
def fork_of_a_fork():
    training = Training().train(4)
    assert in_child(lambda: in_child(training.train) == 0 and check_undisturbed(training)) == 0
    check_undisturbed(training)


@program
def fork_from_a_second_thread():
    """While the first one steps, at any moment of a step."""
    settings, last = {"scale": 12, "num_threads": 2}, 30
    twin = Training(**settings)
    boundaries = [snapshot(twin)] + [snapshot(twin.train()) for _ in range(last + 3)]
    training, forks, errors = Training(**settings), [], []

    def child():
        check_same(snapshot(training), boundaries[training.steps], f"child at step {training.steps}")
        check_same(snapshot(training.train(3)), boundaries[training.steps], f"child at step {training.steps}")

    def fork_often():
        try:
            for _ in range(12):
                assert in_child(child) == 0
                forks.append(training.steps)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fork_often)
    thread.start()
    while thread.is_alive():
        training = Training(**settings).train(last)
        check_same(snapshot(training), boundaries[last], "parent")
    thread.join()
    if errors:
        raise errors[0]
    print(forks)


def worker(weights, state, results):
    training = Training()
    for p, weight in zip(training.parameters, weights, strict=True):
        p.data.copy_(weight)
    training.optimizer.load_state_dict(state)
    check_undisturbed(training)
    results.put(training.steps)


def inheriting_worker(training, results):
    check_undisturbed(training)
    results.put(training.steps)


@program
def multiprocessing_workers(method):
    """fork: the child goes on with the parent's optimizer; spawn: with one of its own, from the parent's state."""
    training = Training().train(4)
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    if method == "fork":
        process = context.Process(target=inheriting_worker, args=(training, results))
    else:
        weights = [p.detach().clone() for p in training.parameters]
        process = context.Process(target=worker, args=(weights, training.optimizer.state_dict(), results))
    process.start()
    training.train()
    process.join()
    assert process.exitcode == 0
    assert results.get() == 12
    check_undisturbed(training)


def unpickling_worker(pickled, results):
    inheriting_worker(pickle.loads(pickled), results)


@program
def pickled_for_a_spawned_process():
    training = Training().train(4)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=unpickling_worker, args=(pickle.dumps(training), results))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert results.get() == 12
    check_undisturbed(training)


class Steps(torch.utils.data.Dataset):
    """Each item is a weight of a training, inherited from the parent or begun in the worker, after one more step."""

    def __init__(self, inherited):
        self.training = inherited

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.training = self.training or Training()
        return self.training.train().parameters[0].detach().clone()


@program
def steps_in_data_loader_workers(inherits):
    training = Training(scale=20).until_in_flight() if int(inherits) else None
    twin = Training(scale=20).train(training.steps) if training else Training()
    loader = torch.utils.data.DataLoader(
        Steps(training), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    for i, weight in enumerate(loader):
        assert same_bits(weight, twin.train().parameters[0]).all(), f"step {i + 1}"
    if training:
        check_undisturbed(training, scale=20)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((40,), float(i)).square() / 100


@program
def data_loader_workers():
    ends = []
    for workers in (0, 2):
        training = Training()
        method = "fork" if workers else None
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=workers, multiprocessing_context=method
        )
        for _ in range(2):
            for batch in loader:
                training.optimizer.zero_grad()
                a, b, c = training.parameters
                loss = (batch @ (a * c).T).square().mean() + (batch[:, :30].bfloat16() @ b.T).square().mean()
                loss.backward()
                training.optimizer.step()
        assert training.steps == 12
        ends.append(snapshot(training))
    check_same(*ends, "with workers")
