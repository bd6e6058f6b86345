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


def raises(*_):
    raise RuntimeError("a hook failed")


def expect_a_failing_hook(call):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "a hook failed"
    else:
        raise AssertionError("the hook's error is lost")


@program
def failing_hooks():
    """What a user's hook interrupts is done or not begun, as the hook stands after it or before it."""
    training = Training().train(4)
    optimizer, saved = training.optimizer, Training().train(2).optimizer.state_dict()

    def step():
        training.backward()
        optimizer.step()

    def save():
        optimizer.state_dict()

    def load():
        optimizer.load_state_dict(saved)

    for register, call in (
        (optimizer.register_step_pre_hook, step),
        (optimizer.register_step_post_hook, step),
        (optimizer.register_state_dict_pre_hook, save),
        (optimizer.register_state_dict_post_hook, save),
        (optimizer.register_load_state_dict_pre_hook, load),
    ):
        handle = register(raises)
        expect_a_failing_hook(call)
        handle.remove()
    assert training.steps == 5  # of the hook that stands after the step
    check_undisturbed(training)
    handle = optimizer.register_load_state_dict_post_hook(raises)
    expect_a_failing_hook(load)
    handle.remove()
    assert training.steps == 2
