"""Tests in several processes at once (pytest-xdist): ports that no two of them share, and vLLM's tests alone at the end."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from trimtab.kit.process import port_is_free

WORKERS = 4
"""On two cores: half of what tests do is waiting for processes and for time."""
TESTS = Path(__file__).parent
SLOW_FIRST = ("e2e", "controlplane", "docs", "bench")
"""What takes long begins early, so that all end at about the same time."""
VLLM = "tests/vllm"

FIRST, END = 10_000, 32_000
"""Below what the kernel gives to those who ask for any port."""
BLOCK = 1000
STRIDE = 10
"""Who finds a port taken tries the next ones; those are not given to anybody soon."""


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


def ports_of_its_own() -> Callable[[], int] | None:
    """Gives a port that no other process of tests on this machine gets, as long as this one lives. None where all blocks are taken."""
    directory = Path(tempfile.gettempdir(), f"trimtab-test-ports-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    for first in range(FIRST, END, BLOCK):
        lock = (directory / str(first)).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return _ports(first, lock).__next__
    return None


def _ports(first: int, lock: IO[str]) -> Iterator[int]:
    with lock:  # the kernel lets go of it when this process ends
        for offset in itertools.cycle([n for start in range(STRIDE) for n in range(start, BLOCK, STRIDE)]):
            if port_is_free(first + offset):
                yield first + offset
