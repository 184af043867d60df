"""`bench sizing`: what is made of what was seen. The meshes themselves are run by hand and by `make bench-sizing`."""

from __future__ import annotations

from services.bench.sizing.figures import MB, Taken, arms, text

TAKEN = [
    Taken("control plane", "nodes", 10, 70 * MB, 0.02),
    Taken("control plane", "nodes", 110, 80 * MB, 0.05),
    Taken("gateway", "streams", 0, 69 * MB, 0.006),
    Taken("gateway", "streams", 32, 70 * MB, 0.1, 1600.0),
    Taken("worker, front", "streams", 0, 690 * MB, 0.006),
    Taken("worker, front", "streams", 8, 680 * MB, 0.03, 40.0),
]


def test_what_one_more_takes_is_told_against_the_fewest_and_not_where_it_is_lost_in_what_memory_does_anyway() -> None:
    assert [a["bytes_for_each"] for a in arms(TAKEN)] == [None, 10 * MB / 100, None, None, None, None]


def test_people_see_memory_in_mb_and_what_one_more_takes_in_kb() -> None:
    head, *rows = [" ".join(line.split()) for line in text(TAKEN).splitlines()]
    assert head == "PROCESS WITH TOKENS/S MEMORY MB KB FOR EACH MORE CORES"
    assert rows == [
        "control plane 10 nodes 70 0.020",
        "control plane 110 nodes 80 102 0.050",
        "gateway 0 streams 69 0.006",
        "gateway 32 streams 1,600 70 0.100",
        "worker, front 0 streams 690 0.006",
        "worker, front 8 streams 40 680 0.030",
    ]
