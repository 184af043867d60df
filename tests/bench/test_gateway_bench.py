"""The bench of a gateway's token path: its figures, what it makes of what arrived, and its processes for real."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from services.bench.gateway import course, figures, smg
from services.bench.gateway.arms import GrpcArm, HttpArm
from services.bench.gateway.figures import Block, Cell
from services.bench.gateway.load import Crowd, Emissions, Received, seen
from services.bench.gateway.stand import stand
from services.bench.gateway.worker import FIRSTS, STAMP, STEPS
from services.bench.options import Options
from services.bench.processes import BenchError
from services.worker.engines.tokenizers import ByteTokenizer
from trimtab.kit.rpc import use_tls


def a_cell(per_cpu_s: float = 10_000.0, *, merged: int = 1, p50: float = 1.0, p99: float = 2.0) -> Cell:
    """One CPU-second of the gateway's."""
    messages = int(per_cpu_s)
    return Cell(4.0, messages, messages * merged, p50, p99, 1.0, 1.0, 0.5, 0.0)


def a_block(round_: int = 0, streams: int = 64, **cells: Cell) -> Block:
    known = {"mux": a_cell(25_000.0), "plain": a_cell(), "direct": a_cell(p50=0.5, p99=1.0)}
    return Block(round_, streams, known | cells)


def met(blocks: list[Block]) -> dict[str, bool | None]:
    return {g.name.rsplit("_", 1)[1]: g.met for g in figures.goals(blocks, 1) if "plain" in g.name}


def test_the_goal_is_met_where_every_round_says_so() -> None:
    blocks = [a_block(r) for r in range(6)] + [a_block(r, 256, mux=a_cell(15_000.0)) for r in range(6)]
    assert met(blocks) == {"64": True, "256": False}


def test_few_rounds_decide_nothing() -> None:
    assert met([a_block(r) for r in range(5)]) == {"64": None, "256": None}


def test_tokens_that_share_a_message_are_no_speed() -> None:
    late = a_cell(12_000.0, merged=4)
    assert late.tokens_per_cpu_s == 48_000.0
    assert met([a_block(r, mux=late) for r in range(6)])["64"] is False


def test_what_a_gateway_adds_is_against_the_same_blocks_direct_turn() -> None:
    blocks = [a_block(mux=a_cell(p50=3.0, p99=9.0)), a_block(1, mux=a_cell(p50=4.0, p99=9.0), direct=a_cell(p50=1.0))]
    found = {a["arm"]: a for a in figures.arms(blocks, 1)}
    assert (found["mux"]["added_p50_ms"], found["mux"]["added_p99_ms"]) == (2.75, 7.5)
    assert "added_p50_ms" not in found["direct"]
    assert all(text for _, text in figures.sections(list(found.values())))


def test_blocks_survive_the_disk() -> None:
    block = a_block(3, 256)
    assert Block.from_json(json.loads(json.dumps(block.as_json()))) == block


def received(request_id: str, *arrivals: tuple[float, bytes]) -> Received:
    return Received(request_id, array("d", [at for at, _ in arrivals]), [data for _, data in arrivals])


def test_a_token_is_late_by_its_own_step() -> None:
    steps = [10.0, 10.02, 10.04, 10.06]
    stream = received("r", (10.021, b"a"), (10.022, b""), (10.07, b"bc"))
    found = seen([stream], len, (steps, {"r": 1}), 0.0, 99.0)
    assert (found.messages, found.tokens) == (2, 3)
    assert found.late_ms == pytest.approx([1.0, 30.0, 10.0])


def test_what_came_outside_the_window_counts_for_the_place_alone() -> None:
    stream = received("r", (1.0, b"a"), (1.02, b"b"), (1.04, b"c"))
    found = seen([stream], len, ([0.99, 1.01, 1.03], {"r": 0}), 1.01, 1.03)
    assert (found.messages, found.late_ms) == (1, pytest.approx([10.0]))


def test_a_request_that_a_step_left_out_spoils_the_turn(tmp_path: Path) -> None:
    (tmp_path / STEPS).write_bytes(STAMP.pack(1.5) + STAMP.pack(1.75) + b"half")
    (tmp_path / FIRSTS).write_text("a 0\nb 1\n")
    assert Emissions(tmp_path).read() == ([1.5, 1.75], {"a": 0, "b": 1})
    (tmp_path / FIRSTS).write_text("a 0\na !\n")
    with pytest.raises(BenchError, match="request a was left out of a step"):
        Emissions(tmp_path).read()
    with pytest.raises(BenchError, match="knows no request x"):
        seen([received("x")], len, ([], {}), 0.0, 1.0)


async def test_arms_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no arm 'smg' here; it has mux, plain"):
        await course.run(Options(arms=("smg",), resume=tmp_path))
    with pytest.raises(BenchError, match="there is no command"):
        await course.run(Options(smg=tmp_path / "smg", resume=tmp_path))


def test_smgs_tokenizer_is_the_simulated_engines() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_str(json.dumps(smg.byte_tokenizer()))
    text = "Tell of ships — 小さな舵 🚢\n"
    ids = tuple(made.encode(text, add_special_tokens=False).ids)
    assert ids == ByteTokenizer().encode(text)
    assert made.decode(list(ids)) == text
    assert made.token_to_id("<|end|>") == ByteTokenizer.EOS


@pytest.mark.slow
async def test_every_arm_carries_the_engines_tokens_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its real processes, with few streams; what each arm counts is what the engine made."""
    use_tls(None)
    monkeypatch.setattr(course, "WINDOW_S", 0.5)
    async with stand(tmp_path, (*course.ARMS, "http"), None) as its:
        for name, arm in its.arms.items():
            cell = await course.turn(its, arm, name, 3)
            assert cell.tokens > 0, name
            assert isinstance(arm, HttpArm if name == "http" else GrpcArm)
            # A token's message can't come before its step has ended, and an alignment that is off by one step would show 20 ms less.
            assert cell.p50_late_ms > 0.0, name
            assert (cell.gateway_cpu_s == 0.0) is (name == "direct")
        assert set(json.loads(json.dumps(asdict(replace(cell, tokens=1))))) == set(asdict(cell))


async def test_a_stream_that_fails_ends_the_turn(tmp_path: Path) -> None:
    async def broken(request_id: str):
        yield b"x"
        raise OSError("gone")

    with pytest.raises(BenchError, match="a stream ended too early: gone"):
        async with Crowd(broken, ["a", "b"]):
            pass
