"""Where a request goes."""

import pytest

from trimtab import routing
from trimtab.errors import ModelNotFound, NoWorker
from trimtab.messages import Load


def a_candidate(node_id, *, running=0, waiting=0, in_flight=0, serving=True, model="m"):
    return routing.Candidate(node_id, model, serving, Load(running=running, waiting=waiting), in_flight)


def test_the_least_loaded_worker_is_picked():
    pick = routing.pick([a_candidate("a", running=3), a_candidate("b", running=1, waiting=1)], "m")
    assert pick.node_id == "b"


def test_own_requests_count_before_the_workers_load_shows_them():
    assert routing.pick([a_candidate("a", in_flight=2), a_candidate("b", running=1)], "m").node_id == "b"


def test_ties_are_spread_by_the_callers_number():
    three = [a_candidate(x) for x in "abc"]
    assert [routing.pick(three, "m", tie=t).node_id for t in (0.0, 0.34, 0.99)] == ["a", "b", "c"]


def test_a_worker_that_does_not_serve_or_was_tried_is_left_out():
    workers = [a_candidate("a", serving=False), a_candidate("b", running=9), a_candidate("c")]
    assert routing.pick(workers, "m", avoid=("c",)).node_id == "b"


def test_no_worker_and_unknown_model_are_told_apart():
    with pytest.raises(NoWorker):
        routing.pick([], "m")
    with pytest.raises(NoWorker, match="a not serving"):
        routing.pick([a_candidate("a", serving=False)], "m")
    with pytest.raises(ModelNotFound, match="served: m"):
        routing.pick([a_candidate("a")], "other")
