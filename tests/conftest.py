# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles ("ci", or --hypothesis-profile=quick|long), and one torch thread for all tests."""

import torch
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=60, **COMMON)
settings.register_profile("quick", max_examples=10, **COMMON)
settings.register_profile("long", max_examples=2000, **{**COMMON, "derandomize": False})
settings.load_profile("ci")

torch.set_num_threads(1)
