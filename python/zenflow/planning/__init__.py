# SPDX-License-Identifier: Apache-2.0
"""What a training would take, before anything is trained: `zenflow.plan()`. Needs torch only for a live model."""

from zenflow.planning.forecast import Forecast
from zenflow.planning.pipeline import Prediction, predict
from zenflow.planning.planner import plan

__all__ = ["Forecast", "Prediction", "plan", "predict"]
