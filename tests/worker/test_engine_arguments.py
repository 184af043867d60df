"""What a worker's settings come to as arguments of vLLM, and what it refuses before a model is loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.worker.engines import vllm as engines
from services.worker.engines.vllm import IN_PROCESS, VllmEngine, executor
from services.worker.engines.vllm_arguments import OURS, OWNED, Arguments, parsed, unknown
from services.worker.settings import WorkerSettings, engine_arguments
from trimtab.kit.config import ConfigError, load
from trimtab.kit.process import free_port

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def of(**said: Any) -> Arguments:
    return engine_arguments(load(WorkerSettings, "worker", flags=said, env={}))


def an_engine(arguments: Arguments, **facts: Any) -> VllmEngine:
    given: dict[str, Any] = {
        "model_path": "/models/m", "model": "m", "max_num_seqs": 8, "max_step_tokens": 512, "max_model_len": None,
        "dtype": "auto", "kv_cache_gib": 1,
    }  # fmt: skip
    return VllmEngine(**(given | facts), arguments=arguments)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_has_gpu", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_has_gpu", lambda: False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


def test_settings_that_say_nothing_are_not_passed_on() -> None:
    assert of().named(gpu=False) == {}
    assert of().alone


def test_each_setting_has_vllms_name() -> None:
    said = {
        "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "distributed_executor": "ray", "quantization": "fp8",
        "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.8, "cpu_offload_gib": 1.5,
        "engine_args": '{"enable_prefix_caching": false}',
    }  # fmt: skip
    arguments = of(**said)
    assert arguments.named(gpu=True) == {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.8,
        "cpu_offload_gb": 1.5,
        "enable_prefix_caching": False,
    }
    assert not arguments.alone


def test_a_gpus_memory_is_said_always_since_vllms_default_is_another(gpu: None) -> None:
    assert of().named(gpu=True) == {"gpu_memory_utilization": 0.9}


def test_the_engine_gets_them_beside_what_is_the_workers_own(gpu: None) -> None:
    arguments = of(tensor_parallel_size=2, engine_args='{"seed": 7, "enforce_eager": true}')
    made = an_engine(arguments, block_size=32).engine_args(executor(arguments.alone))
    assert made.items() >= OURS.items()
    assert (made["model"], made["tensor_parallel_size"], made["block_size"]) == ("/models/m", 2, 32)
    assert (made["seed"], made["enforce_eager"]) == (7, True)
    assert made["distributed_executor_backend"] is None, "vLLM chooses"
    assert "max_model_len" not in made


def test_on_a_cpu_the_model_runs_in_the_engines_process_only_if_it_is_whole(no_gpu: None) -> None:
    assert executor(of().alone) == IN_PROCESS
    assert executor(of(tensor_parallel_size=2).alone) is None
    made = an_engine(of(distributed_executor="mp")).engine_args(executor(of(distributed_executor="mp").alone))
    assert made["distributed_executor_backend"] == "mp"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"distributed_executor": "slurm"}, "ray, mp or empty"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "at most 1"),
        ({"cpu_offload_gib": -1.0}, "0 or more"),
        ({"cpu_offload_gib": float("nan")}, "0 or more"),
        ({"engine_args": "seed=7"}, "is not JSON"),
        ({"engine_args": "[1]"}, "JSON object"),
        ({"engine_args": '{"scheduler_cls": "mine"}'}, "brings its own scheduler"),
        ({"engine_args": '{"max_num_batched_tokens": 9}'}, "set max_step_tokens"),
        ({"engine_args": '{"data_parallel_size": 2}'}, "one worker for each engine"),
    ],
)
def test_what_cant_be_is_refused_with_the_settings(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(WorkerSettings, "worker", flags=said, env={})


def test_a_name_that_vllm_does_not_have_is_refused_with_the_nearest_that_may_be_set() -> None:
    known = {"enable_prefix_caching", "seed", "scheduler_cls"}
    assert unknown(["enable_prefix_cache", "seed"], known) == [
        "worker engine_args: this vLLM has no argument enable_prefix_cache; did you mean enable_prefix_caching?"
    ]
    assert unknown(["scheduler_class"], known) == ["worker engine_args: this vLLM has no argument scheduler_class"]
    with pytest.raises(ConfigError, match="no argument sead; did you mean seed"):
        Arguments(more={"sead": 7}).check(known)


def test_nothing_is_nothing() -> None:
    assert parsed("") == parsed(" ") == parsed("{}") == {}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_every_name_that_is_ours_is_one_of_vllms() -> None:
    code = (
        "from vllm.engine.arg_utils import AsyncEngineArgs as A;"
        "from services.worker.engines.vllm_arguments import OWNED, OURS, Arguments;"
        "names = {*OWNED, *OURS, *Arguments(2, 2, 'ray', 'fp8', 'fp8', 0.5, 1.0).named(gpu=True)};"
        "print(sorted(names - set(A.__dataclass_fields__)))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    assert asked.stdout.splitlines()[-1] == "[]"
    assert OURS.keys() <= OWNED.keys()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_worker_with_a_misspelt_argument_ends_with_the_settings_exit_code_before_it_loads_a_model(
    tmp_path: Path,
) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")}
    env |= {"TRIMTAB_STATE_DIR": str(tmp_path), "TRIMTAB_WORKER_ENGINE_ARGS": '{"enable_prefix_cashing": false}'}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    command = [
        sys.executable,
        "-m",
        "services.worker",
        "--model",
        str(tmp_path / "model"),
        "--parent-pid",
        str(os.getpid()),
        *("--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}"),
    ]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert ended.returncode == 2, ended.stderr
    assert "no argument enable_prefix_cashing; did you mean enable_prefix_caching?" in ended.stderr
