"""Every vLLM internal that we touch, in one place: an upgrade that changes one fails here first, and says which."""

import ast
import inspect
import textwrap

import pytest


def assigned_attributes(cls):
    """Names that a class's `__init__` sets on self."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    return {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def test_the_version_is_one_that_was_tested():
    import vllm

    from services.worker.engines.vllm import TESTED_VERSIONS

    assert vllm.__version__.startswith(TESTED_VERSIONS)


@pytest.mark.parametrize(
    "name",
    [
        "running", "waiting", "kv_holding_waiting", "requests", "block_size", "scheduler_config", "kv_cache_config",
        "kv_cache_manager", "max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens",
    ],
)  # fmt: skip
def test_the_scheduler_has_the_attribute(name):
    from vllm.v1.core.sched.scheduler import Scheduler

    assert name in assigned_attributes(Scheduler)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("schedule", ["self", "throttle_prefills"]),
        ("update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        ("add_request", ["self", "request"]),
        ("finish_requests", ["self", "request_ids", "finished_status"]),
        ("_preempt_request", None),
    ],
)
def test_the_scheduler_has_the_method(method, parameters):
    from vllm.v1.core.sched.scheduler import Scheduler

    found = list(inspect.signature(getattr(Scheduler, method)).parameters)
    assert parameters is None or found == parameters


def test_both_caps_are_read_anew_in_each_step():
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert "self.max_num_active_reqs" in source
    assert "token_budget = self.max_num_scheduled_tokens" in source


def test_a_utility_call_is_looked_up_on_the_engine_core_between_steps():
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    source = inspect.getsource(EngineCoreProc._handle_client_request)
    assert "getattr(self, method_name)" in source
    assert "self.scheduler" in inspect.getsource(EngineCore.__init__)
    # The loop is decorated, so its source is found in the module's.
    source = inspect.getsource(inspect.getmodule(EngineCoreProc))
    loop = source[source.index("    def run_busy_loop(self)") :]
    assert loop.index("self._process_input_queue()") < loop.index("self._process_engine_step()")


def test_any_callable_may_be_the_scheduler_class():
    from vllm.config.scheduler import SchedulerConfig

    assert "resolve_obj_by_qualname" in inspect.getsource(SchedulerConfig.get_scheduler_cls)


def test_outputs_carry_what_we_read():
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import RequestStateStats

    stats = RequestStateStats()
    for name in ("scheduled_ts", "first_token_ts", "last_token_ts", "num_preemptions"):
        assert hasattr(stats, name)
    assert {"outputs", "metrics", "num_cached_tokens"} <= set(inspect.signature(RequestOutput.__init__).parameters)
    fields = set(CompletionOutput.__dataclass_fields__)
    assert {"token_ids", "finish_reason", "logprobs"} <= fields


def test_the_plug_in_grafts_its_calls():
    from vllm.v1.engine.core import EngineCore

    from services.worker.engines import vllm_plugin

    vllm_plugin.install()
    assert callable(EngineCore.trimtab_apply)
    assert callable(EngineCore.trimtab_facts)


def test_the_plug_in_is_installed_as_vllm_finds_it():
    from importlib.metadata import entry_points

    found = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert found["trimtab"] == "services.worker.engines.vllm_plugin:register"


def test_our_stat_logger_takes_the_place_of_vllms_own():
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    from services.worker.engines.vllm_stats import Quiet

    mine = {name for name in vars(Quiet) if not name.startswith("__")}
    theirs = {n for n, f in vars(PrometheusStatLogger).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert theirs <= mine, f"not silenced: {theirs - mine}"
    manager = StatLoggerManager(None, [0], [Quiet], enable_default_loggers=False)
    assert [type(x) for x in manager.stat_loggers] == [Quiet]
    manager.record(None, None)
