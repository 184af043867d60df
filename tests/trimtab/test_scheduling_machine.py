"""Anything may happen to an engine in any order, and what the scheduler promises holds after each step of it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tests.trimtab.scheduling_builders import BATCH, FORGETTING, REALTIME, rules
from trimtab.engine import Costs, EngineValue
from trimtab.kv_shape import KvShape
from trimtab.messages import Workload
from trimtab.policy import Mode, Preemption
from trimtab.scheduling import LengthClass, Shape
from trimtab.scheduling.step import MIN_CHUNK
from trimtab.scheduling.victims import slice_over

BLOCK = 16
LONGEST = 13 * BLOCK
"""Tokens of a request; the smallest memory holds one, alone."""
SHAPES = (KvShape.of(BLOCK), FORGETTING)

some_rules = st.fixed_dictionaries(
    {
        "scheduler__mode": st.sampled_from(["trimtab", "trimtab", "trimtab", "fcfs", "priority"]),
        "batch__active": st.integers(1, 8),
        "batch__hard_cap": st.integers(1, 6),
        "prefill__step_tokens": st.sampled_from([1, 5, 40, 300, 2048]),
        "prefill__concurrent": st.integers(1, 3),
        "prefill__itl_budget_ms": st.sampled_from([0, 1, 30, 100, 100]),
        "prefill__max_suspend_ms": st.sampled_from([0, 200, 2000]),
        "paths__hot_below": st.sampled_from([30, 100, 1000]),
        "paths__protect": st.sampled_from(["workload", "workload", "length"]),
        "paths__realtime_max_running": st.integers(1, 8),
        "paths__realtime_reserve": st.integers(0, 2),
        "paths__cold_window_ms": st.sampled_from([0, 0, 300]),
        "serial__above": st.sampled_from([60, 150, 8192]),
        "isolate__from_tokens": st.sampled_from([120, 65536]),
        "isolate__tenants": st.sampled_from([(), ("acme",)]),
        "preemption__mode": st.sampled_from(["none", "conservative", "conservative", "aggressive"]),
        "preemption__guaranteed_time_slice_ms": st.sampled_from([0, 50, 400]),
        "preemption__max_preemptions": st.integers(0, 3),
        "priority__max_overtake_ms": st.sampled_from([1, 300, 1000, 30_000]),
        "priority__realtime_delta": st.integers(-2, 2),
        "priority__batch_delta": st.integers(-2, 2),
        "memory__pressure_threshold": st.sampled_from([0.3, 0.85, 1.0]),
        "memory__reserve_high_priority": st.sampled_from([0.0, 0.15, 0.5]),
        "clusters__spread_limit": st.sampled_from([0.0, 0.3, 1.0]),
        "clusters__short_to": st.sampled_from([40, 511, 2000]),
    }
)


class Ledger:
    """What is known of a request from outside alone."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.emitted = 0
        self.executed_ms = 0.0
        """In steps that it was part of, since it was last admitted."""
        self.produced_since_admission = 0
        self.resumed = False
        self.preempted_by_choice = 0
        self.first_step: int | None = None


class EngineMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        r=some_rules, kv=st.sampled_from(SHAPES), memory=st.floats(1.0, 3.0), token_us=st.sampled_from([20.0, 500.0])
    )
    def start(self, r, kv, memory, token_us):
        self.kv = kv
        blocks = int(kv.most(LONGEST) * memory)
        self.engine = EngineValue(Costs(10.0, token_us, 20.0), BLOCK, blocks, rules(**r), kv=None if kv.plain else kv)
        self.now, self.number, self.steps, self.work = 1000.0, 0, 0, 0
        self.ledger: dict[str, Ledger] = {}
        self.removed: set[str] = set()
        self.broken = False
        """A step has broken its word: what comes after it says nothing."""

    # What may happen.

    @rule(
        target=requests, workload=st.sampled_from(Workload), prompt=st.integers(1, 160), output=st.integers(1, 40),
        tenant=st.sampled_from(["", "", "acme"]), delta=st.integers(-2, 2), late=st.sampled_from([0.0, 0.0, 400.0]),
    )  # fmt: skip
    def add(self, workload, prompt, output, tenant, delta, late):
        self.number += 1
        request_id = f"{workload.value[0]}{self.number}"
        self.engine.add(request_id, prompt, output, workload, self.now - late, tenant=tenant, delta=delta)
        self.ledger[request_id] = Ledger(output)
        self.work += prompt + output
        return request_id

    @rule(workload=st.sampled_from(Workload), prompt=st.integers(1, 40), count=st.integers(2, 6))
    def flood(self, workload, prompt, count):
        for _ in range(count):
            self.add(workload, prompt, 4, "", 0, 0.0)

    @rule(batch=st.integers(1, 6), prompt=st.integers(5, 100), steps=st.integers(1, 15), realtime=st.integers(1, 4))
    def an_urgent_request_finds_the_engine_full(self, batch, prompt, steps, realtime):
        for n in range(batch):
            self.add(BATCH, prompt + n, 40, "", 0, 0.0)
        for _ in range(steps):
            self.a_step()
        for n in range(realtime):
            self.add(REALTIME, 10 + 5 * n, 3, "", 0, 0.0)

    @rule(request_id=consumes(requests))
    def abort(self, request_id):
        there = request_id in self.engine._sequences
        assert self.engine.remove(request_id) is there
        assert not self.engine.remove(request_id)
        if there:
            self.removed.add(request_id)

    @rule(r=some_rules)
    def new_rules(self, r):
        self.engine.set_rules(rules(**r))

    @rule(request_id=requests, delta=st.integers(-2, 2), isolated=st.booleans())
    def steer(self, request_id, delta, isolated):
        item = self.engine.planner.find(request_id)
        if item is not None:
            item.delta, item.isolated = delta, isolated
            self.engine.planner.waiting_changed([item])

    @rule(ms=st.sampled_from([5.0, 500.0, 40_000.0]))
    def time_passes(self, ms):
        self.now += ms

    @precondition(lambda self: self.engine.busy)
    @rule(count=st.integers(1, 12))
    def run_on(self, count):
        for _ in range(count):
            if self.engine.busy:
                self.a_step()

    def teardown(self):
        if not hasattr(self, "engine") or self.broken:
            return
        limit = 200 + 6 * self.work
        while self.engine.busy:
            self.a_step()
            limit -= 1
            assert limit > 0, "what is left makes no progress"
        assert self.engine.free_blocks == self.engine.total_blocks
        for request_id, known in self.ledger.items():
            if request_id not in self.removed:
                assert known.emitted == known.output

    # What must hold of each step.

    def a_step(self):
        self.broken = True
        self.check_a_step()
        self.broken = False

    def check_a_step(self):
        p, r = self.engine.planner, self.engine.rules
        items = {i.request_id: i for i in (*p.waiting, *p.running.values())}
        started_before = {i for i, item in items.items() if item.started}
        running_before = {s.request_id for s in self.engine.running}
        prefilling_before = dict(p.prefilling)
        forced_before = p.counters.forced
        chosen_before = p.counters.preemptions
        if r.preemption is Preemption.CONSERVATIVE and p.busy_ms < p.no_victim_before_ms:
            able = [i for i in p.running.values() if not i.protected and i.preemptions < r.max_preemptions]
            assert not [i for i in able if slice_over(p, i)], "somebody who could make room is hidden"
        sequences = dict(self.engine._sequences)
        alone = Shape(
            decodes=len(p.protected_decodes), kv_tokens=sum(p.computed(i) for i in p.protected_decodes.values())
        )
        known, weights = p.model.known, list(p.model.weights)
        plan = p.plan

        def remember(*args):
            self.plan = plan(*args)
            return self.plan

        p.plan = remember
        result = self.engine.step(self.now)
        del p.plan
        self.now += result.cost_ms
        self.steps += 1
        if known and alone.decodes and r.mode is Mode.TRIMTAB and p.counters.forced == forced_before:
            self.check_budget(result, alone, weights)

        assert result.tokens == sum(result.ran.values())
        assert 0 < result.tokens <= r.step_tokens
        assert set(result.ran) <= set(items)
        assert not set(result.preempted) & set(result.ran)
        assert set(result.started) <= set(result.ran)
        chosen = result.preempted[: p.counters.preemptions - chosen_before]
        for request_id in result.preempted:
            self.check_victim(request_id, items[request_id], by_choice=request_id in chosen)
        during = [items[i] for i in (running_before - set(result.preempted)) | set(result.started)]
        started = [items[i] for i in result.started]
        if chosen:
            free = self.engine.free_blocks
            short = [i for i in p.waiting if i.express and i.blocks(self.kv) > free]
            assert short or any(i.protected for i in started), "nobody came in the place of who made room"
        if started:
            assert len(during) <= r.active
        if r.mode is Mode.TRIMTAB:
            self.check_caps(during, started, prefilling_before, result.preempted)
            finished = {e.request_id for e in result.emissions if e.last}
            released = sum(self.kv.most(sequences[i].computed) for i in finished)
            taken = self.engine.total_blocks - self.engine.free_blocks + released
            if not chosen:
                # Room that somebody had to make is theirs for whom he made it; without that nobody fitted.
                self.check_overtaking([i for i in started if i.request_id not in started_before], during, taken)
        for request_id in result.started:
            known = self.ledger[request_id]
            known.resumed = known.first_step is not None
            known.first_step = self.steps if known.first_step is None else known.first_step
            known.executed_ms = known.produced_since_admission = 0
        for request_id in result.ran:
            self.ledger[request_id].executed_ms += result.cost_ms
        for e in result.emissions:
            known = self.ledger[e.request_id]
            assert e.index == known.emitted
            assert e.last is (e.index + 1 == known.output)
            known.emitted += 1
            known.produced_since_admission += 1
        assert len({e.request_id for e in result.emissions}) == len(result.emissions)

    def check_victim(self, request_id, item, *, by_choice):
        known, r = self.ledger[request_id], self.engine.rules
        if not by_choice:
            return
        assert r.mode is Mode.TRIMTAB and r.preemption is not Preemption.NONE
        assert not item.protected
        assert known.produced_since_admission or not known.resumed
        if r.preemption is Preemption.CONSERVATIVE:
            assert known.executed_ms >= r.slice_ms - 1e-6
            assert known.preempted_by_choice < r.max_preemptions
        known.preempted_by_choice += 1

    def check_budget(self, result, alone, weights):
        """Beside protected decodes a step is planned to last no longer than the budget, or than they do with the least chunk of a prompt."""

        def predicted(shape):
            return sum(w * x for w, x in zip(weights, shape.features(), strict=True))

        shape = Shape(kv_tokens=alone.kv_tokens, decodes=alone.decodes)
        shape.add_prefill(MIN_CHUNK, 200)
        least = max(predicted(alone), predicted(shape))
        assert predicted(self.plan.shape) <= max(self.engine.rules.itl_budget_ms, least) * 1.02 + 1.0

    def check_caps(self, during, started, prefilling_before, preempted):
        r = self.engine.rules
        if any(not i.express for i in started):
            assert sum(not i.express for i in during) <= r.hard_cap
        if any(i.express for i in started):
            assert sum(i.express for i in during) <= r.realtime_max_running
        if any(i.alone for i in started):
            assert sum(i.alone for i in during) == 1
        if any(i.serial for i in started):
            prefilling = [i for i in prefilling_before.values() if i.request_id not in preempted]
            # One of BATCH keeps none of the protected from starting: it pauses then.
            protected = [i for i in (*prefilling, *started) if i.serial and i.protected]
            assert len(protected) <= r.serial_prefills or not any(i in protected for i in started)
            mine = [i for i in started if i.serial and not i.protected]
            assert not mine or sum(i.serial for i in prefilling) + len(mine) <= r.serial_prefills

    def check_overtaking(self, first_started, during, taken):
        """Nobody was first scheduled before a BATCH request that is older by more than the bound and could have run beside all these."""
        e, r = self.engine, self.engine.rules
        if not first_started:
            return
        latest = max(i.arrival_ms for i in first_started)
        promised = sum(i.still_takes(self.kv) for i in e.planner.prefilling.values())
        for item in e.planner.waiting:
            if item.workload is not BATCH or item.started or latest - item.arrival_ms <= r.max_overtake_ms:
                continue
            free = e.total_blocks - taken - item.blocks(self.kv)
            if item.express:
                fits = free >= 0 and sum(i.express for i in during) < r.realtime_max_running
            else:
                fits = sum(not i.express for i in during) < r.hard_cap
                fits &= free - promised >= (0.0 if item.protected else r.reserve * e.total_blocks)
                fits &= item.hot or taken / e.total_blocks <= r.pressure_threshold
            kept = r.realtime_reserve if any(not i.express for i in during) and not item.protected else 0
            assert item.serial or item.alone or not fits or len(during) >= r.active - kept, "overtaken by too much"

    # What must hold at any time.

    @invariant()
    def blocks_balance(self):
        if not hasattr(self, "engine"):
            return
        e = self.engine
        assert e.free_blocks + sum(s.blocks for s in e._sequences.values()) == e.total_blocks
        assert e.free_blocks >= 0
        runs = {s.request_id for s in e.running}
        assert all(s.request_id in runs or (s.blocks, s.computed) == (0, 0) for s in e._sequences.values())
        if self.kv.plain:
            assert all(s.blocks == -(-s.computed // BLOCK) for s in e.running)
        # What a step left behind comes back with the next one.
        assert all(self.kv.held(s.computed) <= s.blocks <= self.kv.most(s.computed) for s in e.running)

    @invariant()
    def the_planner_agrees_with_the_engine(self):
        if not hasattr(self, "engine"):
            return
        e, p = self.engine, self.engine.planner
        waiting = {i.request_id for i in p.waiting}
        assert set(p.running) == {s.request_id for s in e.running}
        assert len(p.waiting) == len(waiting)
        assert waiting | set(p.running) == set(e._sequences)
        assert not waiting & set(p.running)
        for s in e.running:
            assert p.computed(p.running[s.request_id]) == s.computed
        decodes = {**p.rest_decodes, **p.protected_decodes}
        assert not set(p.rest_decodes) & set(p.protected_decodes)
        assert set(decodes) | set(p.prefilling) == set(p.running)
        assert not set(decodes) & set(p.prefilling)
        assert all(i.protected for i in p.protected_decodes.values())
        assert not any(i.protected for i in p.rest_decodes.values())
        for kind in (p.rest_decodes, p.protected_decodes):
            assert kind.kv_tokens == sum(e._sequences[i].computed for i in kind)
        assert p.kv_tokens == p.rest_decodes.kv_tokens + p.protected_decodes.kv_tokens
        assert p.express_running == sum(i.express for i in p.running.values())
        assert p.queued_prefill_tokens == sum(i.left for i in (*p.waiting, *p.prefilling.values()))
        assert [i.order for i in p.waiting] == sorted(i.order for i in p.waiting)
        assert p.waiting.by_workload == {w: sum(i.workload is w for i in p.waiting) for w in Workload}
        assert p.waiting.cold_batch == sum(i.workload is Workload.BATCH and not i.hot for i in p.waiting)
        assert p.running_of == {w: sum(i.workload is w for i in p.running.values()) for w in Workload}
        assert p.stored_tokens == sum(s.computed for s in e.running)
        assert p.waiting.by_length == {c: sum(i.length is c for i in p.waiting) for c in LengthClass}
        started = [sum(w.count for w in waits.values()) for waits in (p.counters.waits, p.counters.waits_by_length)]
        assert started == [sum(known.first_step is not None for known in self.ledger.values())] * 2
        assert not p._in_flight


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    report_multiple_bugs=False,
    # The same examples everywhere, so that a red build is about its change; `HYPOTHESIS_EXAMPLES` of them look further.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase
