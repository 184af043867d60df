"""Becomes another program on a host of the drill: `python -m services.drill.hosts.inside NAMESPACE ARGUMENTS…`, after the same interpreter.

It stays the same process, with the same parent, so that whoever started it can end it, and it ends with its parent.
"""

from __future__ import annotations

import os
import sys

from services.drill.hosts.namespaces import join


def main(argv: list[str]) -> None:
    join(argv[0])
    os.execv(sys.executable, [sys.executable, *argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
