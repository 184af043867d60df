"""vLLM as an engine: AsyncLLM embedded, our scheduler inside, token ids out.

Policy goes in by an acknowledged utility call that runs between two steps; load and pulse come from the board, without a message.
vLLM's own detokeniser and stop strings are off: the worker does both (`text.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.worker.engines import Applied, Job, Output, Stamps, reblocks
from services.worker.engines import board as boards
from services.worker.engines.cores import threads, usable
from services.worker.engines.death import Death, death_of
from services.worker.engines.tokenizers import HfTokenizer
from services.worker.engines.vllm_arguments import OURS, Arguments
from services.worker.engines.vllm_limits import limits_of
from services.worker.engines.vllm_plugin import BOARD_KEY, OWNER_ENV
from services.worker.engines.vllm_sampling import Samplings
from trimtab.blocks import Reblock, When
from trimtab.errors import EngineDead, EngineFault, InvalidRequest, ReblockRefused, Violation
from trimtab.messages import Load, Sampling, Structure, StructureKind, TokenLogprobs, TopLogprob, Workload
from trimtab.policy import Policy, flatten
from trimtab.progress import Pulse
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits

TESTED_VERSIONS = ("0.32.",)
"""vLLM minors that our scheduler was tested with; it touches internals, so another one needs the tests first."""


OUR_PLUGIN = "trimtab"
"""As pyproject.toml names it to vLLM."""
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
OWN_BLOCKS = 1
"""vLLM's block pool keeps one, which stands for no block."""
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Whole GiB of a CPU's KV cache."""
STOP_S = 2.0
"""What vLLM's processes get to end by themselves. They hold nothing worth saving, and its own patience adds up to 8 s of waiting."""


def environment(kv_cache_gib: int) -> dict[str, str]:
    """What vLLM must find in the environment before it is imported; a variable that is already set wins, save our own.

    Of vLLM's plug-ins ours is loaded, and those that VLLM_PLUGINS names already.
    """
    wanted = {
        KV_SPACE: str(kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's own ten minutes end the start of a model of hundreds of GB; systemd's unit and the chart wait as long as this.
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    }
    found = {k: os.environ.get(k, v) for k, v in wanted.items()}
    found[KV_SPACE] = wanted[KV_SPACE]
    others = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name not in ("", OUR_PLUGIN)]
    found["VLLM_PLUGINS"] = ",".join([*others, OUR_PLUGIN])
    found[OWNER_ENV] = str(os.getpid())
    return found


def executor(alone: bool = True) -> str | None:
    """Where the model runs: on a CPU in the engine's own process if it is `alone` there, elsewhere where vLLM puts it (None).

    vLLM gives a CPU's model a process of its own, and the two wait for each other by spinning, on the core that it leaves to everything
    else (docs/decisions/0009). Who binds threads by vLLM's own variable keeps its way.
    """
    return None if not alone or _has_gpu() or "VLLM_CPU_OMP_THREADS_BIND" in os.environ else IN_PROCESS


class VllmEngine:
    def __init__(
        self,
        *,
        model_path: str,
        model: str,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int | None,
        dtype: str,
        kv_cache_gib: int,
        compiled: bool = False,
        allow_untested: bool = False,
        chat_args: Mapping[str, Any] | None = None,
        block_size: int | None = None,
        arguments: Arguments | None = None,
    ) -> None:
        self.model = model
        self.limits = Limits()
        self.eos_token_ids: frozenset[int] = frozenset()
        self._path = model_path
        self._args = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_step_tokens,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "block_size": block_size,
        }
        self._arguments = arguments or Arguments()
        self._kv_cache_gib = kv_cache_gib
        self._compiled = compiled
        self._chat_args = dict(chat_args or {})
        self._allow_untested = allow_untested
        self._board_path = boards.create()
        self._board = boards.Board(self._board_path)
        self._llm: Any = None
        self._processes: list[Any] = []
        """The engine's, kept here because vLLM forgets them as it notices that one is gone."""
        self.kv_bytes_per_token = 0.0
        self.own_blocks = OWN_BLOCKS
        self.even_blocks = True
        self._samplings: Samplings
        self._change: asyncio.Task[Reblock] | None = None
        self._torn = ""
        """Why the engine computes nothing any more, though its process is there until its next step; while it is idle there is none."""
        self.tokenizer: HfTokenizer

    async def start(self) -> None:
        os.environ.update(environment(self._kv_cache_gib))
        if self._arguments.sizes_cache:
            # vLLM would heed the variable instead, and say nothing of it.
            del os.environ[KV_SPACE]
        where = executor(self._arguments.alone)
        if where == IN_PROCESS:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads(usable())))
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from services.worker.engines.vllm_stats import Quiet

        if not vllm.__version__.startswith(TESTED_VERSIONS) and not self._allow_untested:
            raise EngineDead(
                f"vLLM {vllm.__version__} is untested with this build (tested: {', '.join(TESTED_VERSIONS)}*); "
                "install a tested one, or start with --allow-untested-vllm after running tests/vllm"
            )
        if self._compiled and not (_has_gpu() or _has_compiler()):
            raise EngineDead(
                "compiling the model for a CPU needs a C++ compiler; install g++, or start without --compiled"
            )
        self._arguments.check(AsyncEngineArgs.__dataclass_fields__)
        args = AsyncEngineArgs(**self.engine_args(where))
        # A custom logger switches on the per-request time stamps that timings and traces are made of.
        try:
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[Quiet])
        except (RuntimeError, ValueError, OSError, MemoryError) as e:
            raise EngineDead(f"vLLM could not start with model {self._path}: {e}") from e
        self._processes = list(self._llm.engine_core.resources.engine_manager.processes)
        facts = await self._llm.engine_core.call_utility_async("trimtab_facts")
        self.kv_bytes_per_token = facts["kv_bytes_per_token"]
        self.even_blocks = facts["even_blocks"]
        config = self._llm.model_config
        self.limits = limits_of(facts, config.max_model_len, f"vllm {vllm.__version__}")
        # The model's own sampling defaults (generation_config.json), as vLLM's servers use them.
        defaults = {k: v for k, v in config.get_diff_sampling_param().items() if k != "max_tokens"}
        self._samplings = Samplings(self._llm.input_processor, defaults)
        ends = config.try_get_generation_config().get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_token_ids = frozenset(int(x) for x in (*ends, self._llm.renderer.get_eos_token_id()) if x is not None)
        self.tokenizer = HfTokenizer(self._llm.renderer.tokenizer, config.get_vocab_size(), self._chat_args)
        await self._warm_up()

    def engine_args(self, where: str | None) -> dict[str, Any]:
        """What vLLM is started with, by its own names; `where` the model runs."""
        gpu = _has_gpu()
        fixed = {"model": self._path, "additional_config": {BOARD_KEY: str(self._board_path)}, **OURS}
        by_us = {"enforce_eager": not (self._compiled or gpu), "distributed_executor_backend": where}
        return by_us | self._arguments.named(gpu=gpu) | {k: v for k, v in self._args.items() if v is not None} | fixed

    async def _warm_up(self) -> None:
        """Have vLLM compile now what it compiles at first use: log probabilities, for one and for several, and the first grammar.

        In the midst of serving that is a step of many seconds, which looks like a hung engine to everybody else.
        """

        async def one(name: str, sampling: Sampling) -> None:
            async for _ in self.generate(Job(f"warm-up/{name}", (1, 2, 3), 2, sampling, Workload.REALTIME)):
                pass

        # Without a compiler there is nothing to compile ahead, and a failure in vLLM's worker would end the engine.
        if _has_gpu() or _has_compiler():
            logprobs = Sampling(temperature=0.0, ignore_eos=True, logprobs=1)
            await one("alone", logprobs)
            await asyncio.gather(one("first", logprobs), one("second", logprobs))
        # Not every tokenizer can do grammars; a request that needs one is told so when it comes.
        with contextlib.suppress(InvalidRequest):
            await one("grammar", Sampling(temperature=0.0, structure=Structure(StructureKind.REGEX, "[a-z]{1,2}")))

    def check(self, job: Job) -> None:
        self._samplings.check(job)

    async def generate(self, job: Job) -> AsyncGenerator[Output, None]:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = self._samplings.params(job)
        stream = self._llm.generate(tokens_input(list(job.token_ids)), params, job.request_id)
        try:
            async for out in stream:
                yield self._output(out, job.sampling.logprobs or 0)
        except EngineDeadError as e:
            raise EngineDead("the engine process is gone") from e
        except (VLLMValidationError, ValueError) as e:
            raise InvalidRequest(str(e), violations=(Violation("sampling", str(e)),)) from e
        except EngineGenerateError as e:
            cause = e.__cause__
            if isinstance(cause, VLLMValidationError | ValueError):
                raise InvalidRequest(str(cause), violations=(Violation("sampling", str(cause)),)) from e
            raise
        finally:
            await stream.aclose()

    def _output(self, out: Any, logprobs_wanted: int) -> Output:
        completion = out.outputs[0]
        m = out.metrics
        stamps = Stamps(m.scheduled_ts, m.first_token_ts, m.last_token_ts, m.num_preemptions) if m else Stamps()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if completion.logprobs:
            logprobs = tuple(
                self._logprobs(token, row, logprobs_wanted)
                for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        if completion.finish_reason not in (None, "stop", "length"):
            raise EngineFault(f"the engine ended the request by itself: {completion.finish_reason}")
        return Output(
            tuple(completion.token_ids), completion.finish_reason, logprobs, stamps, out.num_cached_tokens or 0
        )

    def _logprobs(self, token: int, row: Any, wanted: int) -> TokenLogprobs:
        ranked = sorted(row.items(), key=lambda item: item[1].rank if item[1].rank is not None else 1 << 30)
        # vLLM adds the sampled token to the row where it is not among the best.
        top = tuple(TopLogprob(t, x.logprob, self.tokenizer.token_bytes(t)) for t, x in ranked[:wanted])
        return TokenLogprobs(row[token].logprob, self.tokenizer.token_bytes(token), top)

    async def apply(self, policy: Policy) -> Applied:
        Rules.of(policy, self.limits)  # refused here, with the field's name, rather than over there
        try:
            answer = await self._llm.engine_core.call_utility_async("trimtab_apply", flatten(policy))
        except Exception as e:
            if self._llm.errored:
                raise EngineDead("the engine process is gone") from e
            raise
        return Applied(int(answer["step_no"]))

    async def steer(
        self, request_ids: Sequence[str], *, delta: int | None = None, isolated: bool | None = None
    ) -> None:
        changes = {k: v for k, v in (("delta", delta), ("isolated", isolated)) if v is not None}
        if request_ids:
            await self._llm.engine_core.call_utility_async(
                "trimtab_steer", {"request_ids": list(request_ids), **changes}
            )

    async def reblock(
        self,
        block_size: int,
        *,
        when: When = When.IDLE,
        max_recompute_tokens: int = 2000,
        carry: bool = True,
        dry_run: bool = False,
    ) -> Reblock:
        asked = reblocks.asked(
            self.limits.block_sizes, block_size, when, max_recompute_tokens, carry=carry, dry_run=dry_run
        )
        if self._change is not None and not self._change.done():
            raise ReblockRefused("another change is under way", cause="BUSY", accepted=self.limits.block_sizes)
        # Seen through to its end, though nobody may wait for it any more: `limits` are what the engine has.
        self._change = asyncio.create_task(self._reblock(asked), name="reblock")
        return await asyncio.shield(self._change)

    async def _reblock(self, asked: dict[str, Any]) -> Reblock:
        try:
            said = await self._llm.engine_core.call_utility_async("trimtab_reblock", asked)
        except Exception as e:
            if self._llm.errored:
                raise EngineDead("the engine process is gone") from e
            raise
        self._torn = self._torn or said.get("dead", "")
        done = reblocks.answered(said)
        if not done.dry_run:
            self.limits = replace(self.limits, block_size=done.after.block_size, total_blocks=done.after.total_blocks)
        return done

    async def ping(self) -> None:
        await self._llm.engine_core.call_utility_async("trimtab_steer", {"request_ids": []})

    async def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            await self._llm.abort(list(request_ids))

    def load(self) -> Load:
        row = self._board.read()
        return Load(row.running, row.waiting, row.queued_prefill_tokens, row.free_blocks, row.total_blocks)

    def owes(self) -> int:
        return int(self._llm.get_num_unfinished_requests())

    def stats(self) -> dict[str, float]:
        return self._board.read_stats() | {"hook_us": self._board.read().hook_us}

    def row(self) -> boards.Row:
        """The whole board, for metrics and tests."""
        return self._board.read()

    def pulse(self) -> Pulse:
        row = self._board.read()
        return Pulse(row.step_no, row.begun, row.predicted_ms, bool(row.ended))

    @property
    def dead(self) -> bool:
        return bool(self._torn) or (self._llm is not None and bool(self._llm.errored))

    def death(self) -> Death:
        # Asked before `stop`, which ends processes itself.
        killed = any(p.exitcode == -signal.SIGKILL for p in self._processes)
        return death_of(self._board.read_words() or self._torn, killed=killed)

    async def stop(self) -> None:
        if self._llm is not None:
            # It joins processes; the loop must go on serving health meanwhile.
            await asyncio.to_thread(self._llm.shutdown, STOP_S)
        self._board.close()
        self._board_path.unlink(missing_ok=True)


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
