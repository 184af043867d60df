"""Runs a store's server in this process's place: `python -m services.bench.push.store BINARY FLAGS…`, for a starter that only starts Python."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
