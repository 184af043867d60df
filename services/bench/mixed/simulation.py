"""`trimtab bench mixed --trace`: the public traces by FCFS, priority and our scheduler, in virtual time on the simulated engine.

The scheduler is the one that is served; what a step costs is made up (`COSTS`). So this says how orders compare on long prompts and bursty
arrivals that the real engine of this machine could not hold, and nothing of milliseconds on a GPU: no goal is judged on it.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.bench.mixed import figures, picture, tables
from services.bench.mixed.arms import BATCH_ALONE, FCFS, PRIORITY, REALTIME_ALONE, Arm, ours
from services.bench.mixed.block import COUNTERS, Block, Request
from services.bench.mixed.traces import MIXES, Entry, Mix
from services.bench.mixed.workload import busy_share
from services.bench.options import Options
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.stats import quantile
from trimtab.engine import Costs, EngineValue
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits

COSTS = Costs(step_ms=8.0, token_us=40.0, context_us=1.0)
"""An 8B model on an H200, roughly: 2,048 tokens of prefill take 90 ms, attention over one prompt of 128k tokens 8 s in all."""
BLOCK_SIZE, KV_TOKENS = 16, 1 << 20
SLOTS, STEP_TOKENS = 48, 2048
BUDGETS_MS = (20, 40, 80)
FULL_SHARE = 0.8
LOAD = 0.9
"""Of what FCFS gets done when everything is there at once. The trace's times are stretched to that."""
REQUESTS, QUICK_REQUESTS = 800, 200
ROUNDS = 10
"""Parts of the trace, by time of arrival, that stand for rounds in the intervals."""
EXPECTED_S = 8.0
"""For one arm, for the forecast only."""
YIELD_EVERY = 200
"""Steps between two looks at whether to stop."""


@dataclass(slots=True)
class Fate:
    """What became of one entry, in milliseconds of virtual time."""

    entry: Entry
    first_ms: float = 0.0
    last_ms: float = 0.0
    gaps_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """`progress` are (milliseconds, tokens computed for the first time) after each step."""

    fates: Sequence[Fate]
    progress: Sequence[tuple[float, float]]
    counters: dict[str, float]
    max_overtake_ms: float

    @property
    def end_ms(self) -> float:
        return self.progress[-1][0] if self.progress else 0.0

    def computed_by(self, moment_s: float) -> float:
        """Tokens by then."""
        at = bisect.bisect_right(self.progress, moment_s * 1000.0, key=lambda p: p[0])
        return self.progress[at - 1][1] if at else 0.0


def engine_for(arm: Arm) -> EngineValue:
    """The thresholds of the default policy, which are for windows of 128K; only mode and budget are the arm's."""
    limits = Limits(SLOTS, STEP_TOKENS, 131_072, BLOCK_SIZE, KV_TOKENS // BLOCK_SIZE, "simulated")
    rules = Rules.of(with_fields(Policy(), arm.policy), limits)
    return EngineValue(COSTS, BLOCK_SIZE, KV_TOKENS // BLOCK_SIZE, rules)


def simulate(arm: Arm, entries: Sequence[Entry]) -> Iterator[float | Outcome]:
    """Virtual time, in steps: now and then the share that has arrived, at last the outcome."""
    engine, now, came, steps = engine_for(arm), 0.0, 0, 0
    fates = [Fate(e) for e in entries]
    gaps: list[list[float]] = [[] for _ in entries]
    computed: list[tuple[float, float]] = []
    while came < len(entries) or engine.busy:
        if not engine.busy:
            now = max(now, entries[came].at_s * 1000.0)
        while came < len(entries) and entries[came].at_s * 1000.0 <= now:
            e = entries[came]
            engine.add(str(came), e.prompt, e.output, e.workload, e.at_s * 1000.0)
            came += 1
        result = engine.step(now)
        now += result.cost_ms
        for emission in result.emissions:
            i = int(emission.request_id)
            fate = fates[i]
            if fate.last_ms:
                gaps[i].append(now - fate.last_ms)
            else:
                fate.first_ms = now
            fate.last_ms = now
        steps += 1
        c = engine.planner.counters
        computed.append((now, float(c.computed_tokens - c.recomputed_tokens)))
        if steps % YIELD_EVERY == 0:
            yield came / len(entries)
    for fate, found in zip(fates, gaps, strict=True):
        fate.gaps_ms = tuple(found)
    c = engine.planner.counters
    counters = {name: float(getattr(c, name, 0)) for name in COUNTERS} | {"steps": float(steps)}
    yield Outcome(fates, computed, counters, c.max_overtake_ms)


def blocks(arm: Arm, outcome: Outcome, span_s: float) -> list[Block]:
    """The outcome in ROUNDS parts of the trace's span, the last with all that comes after: a request belongs to where it arrived."""
    realtime = [f for f in outcome.fates if f.entry.workload is Workload.REALTIME]
    present = [(f.entry.at_s, f.last_ms / 1000.0) for f in realtime]
    edges = [k * span_s / ROUNDS for k in range(ROUNDS)] + [max(span_s + 1e-3, outcome.end_ms / 1000.0)]
    found = []
    for k, (begin, end) in enumerate(itertools.pairwise(edges)):
        mine = [f for f in realtime if begin <= f.entry.at_s < end]
        ended = [f.entry for f in outcome.fates if begin < f.last_ms / 1000.0 <= end]
        found.append(
            Block(
                arm=arm.name,
                round=k,
                measured_s=end - begin,
                tokens=outcome.computed_by(end) - outcome.computed_by(begin),
                realtime_tokens=float(sum(e.prompt + e.output for e in ended if e.workload is Workload.REALTIME)),
                realtime=tuple(_request(f) for f in mine),
                busy_share=busy_share(present, begin, end),
                batch_ended=sum(e.workload is Workload.BATCH for e in ended),
                max_overtake_ms=outcome.max_overtake_ms,
                counters={name: value / ROUNDS for name, value in outcome.counters.items()},
            )
        )
    return found


def _request(f: Fate) -> Request:
    due_ms = f.entry.at_s * 1000.0
    return Request(f.entry.number, f.first_ms - due_ms, f.last_ms - due_ms, f.gaps_ms)


def only(arm: Arm, entries: Sequence[Entry]) -> list[Entry]:
    """What of the trace the arm sends."""
    wanted = {w for w, sends in ((Workload.REALTIME, arm.realtime), (Workload.BATCH, arm.batch)) if sends}
    return [e for e in entries if e.workload in wanted]


def stretched(entries: Sequence[Entry], factor: float) -> list[Entry]:
    return [replace(e, at_s=e.at_s * factor) for e in entries]


async def _drive(steps: Iterator[float | Outcome]) -> Outcome:
    """To the end, letting a signal in between."""
    for found in steps:
        if isinstance(found, Outcome):
            return found
        await asyncio.sleep(0)
    raise AssertionError("a simulation ends with its outcome")


async def run(options: Options) -> Report:
    """Every mix whose files are there. Cancelled, it reports the mixes that are whole."""
    directory = options.trace
    assert directory is not None
    arms = (
        FCFS,
        PRIORITY,
        *(ours(b) for b in sorted(options.itl_budgets_ms or BUDGETS_MS)),
        REALTIME_ALONE,
        BATCH_ALONE,
    )
    count = QUICK_REQUESTS if options.quick else REQUESTS
    report = Report("mixed (simulated)", [], [], machine=machine(), command=command(), notes=[_said(count)])
    try:
        with progress(len(MIXES) * (len(arms) + 1) * EXPECTED_S * count / REQUESTS) as show:
            for mix in MIXES:
                missing = [name for name in mix.files if not (directory / name).is_file()]
                if missing:
                    report.notes.append(f"{mix.name} is skipped: {directory / missing[0]} is not there")
                    continue
                await _mix(mix, arms, count, options, report, show)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        report.whole = False
        report.notes.append("interrupted: mixes that are not here were not simulated to the end")
    return report


async def _mix(mix: Mix, arms: Sequence[Arm], count: int, options: Options, report: Report, show: Progress) -> None:
    """One mix by all arms, added to the report."""
    assert options.trace is not None
    expected_s = EXPECTED_S * count / REQUESTS
    entries = mix.entries(options.trace, count, options.seed)
    show.stage(f"{mix.name}: what FCFS gets done when all {len(entries)} requests are there at once")
    flood = await _drive(simulate(FCFS, stretched(entries, 0.0)))
    show.done(expected_s)
    work = flood.progress[-1][1]
    # Without the end, in which a few long outputs leave most slots empty.
    full = bisect.bisect_left(flood.progress, FULL_SHARE * work, key=lambda p: p[1])
    per_s = flood.progress[full][1] / (flood.progress[full][0] / 1000.0)
    entries = stretched(entries, work / (LOAD * per_s) / max(entries[-1].at_s, 1e-9))
    found: dict[str, list[Block]] = {}
    batch_ms: dict[str, list[float]] = {}
    for arm in arms:
        show.stage(f"{mix.name}: {arm.name}")
        outcome = await _drive(simulate(arm, only(arm, entries)))
        found[arm.name] = blocks(arm, outcome, entries[-1].at_s)
        batch_ms[arm.name] = [
            f.last_ms - f.entry.at_s * 1000.0 for f in outcome.fates if f.entry.workload is Workload.BATCH
        ]
        show.done(expected_s)
    made = []
    for arm in arms:
        figure = figures.arm_figures(arm, found, options.seed, quick=False)
        batch = (
            {q: quantile(batch_ms[arm.name], rank) for q, rank in figures.QUANTILES.items()}
            if batch_ms[arm.name]
            else {}
        )
        made.append({"mix": mix.name, "simulated": True, **figure, "batch_e2e_ms": batch})
    report.arms += made
    title = f"{mix.name}: {mix.says}"
    known = f"{len(entries)} requests over {entries[-1].at_s:.0f} s of virtual time; FCFS gets {per_s:.0f} tokens/s done when flooded"
    report.sections.append((f"SIMULATED, {title}", known))
    report.sections += [(f"simulated, {mix.name}: {name}", text) for name, text in tables.sections(made)]
    report.sections.append((f"simulated, {mix.name}: batch, whole request (E2E), s", tables.batch_e2e(made)))
    if options.png is not None:
        path = options.png.with_stem(f"{options.png.stem}-{mix.name}")
        # Batch alone is no ceiling here: it gets done what comes.
        picture.draw(path, [a for a in made if a["arm"] != BATCH_ALONE.name], f"simulated engine and costs: {mix.name}")
        report.notes.append(f"picture: {path}")


def _said(count: int) -> str:
    costs = (
        f"{COSTS.step_ms:g} ms + {COSTS.token_us:g} µs a token + {COSTS.context_us:g} µs per 1,000 tokens of context"
    )
    return (
        f"SIMULATED: no engine ran. A step costs {costs}, which is made up; its fidelity is not shown, and no goal is judged on it. "
        f"The first {count} requests of a mix arrive at {LOAD:.0%} of what FCFS gets done; everybody is served in the end, so what "
        "an order changes is who waits, not tokens/s"
    )
