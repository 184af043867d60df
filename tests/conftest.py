"""For every test: processes that tests start share compiled code."""

from __future__ import annotations

import os
from pathlib import Path

# Where byte code must not be written beside the source, each started process compiles all that it imports anew: 10 s for vLLM and torch. It
# goes into the cache directory of pytest then, which is no part of the checkout.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache" / "pycache")
