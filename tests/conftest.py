"""For every test: processes share compiled code, tests run side by side, and no property fails because the machine is slow."""

import os
import signal
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import workers

# Setup compiled what is installed; our own source is compiled by whoever imports it first, and not by each started process anew.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False

# Where these run in the background of a shell, Ctrl-C is ignored by them, and would be by all that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Rich's pictures of tracebacks, with every frame's source and locals, take 70 ms each, and what tests provoke is full of them.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# Over what is in force already: Hypothesis has a profile of its own for CI, which draws the same examples each time.
settings.register_profile(
    "any machine",
    parent=settings.default,
    deadline=None,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.too_slow],
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="with those marked `slow`; tests that are named run in any case"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    return "those marked `slow` are left out; --all runs them too" if workers.spares_slow(config) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == workers.TESTS / "vllm" and workers.is_without_vllm(config) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if workers.spares_slow(config):
        slow = {item for item in items if item.get_closest_marker("slow")}
        config.hook.pytest_deselected(items=[item for item in items if item in slow])
        items[:] = [item for item in items if item not in slow]
    if hasattr(config, "workerinput"):
        workers.slow_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and workers.TESTS / "vllm" not in item.path.parents:
        pytest.fail(f"it needs vLLM, and so belongs into {workers.VLLM}/: others run side by side", pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.WORKERS if workers.is_whole(config) else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> workers.VllmAlone | None:
    return workers.VllmAlone(config, log) if config.getvalue("dist") == "loadfile" else None
