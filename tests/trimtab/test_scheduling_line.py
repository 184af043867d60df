"""The sorted queue, against a plain sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import BATCH, REALTIME, an_item, rules
from trimtab.scheduling.line import Line


def a_line(*items):
    line = Line()
    for item in items:
        line.add(item)
    return line


def ids(line):
    return [item.request_id for item in line]


def test_it_is_in_order_whoever_joins_when():
    line = a_line(an_item("b", BATCH, arrival=1.0), an_item("late", arrival=3.0), an_item("early", arrival=2.0))
    assert ids(line) == ["early", "late", "b"]
    assert line.first().request_id == "early"


def test_equals_stay_in_the_order_in_which_they_joined():
    assert ids(a_line(*(an_item(x, arrival=1.0) for x in "cab"))) == ["c", "a", "b"]


def test_an_empty_line_has_no_first_and_gives_nothing():
    line = Line()
    assert (line.first(), line.get("a"), line.remove("a"), len(line)) == (None, None, None, 0)


def test_who_has_left_is_gone_and_may_leave_again():
    line = a_line(an_item("a"), an_item("b", arrival=1.0))
    assert line.remove("a").request_id == "a"
    assert line.remove("a") is None
    assert "a" not in line
    assert ids(line) == ["b"]


def test_one_whose_order_has_changed_is_found_before_and_after_sorting_anew():
    items = [an_item("a"), an_item("b", arrival=1.0), an_item("c", arrival=2.0)]
    line = a_line(*items)
    items[0].order = 1e9
    assert line.get("a") is items[0]
    line.resort()
    assert ids(line) == ["b", "c", "a"]
    assert line.remove("a") is items[0]
    assert ids(line) == ["b", "c"]


def test_how_many_stand_ahead_counts_equals_that_were_there_before():
    r = rules()
    line = a_line(an_item("a", arrival=1.0), an_item("b", arrival=2.0), an_item("c", BATCH, arrival=0.0))
    place = an_item("new", arrival=2.0, r=r)
    assert line.ahead(place.order, place.arrival_ms) == 2
    last = an_item("new", BATCH, arrival=5.0, r=r)
    assert line.ahead(last.order, last.arrival_ms) == 3


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([REALTIME, BATCH]), st.booleans()), max_size=40))
def test_it_agrees_with_a_sorted_list(moves):
    line, plain = Line(), []
    for number, (arrival, workload, leaves) in enumerate(moves):
        item = an_item(str(number), workload, arrival=float(arrival))
        line.add(item)
        plain.append(item)
        if leaves:
            gone = plain.pop(arrival % len(plain))
            assert line.remove(gone.request_id) is gone
        plain.sort(key=lambda i: (i.order, i.arrival_ms, int(i.request_id)))
        assert list(line) == plain
        assert len(line) == len(plain)
