"""Engines behind one small interface: `vllm` is the product, `simulated` is for scale and for tests of everything around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.engines.death import Death
from trimtab.blocks import Reblock, When
from trimtab.messages import ChatMessage, Load, Sampling, TokenLogprobs, Workload
from trimtab.policy import Policy
from trimtab.progress import Pulse
from trimtab.snapshot import Limits


@dataclass(frozen=True, slots=True)
class Job:
    """A request as an engine takes it: token ids in, at most `max_tokens` out. `sampling.stop` is matched by the worker, not here.

    The last `delivered` of `token_ids` are output that another worker has already delivered; the rest is the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    workload: Workload
    delivered: int = 0
    arrival_ms: float = 0.0
    """When the worker got it, on this host's monotonic clock; what its place in every queue counts from."""
    tenant: str = ""
    delta: int = 0
    """Levels by which an operator moved it."""
    isolated: bool = False
    """An operator keeps it apart."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """Moments of one request, in seconds of time.monotonic() on this host; 0.0 where not reached."""

    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one job. `finish` is None, "stop" (end of sequence or stop token; its token is the last of `token_ids`) or "length"."""

    token_ids: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    stamps: Stamps = Stamps()
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """A policy's acknowledgement: the engine step before which it took effect."""

    step_no: int


class ChatRefused(Exception):
    """The model's chat template does not take these messages, such as roles out of order; the message is the template's own."""


class TextStream(Protocol):
    """Turns output tokens to text as they come; whole characters only."""

    def step(self, token_id: int) -> str: ...


class Tokenizer(Protocol):
    """The model's text ⇄ tokens. Calls may take milliseconds for long prompts; run them off the event loop then."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> tuple[int, ...]: ...
    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def text_stream(self, prompt: tuple[int, ...], *, skip_special: bool) -> TextStream: ...


class Engine(Protocol):
    """One engine. `generate` may be closed at any moment, which frees the request within one engine step."""

    @property
    def model(self) -> str: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def kv_bytes_per_token(self) -> float:
        """Memory that the KV of one token takes, of all layers together; 0.0 where that can't be told."""

    @property
    def own_blocks(self) -> int:
        """KV blocks that are neither free nor any request's: the engine keeps them for itself."""

    @property
    def even_blocks(self) -> bool:
        """Whether each KV block holds as many tokens as any other, so that blocks in use tell of slots in use."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output by themselves."""

    async def start(self) -> None:
        """Ready to serve on return; raises EngineDead when it can't."""

    def check(self, job: Job) -> None:
        """InvalidRequest when this engine can't take the job; called before it is queued."""

    def generate(self, job: Job) -> AsyncGenerator[Output, None]:
        """Tokens as they come. Raises EngineDead when the engine is gone."""

    async def apply(self, policy: Policy) -> Applied:
        """Take effect at the next step boundary, then return. PolicyRefused changes nothing."""

    async def steer(
        self, request_ids: Sequence[str], *, delta: int | None = None, isolated: bool | None = None
    ) -> None:
        """Change requests that the engine has, from its next step on; unknown ids are passed over."""

    async def reblock(
        self,
        block_size: int,
        *,
        when: When = When.IDLE,
        max_recompute_tokens: int = 2000,
        carry: bool = True,
        dry_run: bool = False,
    ) -> Reblock:
        """Change the KV block size between two steps; streams go on, and `limits` is another from then on.

        ReblockRefused leaves the engine as it was. `max_recompute_tokens` bounds When.IDLE alone. `carry`: KV is moved into the new blocks
        where the engine knows how; else it is computed anew.
        """

    async def ping(self) -> None:
        """Returns once the engine has answered, between two steps; never when it is stuck."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that the engine has: their `generate` raises EngineFault."""

    def load(self) -> Load:
        """Now, from the engine's own counters; cheap enough for every step."""

    def stats(self) -> dict[str, float]:
        """The scheduler's own, by the names of `scheduling.STATS`; what an engine can't say is absent."""

    def owes(self) -> int:
        """Requests whose end the engine has not told yet, whoever reads what it has told."""

    def pulse(self) -> Pulse:
        """The newest step's announcement; never waits for the engine."""

    @property
    def dead(self) -> bool:
        """True once the engine is gone for good."""

    def death(self) -> Death:
        """Why it is gone, as far as anybody knows; asked once it is dead."""

    async def stop(self) -> None:
        """End the engine and every process of it."""
