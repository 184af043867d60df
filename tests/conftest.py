"""For every test: processes that tests start share compiled code, and no property fails because the machine is slow."""

import os

from hypothesis import HealthCheck, settings

# Setup compiled what is installed; our own source is compiled by whoever imports it first, and not by each started process anew.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""

# Over what is in force already: Hypothesis has a profile of its own for CI, which draws the same examples each time.
settings.register_profile(
    "any machine",
    parent=settings.default,
    deadline=None,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.too_slow],
)
settings.load_profile("any machine")
