"""`bench peers`: turns, what is kept, and which figures say that ours is behind. Without vLLM and without SMG."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.bench import turns
from services.bench.figures import Block, Cell
from services.bench.load import Burst, Sample
from services.bench.options import Options
from services.bench.peers import course, figures
from services.bench.peers.course import MAX_TOKENS, REQUESTS, Parts
from services.bench.processes import BenchError
from services.bench.start import Shape
from trimtab.kit.cli import ExitCode

ROLES = ("gateway", "worker", "engine")


@pytest.fixture(autouse=True)
def _no_engine_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(course.smg, "check", lambda path: None)
    monkeypatch.setattr(turns, "QUIET_POLL_S", 0.001)
    monkeypatch.setattr(turns, "QUIET_LIMIT_S", 0.0)


class FakeArm:
    def __init__(self, name: str, bursts: list[tuple[str, int, int]], ttft_ms: float) -> None:
        self.name, self._bursts, self._ttft_ms = name, bursts, ttft_ms
        self.roles: Mapping[str, str] = {role: f"{name} {role}" for role in ROLES}

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        self._bursts.append((self.name, concurrency, max_tokens))
        await asyncio.sleep(0)
        return Burst(tuple(Sample(self._ttft_ms, 100.0, max_tokens) for _ in texts), len(texts) * max_tokens / 1000)


class FakeProcesses:
    def cpu_s(self) -> dict[str, float]:
        return dict.fromkeys([*(f"{arm} {role}" for arm in figures.ARMS for role in ROLES), "client"], 1.0)

    def check(self) -> None: ...


class Stands:
    """What a course is given. `bursts` are (arm, concurrency, tokens), those of a whole turn alone in `turns`."""

    def __init__(self) -> None:
        self.bursts: list[tuple[str, int, int]] = []
        self.starts = 0

    @asynccontextmanager
    async def stand(self, directory: Path, shape: Shape, path: Path) -> AsyncIterator[tuple[FakeProcesses, Any]]:
        self.starts += 1
        yield FakeProcesses(), {name: FakeArm(name, self.bursts, 40.0) for name in figures.ARMS}

    @property
    def turns(self) -> list[tuple[str, int]]:
        return [(arm, concurrency) for arm, concurrency, tokens in self.bursts if tokens == MAX_TOKENS]


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(**{"resume": tmp_path / "run", "smg": tmp_path / "smg", "rounds": 6, **fields})


async def test_both_take_turns_and_what_is_measured_is_kept(tmp_path: Path) -> None:
    stands = Stands()
    report = await course.run(options(tmp_path), Parts(stands.stand))
    there, back = list(figures.ARMS), list(figures.ARMS[::-1])
    wanted = [(arm, c) for r in range(6) for c in REQUESTS for arm in (back if r % 2 else there)]
    assert stands.turns == wanted
    assert [(a["arm"], a["concurrency"]) for a in report.arms] == [(arm, c) for c in REQUESTS for arm in figures.ARMS]
    assert {g.met for g in report.goals} == {True} and len(report.goals) == 2 * len(REQUESTS)
    assert report.arms[0]["ttft_samples"] == 6 * (REQUESTS[1] + course.FIRSTS[1])
    assert "TO SMG" in report.text()
    again = Stands()
    second = await course.run(options(tmp_path), Parts(again.stand))
    assert again.starts == 0 and second.arms == report.arms


async def test_quick_decides_nothing(tmp_path: Path) -> None:
    report = await course.run(options(tmp_path, quick=True, rounds=None), Parts(Stands().stand))
    assert {g.met for g in report.goals} == {None} and any("decide nothing" in n for n in report.notes)


async def test_without_smg_it_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="uv pip install") as e:
        await course.run(options(tmp_path, smg=None), Parts(Stands().stand))
    assert e.value.code is ExitCode.USAGE


def a_block(round_: int, ours: Cell, smg: Cell) -> Block:
    return Block(round_, 8, {"ours": ours, "smg": smg})


def a_cell(tokens_per_s: float = 100.0, ttft_ms: float = 50.0) -> Cell:
    return Cell(1000 / tokens_per_s, 1000, (ttft_ms, ttft_ms), {**dict.fromkeys(ROLES, 0.1), "client": 0.2}, 0.0, 0.0)


@pytest.mark.parametrize(
    ("ours", "behind"),
    [
        (a_cell(96.0, 52.0), set()),
        (a_cell(90.0, 50.0), {"tokens_per_s_ratio_to_smg_lower_at_8"}),
        (a_cell(100.0, 60.0), {"ttft_p50_ratio_to_smg_upper_at_8"}),
    ],
)
def test_what_is_surely_behind_by_more_than_the_margin_is_missed(ours: Cell, behind: set[str]) -> None:
    goals = figures.goals([a_block(r, ours, a_cell()) for r in range(6)], [8], 1)
    assert {g.name for g in goals if g.met is False} == behind
    assert all(g.met is not None for g in goals)
    assert [g.met for g in figures.goals([], [8], 1)] == [None, None]
    assert figures.sections([]) == []
