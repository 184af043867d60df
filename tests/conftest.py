"""For every test: processes that tests start share compiled code."""

import os

# Setup compiled what is installed; our own source is compiled by whoever imports it first, and not by each started process anew.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
