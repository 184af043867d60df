"""Tests in several processes at once (pytest-xdist), and vLLM's tests alone at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WORKERS = 4
"""On two cores: half of what tests do is waiting for processes and for time."""
TESTS = Path(__file__).parent
SLOW_FIRST = ("e2e", "controlplane", "docs", "bench")
"""What takes long begins early, so that all end at about the same time."""
VLLM = "tests/vllm"


def is_whole(config: pytest.Config) -> bool:
    """All tests are asked for, or all but vLLM's: a few are done sooner by one process."""
    asked = {Path(config.invocation_params.dir, a).resolve() for a in config.args}
    whole = bool(asked & {TESTS, TESTS.parent}) or config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return whole and not config.option.keyword and config.option.markexpr in ("", "not vllm")


def spares_slow(config: pytest.Config) -> bool:
    """Whether those marked `slow` are left out: where nobody named them, and nobody wants all."""
    return is_whole(config) and not config.getoption("--all")


def is_without_vllm(config: pytest.Config) -> bool:
    """Whether none that needs vLLM will run: then their modules, which import it for seconds, are not even looked at."""
    return bool(config.option.markexpr == "not vllm")


class VllmAlone(LoadFileScheduling):
    """A file's tests stay together. vLLM's run last in one process, once all others have ended: an engine takes every core."""

    def _split_scope(self, nodeid: str) -> str:
        return VLLM if nodeid.startswith(f"{VLLM}/") else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [n for n in self.nodes if n is not node]
        if next(iter(self.workqueue)) != VLLM or not others:
            super()._assign_work_unit(node)
        elif not all(n.shutting_down for n in others):
            node.shutdown()  # after what it still has

    def remove_node(self, node: WorkerController) -> str | None:
        """It has ended. Otherwise than in the class above, a test in which it crashed isn't tried again."""
        had = self.assigned_work.pop(node)
        crashed = next(((unit, test) for unit in had.values() for test, done in unit.items() if not done), None)
        if crashed is not None:
            unit, test = crashed
            unit[test] = True
            self.workqueue.update({scope: unit for scope, unit in had.items() if not all(unit.values())})
            if VLLM in self.workqueue:
                self.workqueue.move_to_end(VLLM)
        for left in self.nodes:
            if self.collection is not None and left in self.registered_collections:
                self._reschedule(left)
        return crashed and crashed[1]


def slow_first(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        top = item.path.relative_to(TESTS).parts[0]
        return SLOW_FIRST.index(top) if top in SLOW_FIRST else len(SLOW_FIRST) + (top == "vllm")

    items.sort(key=place)
