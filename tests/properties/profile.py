"""How long the property tests run: `quick` by default, FAIRQ_HYPOTHESIS_PROFILE=thorough for long runs.

FAIRQ_HYPOTHESIS_EXAMPLES=10000 tries so many examples, whatever the profile says.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_COMMON = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
    print_blob=True,
)

_PROFILES = {
    # Quick runs are the same every time: a red one means a change. They say what failed; to make it small
    # takes minutes, and is for a hunt. Thorough ones look elsewhere each time.
    "quick": settings(
        _COMMON,
        max_examples=25,
        stateful_step_count=30,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        database=None,
    ),
    "thorough": settings(_COMMON, derandomize=False, max_examples=1000, stateful_step_count=60),
    # What a bug hunt wants: the first failure, made small.
    "hunt": settings(
        _COMMON,
        derandomize=False,
        max_examples=300,
        stateful_step_count=40,
        phases=[Phase.generate, Phase.shrink],
        database=None,
    ),
}
_CHOSEN = _PROFILES[os.environ.get("FAIRQ_HYPOTHESIS_PROFILE", "quick")]
_EXAMPLES = os.environ.get("FAIRQ_HYPOTHESIS_EXAMPLES")
PROFILE = settings(_CHOSEN, max_examples=int(_EXAMPLES)) if _EXAMPLES else _CHOSEN
