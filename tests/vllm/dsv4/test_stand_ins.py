"""The stand-ins give what V4's own metadata kernels give, which Triton's interpreter runs here as vLLM ships them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.vllm.conftest import ROOT
from tests.vllm.dsv4.conftest import PLUGIN


def test_the_stand_ins_compute_what_the_kernels_compute() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(PLUGIN)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.dsv4.interpreted"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "120 outputs compared, 0 differ"
