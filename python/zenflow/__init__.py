# SPDX-License-Identifier: Apache-2.0
"""ZenFlow: a torch optimizer that offloads most of AdamW to the CPU without stalling the GPU.

`zenflow.ZenFlowOptimizer` takes the place of `torch.optim.AdamW`; `zenflow.config()` says what was built and
found, `zenflow.plan()` what a training would take. torch is imported at the optimizer's first use, so that
`python -m zenflow` can say that it is missing.
"""

import atexit
import os

from zenflow import _C
from zenflow._C import __version__
from zenflow.config import Config, config
from zenflow.planning import plan

__all__ = ["Config", "ZenFlowOptimizer", "__version__", "config", "plan"]

# Host threads finish and join while the interpreter still stands.
atexit.register(_C.shutdown)
os.register_at_fork(before=_C.before_fork)


def __getattr__(name):
    if name == "ZenFlowOptimizer":
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError("zenflow.ZenFlowOptimizer needs torch>=2.4: pip install torch") from error
        from zenflow.optimizer import ZenFlowOptimizer

        return ZenFlowOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
