"""Blocks of DeepSeek-V4's layers are counted as vLLM counts them; with few of them vLLM refuses nothing that was planned."""

from __future__ import annotations

import os

from tests.vllm.conftest import ROOT
from tests.vllm.counted import count
from tests.vllm.dsv4 import tiny_model
from tests.vllm.dsv4.conftest import FIGURES, PLUGIN


def test_a_real_engines_pool_loses_what_is_counted_and_refuses_nothing() -> None:
    model = tiny_model.make(tiny_model.default_directory())
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(PLUGIN))), "VLLM_PLUGINS": "v4_on_cpu,trimtab"}
    steps, differ, refused, preempted = count(str(model), 150, {**env, "HF_HUB_OFFLINE": "1"})
    assert steps > 100 and (differ, refused, preempted) == (0, 0, 0)
    FIGURES.append(f"blocks counted in {steps} steps: none differs from what vLLM's pool lost")
