# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed.checkpoint asks of an optimizer's live state: which names it has, before and after a load.

Not for: the state itself (state.py).
"""

import sys


class InStateDict:
    """Stands in optimizer.state[p] for a tensor that only state_dict() makes: the live state is in parts, here and
    there. No tensor, so that whoever moves or adds up the tensors of a state leaves it alone."""

    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return "<in state_dict()>"

    def __getattr__(self, attribute):
        raise AttributeError(
            f"optimizer.state has no {self.__dict__.get('_name')!r} that could be read or changed while training goes "
            "on: take it from optimizer.state_dict()"
        )


def is_asked_for_template():
    """Whether step() is called because torch.distributed.checkpoint wants to see the state of a new optimizer.

    It calls step() with zero gradients at learning rate 0, which nothing else tells from a first step of a user.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == (
            "_init_optim_state",
            "torch.distributed.checkpoint.state_dict",
        ):
            return True
        frame = frame.f_back
    return False
