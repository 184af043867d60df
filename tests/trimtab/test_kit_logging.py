"""A log that can't be written costs its lines, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, structlog
from trimtab.kit import telemetry
telemetry.setup_logging("p", json_logs=True)
log = structlog.get_logger()
sys.stdin.readline()
for i in range(2000):
    log.info("line", number=i, filler="x" * 100)
print("went on", file=sys.stderr)
"""


def test_who_reads_the_log_may_go() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(60) == 0
    assert said.count("the log can't be written") == 1
    assert "went on" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_reason_to_end() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input="\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr.count("the log can't be written") == 1
    assert "went on" in done.stderr
