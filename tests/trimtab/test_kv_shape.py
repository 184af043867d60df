"""What a request takes of the KV cache, against a plain list of blocks that does as vLLM's managers do."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import FORGETTING, a_run
from trimtab.kv_shape import WHOLE, KvGroup, KvShape
from trimtab.snapshot import Limits

V4 = KvShape(
    (
        KvGroup(256),
        KvGroup(64, window=128, cap=19, count=2),
        KvGroup(4, window=8, cap=259),
        KvGroup(8, window=128, cap=145),
    )
)
"""Of the miniature of DeepSeek-V4 at steps of 1,024 tokens."""
some_shapes = st.sampled_from([KvShape.of(16), V4, FORGETTING, KvShape((KvGroup(16),), ahead=3)])
some_chunks = st.lists(st.integers(1, 700), min_size=1, max_size=30)


class Blocks:
    """One request in one group: before a step what lies behind goes, then there are blocks for all tokens."""

    def __init__(self, group: KvGroup, ahead: int) -> None:
        self.group, self.ahead, self.blocks = group, ahead, []

    def give_back(self, computed):
        for i in range(self.group.behind(computed)):
            self.blocks[i] = False

    def take(self, computed):
        while len(self.blocks) * self.group.block_size < computed + self.ahead:
            self.blocks.append(True)

    def held(self):
        return self.group.count * sum(self.blocks)


@given(some_shapes, some_chunks)
def test_it_counts_what_a_list_of_blocks_holds(kv, chunks):
    lists, computed = [Blocks(g, kv.ahead) for g in kv.groups], 0
    for tokens in chunks:
        held = sum(b.held() for b in lists)
        for each in lists:
            each.take(computed + tokens)
        most = sum(b.held() for b in lists)
        assert most - held == kv.taken(computed, tokens)
        assert most <= kv.most(computed + tokens + kv.ahead)
        if tokens == 1 and computed:
            assert kv.begins([computed]) == most - held
        computed += tokens
        for each in lists:
            each.give_back(computed)
        assert sum(b.held() for b in lists) == kv.held(computed) <= most


@given(st.sampled_from([8, 16, 64]), st.integers(0, 4000), st.integers(0, 500), st.integers(0, 60))
def test_where_all_layers_keep_all_tokens_it_is_what_block_size_says(size, computed, tokens, free):
    """The quick way, the slow one of the same shape, and the plain formulas agree."""
    quick, slow = KvShape.of(size), KvShape((KvGroup(size), KvGroup(WHOLE)))
    one = 1 if computed else 0
    assert quick.plain == size and not slow.plain
    assert quick.blocks(computed) == slow.blocks(computed) - 1 == computed // size + 1
    assert quick.held(computed) == slow.held(computed) - one == -(-computed // size)
    if computed:
        assert quick.taken(computed, tokens) == slow.taken(computed, tokens)
        assert quick.room(computed, tokens, free) == slow.room(computed, tokens, free)
        assert quick.room(computed, tokens, free) == min(tokens, -computed % size + free * size)
    assert quick.begins([computed, 7]) == (computed % size == 0) + (7 % size == 0)
    assert quick.longest(free) == size * free


@given(some_shapes, st.integers(0, 3000), st.integers(1, 1024), st.integers(0, 300))
def test_room_is_the_most_tokens_for_which_there_are_blocks(kv, computed, tokens, free):
    room = kv.room(computed, tokens, free)
    assert 0 <= room <= tokens
    assert kv.taken(computed, room) <= free
    assert room == tokens or kv.taken(computed, room + 1) > free


@given(some_shapes, st.lists(st.integers(1, 3000), min_size=1, max_size=12))
def test_bounds_are_never_too_low(kv, goals):
    assert sum(map(kv.blocks, goals)) <= kv.together(sum(goals), len(goals))
    step = [(n, min(n, 100)) for n in goals]
    taken = sum(kv.taken(n, tokens) for n, tokens in step)
    assert taken <= kv.of_step(sum(tokens for _, tokens in step), len(goals), 0)
    assert kv.begins(goals) <= len(goals) * kv.kinds


@given(some_shapes, st.integers(0, 5000))
def test_the_longest_request_is_the_last_one_that_fits(kv, blocks):
    longest = kv.longest(blocks)
    assert kv.most(longest) <= blocks < kv.most(longest + 1) or longest == 0


def test_a_request_of_deepseek_v4_holds_its_windows_beside_a_block_for_each_256_tokens():
    assert [V4.held(n) for n in (256 * 100, 256 * 100 + 1, 256 * 100 + 64)] == [100 + 22, 101 + 26, 101 + 22]
    assert max(V4.held(n) - -(-n // 256) for n in range(20_000, 21_000)) == 26
    # While it is read, a chunk of 1,024 tokens lies beside the windows: so much must be free before it begins.
    assert V4.most(100_000) == 391 + 2 * 19 + 259 + 145


def test_a_state_is_one_block_whatever_the_length():
    kv = KvShape((KvGroup(16), KvGroup(WHOLE, count=3)))
    assert [kv.held(n) for n in (0, 1, 16, 160)] == [0, 4, 4, 13]
    assert kv.taken(0, 16) == 4 and kv.taken(16, 16) == 1


def test_limits_say_it_by_their_block_size_or_by_their_groups():
    assert Limits(block_size=256).kv == KvShape.of(256)
    assert Limits(block_size=256, kv_groups=V4.groups).kv == V4


def test_a_prompt_waits_until_there_are_blocks_for_all_that_it_will_hold():
    """By its block size alone there would be room for 600 blocks' worth of tokens."""
    run = a_run(kv=V4, blocks=600, block_size=256, paths__hot_below=10, prefill__concurrent=4, batch__active=4)
    first, second = run.batch(prompt=3000, output=4), run.batch(prompt=3000, output=4)
    assert V4.most(3001) <= 600 < 2 * V4.most(3001)
    run.drain_until(lambda: first not in run.planner.prefilling and first in run.planner.running)
    assert run.tokens_of(second)[:-1] == [0] * (len(run.steps) - 1)
    run.drain()
    assert run.began(second) > run.began(first)
    assert run.counters.memory_preemptions == 0


def test_a_token_fills_blocks_of_every_group_and_a_state_none():
    assert KvShape.of(16).per_token() == KvShape.of(16).per_token(lasting=True) == 1 / 16
    assert V4.per_token(lasting=True) == 1 / 256
    assert V4.per_token() == 1 / 256 + 2 / 64 + 1 / 4 + 1 / 8
    assert KvShape((KvGroup(64), KvGroup(WHOLE, count=3))).per_token() == 1 / 64
