"""A worker process: settings → engine → policy → gRPC → control link; SIGTERM drains. `python -m services.worker --help`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
import grpc
import structlog
import uvloop
from prometheus_client import CollectorRegistry

from services.control import PolicyKeeper
from services.worker.callers import Callers
from services.worker.commands import Commands, Reblocking
from services.worker.engines import Engine
from services.worker.gate import Gate
from services.worker.health import Health
from services.worker.measuring import Measuring
from services.worker.membership import Membership, node_of
from services.worker.metrics import Watched, WorkerMetrics
from services.worker.model import ModelError
from services.worker.promised import Promised
from services.worker.resident import Resident
from services.worker.server import InferenceServicer, register
from services.worker.serving import Serving
from services.worker.settings import EVERYWHERE, WorkerSettings, chat_arguments, engine_arguments
from services.worker.standing import Standing
from services.worker.steering import Steering
from services.worker.told import Told
from trimtab.blocks import When
from trimtab.errors import Draining, EngineDead, ReblockRefused
from trimtab.kit import config, notify, process, rpc, telemetry
from trimtab.kit.scrape import serve_metrics
from trimtab.kit.tasks import vital
from trimtab.kit.tls import check_own, tls_of, warn
from trimtab.messages import NodeState
from trimtab.policy import Policy

log = structlog.get_logger(__name__)

EXIT_USAGE = 2
EXIT_ENGINE_DEAD = 3
LAST_WORDS_S = 2.0
"""For what is sent elsewhere at a drain's deadline to be told so."""
PARTING_S = 1.0
"""For the control plane to be told that the drain was obeyed."""
ENDS_S = 8.0
"""What all of it takes after a drain's deadline at most; an engine that is stuck is killed then, and this process ends."""


def model_path(s: WorkerSettings) -> str:
    """What the engine loads: a directory, or a hub's name. Fetches a known model if need be."""
    from services.worker import model

    return str(model.resolve(s.model))


def build_engine(s: WorkerSettings) -> Engine:
    """The engine that the settings name; heavy imports happen only for the one that is wanted."""
    if s.engine == "simulated":
        from services.worker.engines.faults import simulated

        return simulated(
            s.node_id,
            model=s.served_model_name or "simulated",
            max_num_seqs=s.max_num_seqs,
            max_step_tokens=s.max_step_tokens,
            max_model_len=s.max_model_len or 131_072,
            step_ms=s.step_ms,
            token_us=s.token_us,
            kv_blocks=s.kv_blocks,
        )
    from services.worker import model
    from services.worker.engines.vllm import VllmEngine

    path = model_path(s)
    name = s.served_model_name or (model.SMOLLM2.name if s.model == "default" else s.model.rstrip("/").split("/")[-1])
    return VllmEngine(
        model_path=path,
        model=name,
        max_num_seqs=s.max_num_seqs,
        max_step_tokens=s.max_step_tokens,
        max_model_len=s.max_model_len,
        dtype=s.dtype,
        kv_cache_gib=s.kv_cache_gib,
        compiled=s.compiled,
        allow_untested=s.allow_untested_vllm,
        chat_args=chat_arguments(s.chat_args),
        block_size=s.block_size or None,
        arguments=engine_arguments(s),
    )


@dataclass
class Worker:
    """What one process is made of."""

    settings: WorkerSettings
    engine: Engine
    serving: Serving
    health: Health
    metrics: WorkerMetrics
    server: grpc.aio.Server
    membership: Membership
    steering: Steering
    resident: Resident
    stopping: asyncio.Event
    drain_s: float
    """The settings', or what an operator said when he had it drained."""
    drain_until: float = 0.0
    """When that is over, of the monotonic clock; 0 before anybody had it drained. Who says it again moves it."""

    restart: bool = False
    """It stops so that it is started anew."""

    def drain_by(self, deadline_s: float, restart: bool = False) -> bool:
        """Stop, with so much time for what runs. Who wants it gone wins over who wants it anew, whoever came first: then False."""
        if restart and self.stopping.is_set() and not self.restart:
            return False
        self.restart = restart
        self.drain_s = deadline_s
        self.drain_until = time.monotonic() + deadline_s
        self.stopping.set()
        return True

    def leave(self) -> None:
        """Stop for good, within the time that the settings give or a command gave."""
        self.restart = False
        self.stopping.set()

    def exit_code(self, failed: bool) -> int:
        """Of a restart that was commanded, whatever became of the engine on the way; of an engine that died, of a part that failed, or 0."""
        if self.restart:
            return process.EXIT_RESTART
        return EXIT_ENGINE_DEAD if self.engine.dead else int(failed)


def vllm_protos() -> bool:
    """Whether vLLM's own service can be answered: its protos come with the extra `vllm-door`."""
    return importlib.util.find_spec("smg_grpc_proto") is not None


def open_vllm_door(
    s: WorkerSettings,
    server: grpc.aio.Server,
    serving: Serving,
    engine: Engine,
    steering: Steering,
    health: Health,
    keeper: PolicyKeeper,
    callers: Callers,
) -> tuple[str, ...]:
    """Put vLLM's own service on the server, where it is wanted and can be; its name, or nothing."""
    if s.vllm_door == "off":
        return ()
    if not vllm_protos():
        log.info("no vllm door", because="smg-grpc-proto is not installed", next="install the extra vllm-door")
        return ()
    from services.worker.model_files import ModelFiles, read
    from services.worker.vllm_door import VllmDoor

    door = VllmDoor(
        serving,
        engine,
        steering,
        state=lambda: health.state,
        policy=lambda: keeper.resolved.policy,
        files=ModelFiles() if s.engine == "simulated" else read(model_path(s)),
        callers=callers,
    )
    name = door.register(server)
    health.also(name)
    return (name,)


def obedience(engine: Engine, gate: Gate) -> Callable[[Policy], Awaitable[int]]:
    """A policy in force: in the engine first, which may refuse it, then in the queue before it."""

    async def obey(policy: Policy) -> int:
        applied = await engine.apply(policy)
        gate.set_policy(policy)
        return applied.step_no

    return obey


def policy_of(keeper: PolicyKeeper) -> Policy:
    """What holds here now."""
    return keeper.resolved.policy


def around(engine: Engine) -> tuple[int, int]:
    """How many requests run in the engine now, and the longest prompt in prefill there."""
    return engine.load().running, int(engine.stats().get("longest_prefill", 0))


async def compose(s: WorkerSettings, told: Told | None = None, registry: CollectorRegistry | None = None) -> Worker:
    """Start everything but the serving; the port is taken first, so that a taken one is known before the engine's long start."""
    server = grpc.aio.server(options=rpc.WORKER_OPTIONS)
    port = rpc.bind(server, s.listen, tls_of(s, s.mesh))
    engine = build_engine(s)
    await engine.start()
    if s.block_size and s.engine == "simulated":
        # vLLM takes it as an argument.
        await engine.reblock(s.block_size, when=When.NOW)
    node = node_of(s, engine)
    gate = Gate(Policy())
    state = process.state_dir(s.mesh)
    keeper = PolicyKeeper(node, obedience(engine, gate), state / f"policy-{s.node_id}.json")
    await keeper.start()
    metrics = WorkerMetrics(engine.model, registry)
    steering = Steering(engine, gate)
    policy = functools.partial(policy_of, keeper)
    measuring = Measuring(policy, functools.partial(around, engine), time.monotonic())
    serving = Serving(s.node_id, engine, gate, keeper, metrics, measuring, steering)
    stopping = asyncio.Event()
    health = Health(engine, lambda: serving.draining, stopping.set)
    resident = Resident(os.getpid())
    standing = Standing(engine, gate, health, policy, resident, measuring.reuse)
    metrics.registry.register(Promised(policy, measuring.counters))
    metrics.watch(
        Watched(
            lambda: serving.load,
            lambda: engine.limits,
            lambda: engine.pulse().step_no,
            lambda: health.state is NodeState.SERVING,
            engine.stats,
            standing,
            measuring.gaps,
            time.monotonic,
        )
    )
    host = s.listen.rsplit(":", 1)[0]
    commands = Commands(steering)
    commands.reload = keeper.reload
    commands.told = told
    address = s.advertise or f"{host}:{port}"
    if s.control and address.rsplit(":", 1)[0] in EVERYWHERE:
        log.warning(
            "gateways on other machines are told an address that is none", address=address, next="set advertise"
        )
    membership = Membership(s, address, engine, keeper, serving, health, measuring, standing, commands)
    commands.reblocking = Reblocking(engine, lambda: policy().block_plan.max_recompute_tokens, membership.say_limits)
    callers = Callers(s.mesh, metrics.denied)
    servicer = InferenceServicer(
        serving,
        gate,
        lambda: engine.pulse().step_no,
        engine.limits.max_model_len,
        callers,
        hung=lambda: health.hung,
    )
    others = open_vllm_door(s, server, serving, engine, steering, health, keeper, callers)
    register(server, servicer, health.servicer, others)
    worker = Worker(s, engine, serving, health, metrics, server, membership, steering, resident, stopping, s.drain_s)
    commands.drain_by = worker.drain_by
    return worker


async def serve(s: WorkerSettings, told: Told | None = None) -> int:
    """Until SIGTERM, the engine's death, or the failure of a part that it can't live without; the exit code."""
    notifier, registry = notify.from_environment(), CollectorRegistry()
    try:
        # Taken before the engine's start too; what is measured comes to it after that.
        httpd = serve_metrics(s.metrics, registry)
    except OSError as e:
        raise rpc.PortTaken(rpc.cannot_listen(s.metrics, e)) from e
    try:
        w = await compose(s, told, registry)
    except BaseException:
        httpd.shutdown()
        raise
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, w.leave)
    await w.server.start()
    failed = False

    def fail() -> None:
        nonlocal failed
        failed = True
        w.stopping.set()

    background = [
        vital(w.health.run(), "health", fail),
        vital(w.membership.run(), "control link", fail),
        vital(w.resident.run(), "memory in use", fail),
        vital(notifier.pings(lambda: not w.health.hung), "watchdog", fail),
    ]
    if told is not None:
        told.served()
    log.info("worker ready", node=s.node_id, listen=s.listen, engine=w.engine.limits.engine, model=w.engine.model)
    notifier.ready(f"serves {w.engine.model} as {s.node_id}")
    await w.stopping.wait()
    notifier.stopping("engine died" if w.engine.dead else "draining")
    if w.engine.dead:
        death = w.engine.death()
        log.error("engine died", node=s.node_id, because=death.words, out_of_memory=death.out_of_memory)
        w.membership.say_engine_died(death)
        await asyncio.sleep(0.2)  # the event's way out; the process has nothing else to wait for
        call_off = process.end_within(ENDS_S, w.exit_code(failed))
    else:
        await drain(w)
        call_off = process.end_within(ENDS_S, w.exit_code(failed))
        await hand_over(w)
        await w.membership.said(PARTING_S)
    for task in background:
        await rpc.cancel_and_wait(task)
    await w.server.stop(0.5)
    code = w.exit_code(failed)
    await w.engine.stop()
    httpd.shutdown()
    call_off()
    log.info("worker stopped", node=s.node_id, exit_code=code)
    return code


async def drain(w: Worker) -> None:
    """No new work; what runs gets until the deadline to finish."""
    w.serving.draining = True
    w.drain_until = w.drain_until or time.monotonic() + w.drain_s
    w.membership.say_draining(w.drain_s)
    log.info("draining", unfinished=w.serving.unfinished, deadline_s=w.drain_s)
    while w.serving.unfinished and time.monotonic() < w.drain_until:
        await asyncio.sleep(0.05)


async def hand_over(w: Worker) -> None:
    """What still runs is sent elsewhere: its gateways go on with it at another worker."""
    deadline, moved = time.monotonic() + LAST_WORDS_S, 0
    while w.serving.unfinished and time.monotonic() < deadline:
        # Again and again: a prompt that was still being tokenised comes to the queue only now.
        moved += await w.steering.end_all(lambda: Draining("this worker shuts down"))
        await asyncio.sleep(0.02)
    if moved:
        log.warning("drain deadline", sent_elsewhere=moved)


def settings_of(config_file: str | None, flags: Mapping[str, Any], told: Mapping[str, str]) -> WorkerSettings:
    """ConfigError with every fault. `told` is laid over all else."""
    return config.load(WorkerSettings, "worker", flags=flags, file=config.find_file(config_file), told=told)


@click.command()
@click.option("--config", "config_file", default=None, metavar="FILE", help="settings file")
@click.option("--ignore-told", is_flag=True, help="start without the settings that the control plane told it")
@config.options(WorkerSettings)
def main(config_file: str | None, ignore_told: bool, **flags: Any) -> None:
    """One worker: an engine behind gRPC."""
    try:
        read = functools.partial(settings_of, config_file, flags)
        s = read({})
        # Of what can't be told; who ends here has not begun to try what was.
        tls = tls_of(s, s.mesh)
        check_own("worker", s.node_id, tls)
        told = Told(process.state_dir(s.mesh) / f"told-{s.node_id}.json", read)
        told.mind_signals()
        s = s if ignore_told else told.begin()
        if s.vllm_door == "on" and not vllm_protos():
            if "worker.vllm_door" not in told.in_force:
                told.spare()
            raise config.ConfigError(
                ["worker vllm_door is on, and smg-grpc-proto is missing: install the extra vllm-door"]
            )
    except config.ConfigError as e:
        click.echo("\n".join(e.faults), err=True)
        sys.exit(EXIT_USAGE)
    if s.parent_pid is not None:
        process.die_with_parent(s.parent_pid, signal.SIGTERM)
    telemetry.setup_logging(f"worker {s.node_id}", level=s.log_level)
    told.say()
    rpc.use_tls(tls)
    warn((s.listen,), tls, metrics=s.metrics)
    provider = telemetry.setup_tracing(f"worker-{s.node_id}", process.state_dir(s.mesh))
    try:
        code = uvloop.run(serve(s, told))
    except (rpc.PortTaken, config.ConfigError, EngineDead, ModelError, ReblockRefused) as e:
        if isinstance(e, rpc.PortTaken):
            told.spare()
        click.echo(f"worker {s.node_id}: {e}", err=True)
        code = EXIT_USAGE if isinstance(e, rpc.PortTaken | config.ConfigError) else EXIT_ENGINE_DEAD
    with contextlib.suppress(Exception):
        provider.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
