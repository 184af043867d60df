"""Those who decode are counted, not visited: what each has and who goes first agrees with a plain list that visits everybody."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import BATCH, an_item
from trimtab.kv_shape import KvShape
from trimtab.scheduling.decodes import Decodes

BLOCK = 4


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "go", "step", "step", "hold", "hold", "miss"]),
            st.integers(0, 9),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_it_agrees_with_a_list_that_visits_everybody(moves):
    decodes, items, computed = Decodes(), {}, {}
    for number, (move, n, go_first) in enumerate(moves):
        turns = list(computed)
        if move == "come":
            name = str(number)
            items[name] = an_item(name, BATCH)
            decodes.add(items[name], 10 + n)
            computed[name] = 10 + n
        elif move == "go" and turns:
            gone = turns[n % len(turns)]
            assert decodes.remove(gone) is items[gone]
            assert decodes.remove(gone) is None
            del computed[gone]
        elif move in ("step", "hold", "miss"):
            # Nobody, the last ones as a plan has it, or some that the engine found no block for.
            idle = [] if move == "step" else turns[n:] if move == "hold" else turns[n % 3 :: 3]
            assert decodes.after(n) == turns[n:]
            assert decodes.end_with(turns[n:])
            before = sum(computed[i] for i in idle)
            decodes.step()
            assert decodes.sit_out(idle, go_first=go_first) == ([items[i] for i in idle], before)
            computed = {i: computed[i] + (i not in idle) for i in turns}
            if go_first:
                computed = {i: computed[i] for i in idle} | computed
        assert list(decodes) == list(computed)
        assert len(decodes) == len(computed)
        assert {**decodes} == {i: items[i] for i in computed}
        assert all(i in decodes for i in computed) and "nobody" not in decodes
        assert {i: decodes.computed(items[i]) for i in decodes} == computed
        assert decodes.kv_tokens == sum(computed.values())
        assert decodes.growing(KvShape.of(BLOCK)) == sum(n % BLOCK == 0 for n in computed.values())


def test_those_at_the_end_are_known_by_their_order():
    decodes = Decodes()
    for name in "abc":
        decodes.add(an_item(name), 1)
    assert decodes.end_with([])
    assert decodes.end_with(["b", "c"])
    assert not decodes.end_with(["c", "b"])
    assert not decodes.end_with(["a"])
    assert not decodes.end_with(["x", "a", "b", "c"])
