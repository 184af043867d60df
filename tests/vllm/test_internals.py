"""Every vLLM internal that we touch outside of its scheduler (for that, test_internals_scheduler.py): an upgrade fails here first."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest


def assigned_attributes(cls: type) -> set[str]:
    """Names that a class's `__init__` sets on self."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    return {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def text(thing: Any) -> str:
    """Its source, with every run of white space as one blank."""
    return " ".join(inspect.getsource(thing).split())


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_one_that_was_tested() -> None:
    import vllm

    from services.worker.engines.vllm import TESTED_VERSIONS

    assert vllm.__version__.startswith(TESTED_VERSIONS)


def test_the_scheduler_is_made_by_name_and_with_keywords() -> None:
    from vllm.config import VllmConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.engine.core import EngineCore

    assert "resolve_obj_by_qualname" in inspect.getsource(SchedulerConfig.get_scheduler_cls), (
        "any callable may be the class"
    )
    assert "self.scheduler: SchedulerInterface = Scheduler( vllm_config=vllm_config," in text(EngineCore.__init__)
    assert {"max_num_seqs", "max_num_batched_tokens", "async_scheduling"} <= set(SchedulerConfig.__dataclass_fields__)
    assert "additional_config" in VllmConfig.__dataclass_fields__


def test_a_utility_call_is_looked_up_on_the_engine_core_between_steps() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    source = inspect.getsource(EngineCoreProc._handle_client_request)
    assert "getattr(self, method_name)" in source
    assert "scheduler" in assigned_attributes(EngineCore)
    # The loop is decorated, so its source is found in the module's.
    source = inspect.getsource(inspect.getmodule(EngineCoreProc))
    loop = source[source.index("    def run_busy_loop(self)") :]
    assert loop.index("self._process_input_queue()") < loop.index("self._process_engine_step()")


def test_the_plug_in_grafts_its_calls_where_vllm_finds_it() -> None:
    from vllm.v1.engine.core import EngineCore

    from services.worker.engines import vllm_plugin

    vllm_plugin.install()
    for call in ("trimtab_apply", "trimtab_steer", "trimtab_facts", "trimtab_reblock"):
        assert callable(getattr(EngineCore, call))
    found = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert found["trimtab"] == "services.worker.engines.vllm_plugin:register"
    init = text(EngineCore.__init__)
    assert init.index("load_general_plugins()") < init.index("self.scheduler:"), "before the scheduler is made"


def test_an_engine_that_dies_leaves_its_last_words_and_tells_the_front_as_ever() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    from services.worker.engines import board as boards
    from services.worker.engines import vllm_plugin

    vllm_plugin.install()
    vllm_plugin.install()
    module = inspect.getsource(inspect.getmodule(EngineCoreProc))  # type: ignore[arg-type]
    run = " ".join(module[module.index("    def run_engine_core(") :].split())
    assert "except Exception as e:" in run[: run.index("engine_core._send_engine_dead()")], (
        "the error is being handled there"
    )
    path = boards.create()
    told: list[bytes] = []
    core = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config={vllm_plugin.BOARD_KEY: str(path)}),
        output_queue=SimpleNamespace(put_nowait=told.append),
        output_thread=SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False),
    )
    try:
        try:
            raise MemoryError("no pages left")
        except MemoryError:
            EngineCoreProc._send_engine_dead(core)
        assert boards.Board(path).read_words() == "MemoryError: no pages left"
    finally:
        path.unlink()
    core.vllm_config = None
    EngineCoreProc._send_engine_dead(core)
    assert told == [EngineCoreProc.ENGINE_CORE_DEAD] * 2


def test_the_front_process_knows_the_engines_processes() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import BackgroundResources, MPClient
    from vllm.v1.engine.utils import CoreEngineProcManager

    assert "engine_core" in assigned_attributes(AsyncLLM)
    assert "resources" in assigned_attributes(MPClient)
    assert "engine_manager" in BackgroundResources.__dataclass_fields__
    assert "processes" in text(CoreEngineProcManager.__init__)


def test_what_a_tokens_kv_costs_is_read_from_vllms_plan_of_its_cache() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    from services.worker.engines.vllm_memory import kv_bytes_per_token

    spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    of_a_layer = 2 * 3 * 64 * 2

    def config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
        return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=list(groups))

    alike = KVCacheGroupSpec([f"l{i}" for i in range(30)], spec)
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec, "b": spec})
    assert kv_bytes_per_token(config(alike)) == 30 * of_a_layer
    assert kv_bytes_per_token(config(KVCacheGroupSpec(["a", "b"], mixed))) == 2 * of_a_layer
    assert kv_bytes_per_token(config(alike, KVCacheGroupSpec(["x"], spec))) == 31 * of_a_layer
    assert kv_bytes_per_token(config()) == 0.0


def test_the_front_process_has_the_calls_that_we_make() -> None:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    assert {
        "model", "scheduler_cls", "scheduling_policy", "additional_config", "enforce_eager", "disable_log_stats",
        "enable_log_requests", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "worker_extension_cls",
    } <= set(AsyncEngineArgs.__dataclass_fields__)  # fmt: skip
    assert {"engine_args", "stat_loggers"} <= set(parameters(AsyncLLM.from_engine_args))
    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert parameters(AsyncLLM.abort)[:2] == ["self", "request_id"]
    assert parameters(AsyncLLM.shutdown) == ["self", "timeout"]
    assert parameters(AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    assert {"model_config", "renderer", "engine_core"} <= assigned_attributes(AsyncLLM)
    assert isinstance(AsyncLLM.errored, property) and callable(AsyncLLM.get_num_unfinished_requests)
    for call in ("get_diff_sampling_param", "try_get_generation_config", "get_vocab_size"):
        assert parameters(getattr(ModelConfig, call)) == ["self"]
    assert parameters(BaseRenderer.get_eos_token_id) == ["self"] and "tokenizer" in assigned_attributes(BaseRenderer)
    assert tokens_input([1, 2])["prompt_token_ids"] == [1, 2]


def test_a_request_goes_by_another_id_inside_the_engine() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    assert 'request.request_id = f"{request.external_req_id}-{random_uuid():.8}"' in text(InputProcessor)


def test_sampling_parameters_take_what_we_set() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    assert {
        "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logprobs", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "structured_outputs", "extra_args",
        "detokenize", "output_kind",
    } <= set(parameters(SamplingParams))  # fmt: skip
    assert {"json", "json_object", "regex", "choice", "grammar"} <= set(StructuredOutputsParams.__dataclass_fields__)
    # `vllm_sampling.py` asks the same beforehand; without the third, no structure is looked at.
    looked_at = ["self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer"]
    assert parameters(SamplingParams.verify) == looked_at
    assert "params.verify(" in text(InputProcessor) and "structured_outputs_config is None" in text(SamplingParams)
    assert {"model_config", "speculative_config", "structured_outputs_config"} <= assigned_attributes(InputProcessor)
    assert "input_processor" in assigned_attributes(AsyncLLM) and isinstance(InputProcessor.tokenizer, property)
    assert RequestOutputKind.DELTA


def test_errors_that_we_tell_apart() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    assert not issubclass(EngineDeadError, ValueError | VLLMValidationError | EngineGenerateError)
    assert not issubclass(EngineGenerateError, ValueError | VLLMValidationError)


def test_vllm_reads_the_environment_that_we_set() -> None:
    from vllm import envs

    from services.worker.engines import vllm as ours

    assert {n for n in ours.environment(1) if n.startswith("VLLM_")} <= set(envs.environment_variables)


def test_on_a_cpu_the_model_runs_where_the_scheduler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor.abstract import Executor

    from services.worker.engines import vllm as ours

    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(ours, "_has_gpu", lambda: False)
    parallel = SimpleNamespace(distributed_executor_backend=ours.executor())
    assert issubclass(Executor.get_class(SimpleNamespace(parallel_config=parallel)), Executor)
    # Only its short name is replaced by another one on a CPU.
    assert '.distributed_executor_backend == "uni"' in text(CpuPlatform.check_and_update_config)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert ours.executor() is None, "who binds threads wants vLLM's own way"


def test_outputs_carry_what_we_read() -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import FINISH_REASON_STRINGS
    from vllm.v1.metrics.stats import RequestStateStats

    stats = RequestStateStats()
    for name in ("scheduled_ts", "first_token_ts", "last_token_ts", "num_preemptions"):
        assert hasattr(stats, name)
    assert {"outputs", "metrics", "num_cached_tokens"} <= set(parameters(RequestOutput.__init__))
    assert {"token_ids", "finish_reason", "logprobs"} <= set(CompletionOutput.__dataclass_fields__)
    assert {"logprob", "rank"} <= set(parameters(Logprob))
    assert {"stop", "length"} <= set(FINISH_REASON_STRINGS)


def test_our_stat_logger_takes_the_place_of_vllms_own() -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    from services.worker.engines.vllm_stats import Quiet

    mine = {name for name in vars(Quiet) if not name.startswith("__")}
    theirs = {n for n, f in vars(PrometheusStatLogger).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert theirs <= mine, f"not silenced: {theirs - mine}"
    manager = StatLoggerManager(None, [0], [Quiet], enable_default_loggers=False)
    assert [type(x) for x in manager.stat_loggers] == [Quiet]
    manager.record(None, None)
