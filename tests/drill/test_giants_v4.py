"""`giants --v4`: what it needs, how long is left while a giant is read, and what is made of the streams beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.bench.processes import BenchError
from services.drill import cli
from services.drill.giants_v4 import QUICK_TOKENS, TOKENS, planned, plugins, shape
from services.drill.giants_v4_figures import Curve, Found, Short, fitted, goals, notes, sections, so_far
from services.drill.options import DrillOptions

PLUGIN = Path(__file__).parents[1] / "vllm" / "dsv4" / "plugin"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "vocab_size": 129_280}))
    return tmp_path


def found(**changes: object) -> Found:
    """A giant of 1,000 tokens that has its answer, among 30 streams that felt 0.1 s at most."""
    calm = Short(0.05, 0.1, tokens=24)
    given: dict[str, object] = {
        "alone": [calm] * 5, "beside": [calm] * 30, "giant": Short(10.0, 0.1, tokens=8), "read": [(10.0, 1000)], "steps": 20,
    } | changes  # fmt: skip
    return Found(1000, 100, **given)  # type: ignore[arg-type]


def verdicts(f: Found) -> dict[str, bool | None]:
    return {goal.name: goal.met for goal in goals(f)}


def test_the_time_that_is_left_follows_how_reading_gets_slower():
    curve = Curve(0.001, 1e-7)
    seen = [(curve.seconds(n), n) for n in range(1000, 20_000, 1000)]
    assert fitted(seen).per_token == pytest.approx(curve.per_token)
    assert fitted(seen).per_square == pytest.approx(curve.per_square)
    giant = Found(100_000, 100, read=seen)
    assert giant.left_s == pytest.approx(curve.seconds(100_000) - curve.seconds(19_000))


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ([(2.0, 1000)], Curve(0.002, 0.0)),
        ([(0.5, 0), (2.0, 1000), (2.5, 1000)], Curve(0.00225, 0.0)),
        # Ever faster: not believed to go on so.
        ([(3.0, 1000), (4.0, 2000), (4.5, 3000)], None),
        # Nothing but the square, and less at first than none.
        ([(0.1, 1000), (1.0, 2000), (9.0, 3000)], None),
    ],
)
def test_what_is_fitted_never_promises_that_it_gets_faster(read, expected):
    curve = fitted(read)
    assert curve.per_token >= 0.0 and curve.per_square >= 0.0 and curve.seconds(4000) > curve.seconds(3000)
    if expected is not None:
        assert (curve.per_token, curve.per_square) == pytest.approx((expected.per_token, expected.per_square))


def test_what_is_said_on_the_way():
    assert so_far(Found(1000, 100, read=[(0.5, 0)])) == "0% of 1,000 tokens are read"
    halfway = found(read=[(60.0, 500)], beside=[Short(0.1, 0.25, tokens=24), Short(0.1, 0.0, tokens=1)])
    assert so_far(halfway) == "50% of 1,000 tokens are read, about 1:00 left; worst gap of 1 short streams 250 ms"


def test_all_is_met_where_nothing_is_lost_and_gaps_stay_within_twice_the_budget():
    assert set(verdicts(found()).values()) == {True}
    slow = found(beside=[Short(0.05, 0.3, tokens=24)] * 30)
    assert verdicts(slow)["gap_p95_s_beside_the_giant"] is False


def test_few_streams_and_a_run_cut_short_decide_nothing():
    few = verdicts(found(beside=[Short(0.05, 0.3, tokens=24)] * 3, giant=None))
    assert few == {"giant_answered": None, "lost": True, "wrong": True, "gap_p95_s_beside_the_giant": None}
    # It is shown all the same.
    assert sections(found(beside=[], giant=None, read=[], steps=0))


def test_a_lost_giant_and_a_wrong_stream_are_missed_and_told():
    bad = found(
        giant=Short(None, 0.0, "DEADLINE", message="too late"), alone=[Short(0.1, 0.1, faults=("2 Finish",), tokens=24)]
    )
    assert [verdicts(bad)[name] for name in ("giant_answered", "lost", "wrong")] == [False, False, False]
    assert notes(bad) == ["lost, DEADLINE: too late", "2 Finish"]


def test_a_directory_with_plug_ins_is_put_before_the_engine_by_their_names(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = plugins(PLUGIN)
    assert found["VLLM_PLUGINS"] == "v4_on_cpu"
    assert found["PYTHONPATH"].split(":")[1:] == [str(PLUGIN), "/elsewhere"]
    with pytest.raises(BenchError, match=r"no entry point of vllm\.general_plugins"):
        plugins(tmp_path)


def test_what_is_planned(model):
    options = DrillOptions(model=str(model))
    assert (planned(options).tokens, planned(options).environment) == (TOKENS, {})
    assert planned(DrillOptions(quick=True, model=str(model))).tokens == QUICK_TOKENS
    long = shape(planned(DrillOptions(model=str(model), tokens=200_000, plugin_path=PLUGIN)))
    assert long.flags[-2:] == ["--max-model-len", "200008"]
    assert long.environment["VLLM_PLUGINS"] == "v4_on_cpu"


def test_what_is_no_model_of_that_kind_is_known_before_the_run(model, tmp_path):
    for given, says in (("default", "--model DIRECTORY"), (str(tmp_path / "nowhere"), "does not exist")):
        with pytest.raises(BenchError, match=says):
            planned(DrillOptions(model=given))
    (model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BenchError, match="'llama', not 'deepseek_v4'"):
        planned(DrillOptions(model=str(model)))
    (model / "config.json").unlink()
    with pytest.raises(BenchError, match="is none"):
        planned(DrillOptions(model=str(model)))


@pytest.mark.parametrize(
    "arguments", [["streams", "--v4"], ["giants", "--tokens", "4000"], ["giants", "--plugin-path", str(PLUGIN)]]
)
def test_its_options_go_with_it_alone(arguments):
    done = CliRunner().invoke(cli.drill, arguments)
    assert (done.exit_code, "--v4" in done.stderr) == (2, True)
