# SPDX-License-Identifier: Apache-2.0
"""Exceptions in the code of users."""

import torch

from fault_programs.registry import program
from fault_programs.training import Training, check_undisturbed


@program
def exception_between_backward_and_step():
    training = Training().train(4)
    training.backward()
    try:
        raise RuntimeError("logging failed")
    except RuntimeError:
        pass
    check_undisturbed(training)


@program
def failing_closure():
    training = Training().train(4)

    def closure():
        assert torch.is_grad_enabled()
        training.backward()
        raise RuntimeError("no loss")

    for _ in range(3):
        try:
            training.optimizer.step(closure)
        except RuntimeError as error:
            assert str(error) == "no loss"
        else:
            raise AssertionError("the closure's error is lost")
    check_undisturbed(training)
