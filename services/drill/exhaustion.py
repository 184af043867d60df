"""`trimtab drill exhaustion`: a KV cache of 0.1 GiB, and a backlog of BATCH that needs more of it than there is, with REALTIME beside.

Nothing fails of that: the scheduler preempts, and what was preempted is computed anew, which is work for nothing. `memory` has to foresee the
full cache and lower the pool's pressure line, so that cold requests are let in later and less is computed twice. It is compared with the
same load while the loop is off, and with the share of the cache that the policy keeps free by default, which saves more.

With --vllm the same on a real engine: vLLM's `kv_cache_memory_bytes` makes its cache small, and all tokens are compared in float32.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from services.bench.checkpoint import new_directory
from services.bench.load import prompts
from services.bench.processes import BenchError
from services.bench.progress import Progress
from services.bench.report import Report
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.bench.stats import quantile
from services.drill.admin import Telemetry
from services.drill.cases import Case
from services.drill.crowd import Crowd
from services.drill.loop_figures import Trial, policy_words, present
from services.drill.loops import CALM, LOOP_S, POLL_S, STEP_MS, Stand, conducted, stand
from services.drill.mesh import Shape
from services.drill.options import DrillOptions
from services.drill.witness import Seen
from trimtab import measures
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import Sampling, Workload
from trimtab.policy import Policy

POOL_BYTES = (1 << 30) // 10
BLOCK, BLOCKS, WINDOW, SEQS = 16, 144, 1024, 32
"""Of the simulated engine: as many tokens of KV as 0.1 GiB are for SmolLM2 in float32."""
REAL_BLOCK = 32
"""Of vLLM's accepted sizes the smallest: one of 0.1 GiB has 72 of them."""
FIELD = "memory.pressure_threshold"
WITHIN_S = 60.0 + 15.0 + 5.0 + LOOP_S
"""What `memory` needs to see before it foretells anything, how long that must then hold, a sample; and what every loop may take."""
BETTER = 0.8
"""Of the share that is computed anew while the loop is off; below that the loop has helped."""
POLICY = {**CALM, "loops.memory": "off", "memory.reserve_high_priority": "0", "memory.forecast_above": "0.7"}
BATCH_TOKENS, REALTIME_TOKENS = (100, 150), (16, 24)
CALLERS = {Workload.REALTIME: 2, Workload.BATCH: 24}
AT_EASE = 4
"""Cases at a time that fit into the cache together."""
ASKED = 3
ON, OFF, KEPT = "kv exhausted", "kv exhausted, loop off", "kv exhausted, a part kept free"


@dataclass(frozen=True, slots=True)
class Plan:
    """`words` of each workload's prompts; those of `hot_below` tokens and more are cold. Seconds: `settle_s` until a load or a rule shows,
    `watch_s` of what is then compared, and `kept_s` of the last trial, which 0 leaves out."""

    engine: str
    words: dict[Workload, tuple[int, int]] = field(hash=False)
    hot_below: int
    different: int = 24
    settle_s: float = 6.0
    watch_s: float = 40.0
    kept_s: float = 40.0
    expected_s: float = 270.0

    @property
    def policy(self) -> dict[str, str]:
        return {**POLICY, "paths.hot_below": str(self.hot_below)}

    def named(self, trial: str) -> str:
        return trial if self.engine == "simulated" else f"{trial}, {self.engine}"


# A token of a simulated engine is a byte.
FULL = Plan("simulated", {Workload.REALTIME: (4, 8), Workload.BATCH: (22, 36)}, 140)
QUICK = replace(FULL, different=16, settle_s=5.0, watch_s=20.0, kept_s=0.0, expected_s=155.0)
REAL = replace(
    Plan("vllm", {Workload.REALTIME: (4, 8), Workload.BATCH: (90, 150)}, 64),
    settle_s=15.0, watch_s=90.0, kept_s=45.0, expected_s=560.0,
)  # fmt: skip


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL
    real = None
    if options.vllm:
        model = await asyncio.to_thread(model_path, options.model)
        real = real_shape(model)

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh with a simulated engine whose KV cache is small")
        async with stand(new_directory("drill-exhaustion"), simulated_shape()) as s:
            await drilled(s, wanted, options.seed, trials, show)
        if real is not None:
            show.stage("starting a worker with vLLM and a KV cache of 0.1 GiB")
            async with stand(new_directory("drill-exhaustion-real"), real) as s:
                await drilled(s, REAL, options.seed, trials, show)

    said = [
        policy_words(wanted.policy) + (f"; on vLLM paths.hot_below={REAL.hot_below}" if real else ""),
        f"a KV cache of {BLOCKS * BLOCK} tokens ({BLOCKS} blocks; on vLLM kv_cache_memory_bytes={POOL_BYTES})",
        f"{CALLERS[Workload.BATCH]} callers of BATCH, of which so many run as fit; {CALLERS[Workload.REALTIME]} of REALTIME",
        "times count from the moment at which the loop is switched on under that load",
    ]
    if options.quick:
        said.append("--quick: without the share of the cache that the policy keeps free by default")
    common = (
        "one worker, a gateway, a control plane with a Valkey of its own; clients and mesh share the machine's cores"
    )
    return await conducted("exhaustion", wanted.expected_s + (REAL.expected_s if real else 0.0), course, said, common)


def simulated_shape() -> Shape:
    sizes = ["--kv-blocks", str(BLOCKS), "--max-model-len", str(WINDOW), "--max-num-seqs", str(SEQS)]
    flags = ["--engine", "simulated", "--step-ms", str(STEP_MS), "--token-us", "100", *sizes]
    return Shape(1, 1, flags, policy=FULL.policy, valkey=True)


def real_shape(model: str) -> Shape:
    engine = Engine(model, dtype="float32", max_num_seqs=SEQS, max_step_tokens=1024)
    small = json.dumps({"kv_cache_memory_bytes": POOL_BYTES})
    sizes = ["--engine-args", small, "--block-size", str(REAL_BLOCK), "--max-model-len", str(WINDOW)]
    return Shape(1, 1, [*engine.worker_flags(), *sizes], engine.environment(), REAL.policy, valkey=True)


def asked(wanted: Plan, seed: int) -> dict[Workload, tuple[Case, ...]]:
    """What is asked: the same for the same seed."""
    rng = random.Random(f"{seed}/exhaustion")
    found = {}
    for workload, tokens in ((Workload.REALTIME, REALTIME_TOKENS), (Workload.BATCH, BATCH_TOKENS)):
        count = wanted.different if workload is Workload.BATCH else max(4, wanted.different // 4)
        texts = prompts(f"{seed}/exhaustion/{workload.value}", count, words=wanted.words[workload])
        found[workload] = tuple(
            Case(text, Sampling(max_tokens=rng.randint(*tokens), temperature=0.0, ignore_eos=True), workload)
            for text in texts
        )
    return found


@dataclass(frozen=True, slots=True)
class Watched:
    """What the engine did meanwhile. `use` is of the KV cache, the mean and the most; `waits` are seconds to a first token."""

    failed: int
    """Allocations for running requests, for each of which somebody was preempted."""
    recomputed: int
    computed: int
    use: float
    most: float
    waits: dict[Workload, tuple[float, ...]] = field(hash=False)

    @property
    def share(self) -> float:
        """Of the tokens computed, those that had been computed before."""
        return self.recomputed / max(1, self.computed)


class Load:
    """Both workloads, without a pause, from callers of their own, checked against the `right` answers."""

    def __init__(self, s: Stand, cases: dict[Workload, tuple[Case, ...]], right: dict[Workload, list[Seen]]) -> None:
        self._s = s
        self._cases = cases
        self._right = right
        self._crowds: dict[Workload, Crowd] = {}

    @asynccontextmanager
    async def on(self, trial: Trial) -> AsyncIterator[None]:
        """Within the block; on leaving it, all streams have ended and are among the trial's."""
        gateways, going = self._s.mesh.gateways, True
        self._crowds = {w: Crowd(gateways, self._cases[w], self._right[w]) for w in Workload}
        asking = [asyncio.create_task(self._crowds[w].ask(CALLERS[w], lambda number: going)) for w in Workload]
        try:
            yield
            going = False
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                await cancel_and_wait(task)
            trial.outcomes += [o for crowd in self._crowds.values() for o in crowd.outcomes]

    async def watched(self, seconds: float) -> Watched:
        begun, uses = time.monotonic(), []
        before = await self._totals()
        while time.monotonic() - begun < seconds:
            await asyncio.sleep(POLL_S)
            nodes = (await self._s.admin.telemetry()).nodes
            uses += [nodes[w].gauges.get(measures.KV_USED, 0.0) for w in self._s.mesh.workers]
        after = await self._totals()
        failed, recomputed, computed = (b - a for a, b in zip(before, after, strict=True))
        waits = {w: tuple(t for at, t in crowd.waits if at >= begun) for w, crowd in self._crowds.items()}
        return Watched(failed, recomputed, computed, sum(uses) / max(1, len(uses)), max(uses, default=0.0), waits)

    async def preempted(self) -> int:
        """For want of memory, since the engine's start."""
        return (await self._totals())[0]

    async def _totals(self) -> tuple[int, int, int]:
        nodes = (await self._s.admin.telemetry()).nodes
        names = (measures.ALLOCATION_FAILURES, measures.RECOMPUTED_TOKENS, measures.COMPUTED_TOKENS)
        failed, recomputed, computed = (sum(nodes[w].totals.get(n, 0) for w in self._s.mesh.workers) for n in names)
        return failed, recomputed, computed


async def answers(s: Stand, cases: tuple[Case, ...]) -> list[Seen]:
    """Each asked once, with room for all that run. BenchError where one is not to be had."""
    bad = ""
    for _ in range(ASKED):
        # On a machine that real engines fill, a worker may seem dead for a moment.
        crowd = Crowd(s.mesh.gateways, cases)
        await crowd.ask(AT_EASE, len(cases).__gt__)
        wrong = [o for o in crowd.outcomes if o.lost or o.faults]
        if not wrong:
            return [crowd.seen[i] for i in range(len(cases))]
        bad = f"{wrong[0].lost or '; '.join(wrong[0].faults)} {wrong[0].message}"
    raise BenchError(f"a case failed undisturbed: {bad}")


async def drilled(s: Stand, wanted: Plan, seed: int, trials: list[Trial], show: Progress) -> None:
    step_s = wanted.expected_s / 5
    show.done(step_s)
    show.stage("streams undisturbed")
    cases = asked(wanted, seed)
    load = Load(s, cases, {w: await answers(s, cases[w]) for w in Workload})
    await s.surely("undisturbed streams have left the KV cache", lambda t: _all_empty(s, t))
    calm = await load.preempted() == 0
    show.done(step_s)
    show.stage("more than fits into the KV cache, with loops.memory=off")
    off = await _left_alone(s, load, wanted, trials, calm)
    show.done(step_s)
    show.stage("the same, and the loop is switched on")
    await _healed(s, load, wanted, trials, off)
    show.done(step_s)
    if wanted.kept_s:
        kept = Policy().memory.reserve_high_priority
        show.stage(f"the same, with the loop off and {kept:.0%} of the cache kept free, as by default")
        await s.mesh.steering.steer({"loops.memory": "off", "memory.reserve_high_priority": f"{kept:g}"})
        trial = Trial(wanted.named(KEPT), wanted.engine, None)
        trials.append(trial)
        await _watched(s, load, wanted, trial, wanted.kept_s)
    show.done(step_s)


async def _left_alone(s: Stand, load: Load, wanted: Plan, trials: list[Trial], calm: bool) -> Watched:
    trial = Trial(wanted.named(OFF), wanted.engine, None)
    trials.append(trial)
    found = await _watched(s, load, wanted, trial, wanted.watch_s)
    trial.more += [
        present(trial, "undisturbed_nobody_was_preempted", calm),
        present(trial, "requests_were_preempted", found.failed > 0),
    ]
    return found


async def _watched(s: Stand, load: Load, wanted: Plan, trial: Trial, seconds: float) -> Watched:
    begun = time.time()
    async with load.on(trial):
        await asyncio.sleep(wanted.settle_s)
        found = await load.watched(seconds)
    await _after(s, trial, found, begun)
    return found


async def _healed(s: Stand, load: Load, wanted: Plan, trials: list[Trial], off: Watched) -> None:
    trial = Trial(wanted.named(ON), wanted.engine, "memory", WITHIN_S)
    trials.append(trial)
    async with load.on(trial):
        await asyncio.sleep(wanted.settle_s)
        await s.mesh.steering.steer({"loops.memory": "on"})
        begun = time.time()
        if await s.detected(trial, "memory", f"{FIELD} at pool/default", begun, s.patience_s):
            ruled = time.time()
            await asyncio.sleep(wanted.settle_s)
            found = await load.watched(wanted.watch_s)
            if found.share <= BETTER * off.share:
                trial.healed_s = ruled - begun
        else:
            found = await load.watched(wanted.watch_s)
        held = [a for a in await s.admin.adjustments() if a.controller == "memory" and a.field == FIELD]
    trial.told = '"controller/memory"' in await s.why(FIELD)
    trial.figures["factor of the pool's pressure line"] = held[0].factor or 1.0 if held else 1.0
    await _after(s, trial, found, begun)


async def _after(s: Stand, trial: Trial, found: Watched, since: float) -> None:
    """What was seen, and what is to be so in any case."""
    realtime, batch = (found.waits[w] for w in (Workload.REALTIME, Workload.BATCH))
    trial.figures |= {
        "% of the KV cache in use, mean": 100.0 * found.use,
        "% of the KV cache in use, at most": 100.0 * found.most,
        "requests preempted for memory": found.failed,
        "tokens computed": found.computed,
        "% of them computed anew": 100.0 * found.share,
    }
    if realtime and batch:
        trial.figures["P95 ms to the first token, REALTIME"] = 1000.0 * quantile(sorted(realtime), 0.95)
        trial.figures["P50 ms to the first token, BATCH"] = 1000.0 * quantile(sorted(batch), 0.5)
    served = bool(realtime) and (not batch or quantile(sorted(realtime), 0.95) < quantile(sorted(batch), 0.5))
    back = await s.until(lambda t: _all_empty(s, t), s.patience_s)
    await s.settle(trial, since, moves_too=False)
    trial.more += [
        present(trial, "realtime_is_served_before_batch", served),
        present(trial, "all_blocks_are_given_back", bool(back)),
        present(trial, "nobody_was_restarted", not s.supervisor.ends),
    ]


def _all_empty(s: Stand, t: Telemetry) -> bool | None:
    nodes = [t.nodes[w] for w in s.mesh.workers]
    return True if all(n.running == n.waiting == 0 and n.gauges.get(measures.KV_USED) == 0.0 for n in nodes) else None
