# SPDX-License-Identifier: Apache-2.0
"""Callbacks for training frameworks, one module each, named after the framework that it imports (docs/frameworks.md).

Not for: anything that the optimizer needs; `import zenflow` imports none of this.
"""

from zenflow.optimizer import ZenFlowOptimizer


def unwrapped(optimizer):
    """The ZenFlowOptimizer within a framework's wrapper, if any; None if there is another optimizer, or none."""
    while optimizer is not None and not isinstance(optimizer, ZenFlowOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
