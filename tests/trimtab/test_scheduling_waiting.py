"""Those who wait, class by class: together they stand in one order, and a step looks at a few of each."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import BATCH, REALTIME, an_item, rules
from trimtab.scheduling.waiting import LOOK, Waiting


def a_queue(*items):
    waiting = Waiting()
    for item in items:
        waiting.add(item)
    return waiting


def ids(items):
    return [i.request_id for i in items]


def test_each_stands_in_the_line_of_its_class_and_all_in_one_order():
    r = rules(paths__hot_below=100, priority__max_overtake_ms=14)
    waiting = a_queue(
        an_item("cold", BATCH, 300, 2.0, r),
        an_item("long", REALTIME, 200, 3.0, r),
        an_item("hot", BATCH, 50, 1.0, r),
        an_item("express", REALTIME, 50, 9.0, r),
    )
    lines = (waiting.express, waiting.hot, waiting.cold_protected, waiting.cold)
    assert [ids(line) for line in lines] == [["express"], ["hot"], ["long"], ["cold"]]
    # Realtime has a handicap of 2 ms, batch of 12.
    assert ids(waiting) == ["long", "express", "hot", "cold"]
    assert (len(waiting), "hot" in waiting, waiting.get("long").prompt_tokens) == (4, True, 200)
    assert (waiting.cold_count, waiting.cold_batch) == (2, 1)
    assert [waiting.remove(i).request_id for i in ("long", "cold")] == ["long", "cold"]
    assert (len(waiting), waiting.get("long"), waiting.cold_count, waiting.cold_batch) == (2, None, 0, 0)


def test_new_rules_move_them_between_the_lines():
    item = an_item("a", REALTIME, 200)
    waiting = a_queue(item)
    item.classify(rules(paths__hot_below=100))
    waiting.resort()
    assert (len(waiting.express), ids(waiting.cold_protected)) == (0, ["a"])
    assert waiting.remove("a") is item
    assert waiting.remove("a") is None


def test_a_step_looks_at_as_many_of_each_class_as_it_could_admit_and_a_few_more():
    r = rules(paths__hot_below=100)
    many = [an_item(f"{w.value}{n}", w, 50, float(n), r) for w in (REALTIME, BATCH) for n in range(50)]
    waiting = a_queue(*many)
    found = waiting.foremost(4, lambda i: i.request_id != "batch0")
    assert ids(found) == [f"realtime{n}" for n in range(LOOK + 4)] + [f"batch{n}" for n in range(1, LOOK + 5)]


# The oldest BATCH request that was never scheduled.


def test_the_oldest_unstarted_is_of_batch_and_still_there():
    old, young = an_item("old", BATCH, arrival=2.0), an_item("young", BATCH, arrival=3.0)
    waiting = a_queue(an_item("r", REALTIME, arrival=1.0), young, old)
    assert waiting.oldest_unstarted_ms() == 2.0
    waiting.remove("old")
    assert waiting.oldest_unstarted_ms() == 3.0
    young.started = True
    assert waiting.oldest_unstarted_ms() is None


def test_one_that_comes_again_under_its_name_is_as_old_as_it_says():
    waiting = a_queue(an_item("a", BATCH, arrival=1.0))
    waiting.remove("a")
    waiting.add(an_item("a", BATCH, arrival=5.0))
    assert waiting.oldest_unstarted_ms() == 5.0


def test_behind_one_who_waits_for_ever_nothing_piles_up():
    waiting = a_queue(an_item("stuck", BATCH, arrival=0.0))
    for n in range(1000):
        waiting.add(an_item(str(n), BATCH, arrival=float(n + 1)))
        waiting.remove(str(n))
    assert len(waiting._unstarted) <= 2 * len(waiting) + LOOK + 1
    assert waiting.oldest_unstarted_ms() == 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([REALTIME, BATCH]), st.sampled_from([10, 9000]), st.booleans()),
        max_size=40,
    )
)
def test_it_agrees_with_a_sorted_list(moves):
    waiting, plain = Waiting(), []
    for number, (arrival, workload, prompt, leaves) in enumerate(moves):
        item = an_item(str(number), workload, prompt, float(arrival))
        waiting.add(item)
        plain.append(item)
        if leaves:
            gone = plain.pop(arrival % len(plain))
            assert waiting.remove(gone.request_id) is gone
        plain.sort(key=lambda i: (i.order, i.arrival_ms, int(i.request_id)))
        assert list(waiting) == plain
        oldest = min((i.arrival_ms for i in plain if i.workload is BATCH), default=None)
        assert waiting.oldest_unstarted_ms() == oldest
