"""How long the property tests run: `quick` by default, FAIRQ_HYPOTHESIS_PROFILE=thorough for long runs."""

import os

from hypothesis import HealthCheck, Phase, settings

COMMON = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
    print_blob=True,
)

# Quick runs are the same every time: a red one means a change. Thorough ones look elsewhere each time.
settings.register_profile(
    "quick", COMMON, max_examples=25, stateful_step_count=30, derandomize=True, database=None
)
settings.register_profile("thorough", COMMON, max_examples=1000, stateful_step_count=60)
# What a bug hunt wants: the first failure, made small.
settings.register_profile(
    "hunt",
    COMMON,
    max_examples=300,
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    database=None,
)
settings.load_profile(os.environ.get("FAIRQ_HYPOTHESIS_PROFILE", "quick"))
