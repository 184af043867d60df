"""What nodes measure and report, by name. Few names, all known beforehand, so that nothing that a client sends makes a new one.

Sketches are of the time since the report before, in milliseconds or tokens; counters since the node's process began; gauges are now.
"""

from __future__ import annotations

from trimtab.blocks import LADDER
from trimtab.messages import Workload
from trimtab.scheduling import LengthClass

HOT, COLD = "hot", "cold"


def ttft(workload: Workload, path: str) -> str:
    """Time to first token; `path` is HOT or COLD."""
    return f"ttft.{workload.value}.{path}"


def ttft_by_length(length: LengthClass) -> str:
    return f"ttft.{length.value}"


def itl(workload: Workload) -> str:
    """Gaps between the tokens of one request."""
    return f"itl.{workload.value}"


def e2e(workload: Workload) -> str:
    """From arrival to the end, of requests that ended well."""
    return f"e2e.{workload.value}"


PROMPT = "prompt"
"""Tokens of the prompts that were accepted."""
TOTAL = "total"
"""Tokens of prompt and output of requests that ended well."""

SKETCHES: tuple[str, ...] = (
    *(ttft(w, path) for w in Workload for path in (HOT, COLD)),
    *(itl(w) for w in Workload),
    *(e2e(w) for w in Workload),
    *(ttft_by_length(c) for c in LengthClass),
    PROMPT,
    TOTAL,
)
"""All that a worker sends; a gateway sends those of TTFT and E2E as its clients see them."""

# Gauges of a worker. Those of a gateway are the four with a workload in their names.
REALTIME_RUNNING, BATCH_RUNNING = "realtime_running", "batch_running"
REALTIME_WAITING, BATCH_WAITING = "realtime_waiting", "batch_waiting"
"""In the worker's queue and in the engine's; at a gateway, in its line."""
COLD_WAITING = "cold_waiting"
"""BATCH requests with cold prompts among those that wait."""
KV_USED = "kv_used"
"""Of the KV blocks, the share that requests hold."""
STORED_TOKENS = "stored_tokens"
"""Whose KV is in those blocks."""
KV_BYTES_PER_TOKEN = "kv_bytes_per_token"
RSS_BYTES = "rss_bytes"
"""Of all the node's processes."""
BUSY = "busy"
"""Share of the time since the report before that the engine spent in steps."""
HUNG_S = "hung_s"
"""For how long it has been found hung; 0 while it moves."""
FRAGMENTATION = "fragmentation"
"""Of the slots in the blocks that requests hold, the share that holds no token; absent while no block is held."""
SESSION_TURNS = "session_turns"
"""Requests of a session, on average, of the sessions of the last ten minutes that had two or more; absent while there are none."""
DECODE_DEVIATION = "decode_deviation"
"""Of the time of decode steps, in shares of its mean; absent while too few were seen."""
PREFILL_TOKENS_PER_S = "prefill_tokens_per_s"
"""At which this engine computes prompts in steps as large as it makes them, by the time that its steps took; absent until that is known."""

PREFILL_MS_PER_1000_CONTEXT = "prefill_ms_per_1000_context"
"""That a prompt's token costs more for each 1,000 tokens before it, by the time that steps took; absent until a prompt showed some."""


def block_waste(block_size: int) -> str:
    """Of the slots in the blocks that requests here would hold with this size, the share that no token would be in."""
    return f"block_waste_{block_size}"


def prefix_kept(block_size: int) -> str:
    """Of the prompt tokens that the prefix cache has given, the share that it would have given with this size, at most.

    A hit ends at a whole block. Of larger sizes than the present one this is what would have been hit; of smaller ones a bound only, since
    nobody knows how much further a hit would have gone.
    """
    return f"prefix_kept_{block_size}"


BY_BLOCK_SIZE = frozenset(name(size) for name in (block_waste, prefix_kept) for size in LADDER)
"""Many, and only the newest of each says anything."""
GAUGES = (
    REALTIME_RUNNING, BATCH_RUNNING, REALTIME_WAITING, BATCH_WAITING, COLD_WAITING, KV_USED, STORED_TOKENS, KV_BYTES_PER_TOKEN,
    RSS_BYTES, BUSY, HUNG_S,
)  # fmt: skip
AT_TIMES = (
    FRAGMENTATION,
    SESSION_TURNS,
    DECODE_DEVIATION,
    PREFILL_TOKENS_PER_S,
    PREFILL_MS_PER_1000_CONTEXT,
    *sorted(BY_BLOCK_SIZE),
)
"""Gauges that a worker has only while there is something to measure."""

# Counters of every node.
REQUESTS, ERRORS, OUTPUT_TOKENS = "requests", "errors", "output_tokens"
"""ERRORS are engine faults."""

# Counters of a worker.
PROMPT_TOKENS = "prompt_tokens"
"""Of requests that ended."""
CACHED_TOKENS = "cached_tokens"
"""Of them, those whose KV was there already."""
COMPUTED_TOKENS, RECOMPUTED_TOKENS, ABORTED_TOKENS = (
    "scheduler_computed_tokens",
    "scheduler_recomputed_tokens",
    "scheduler_aborted_tokens",
)
PREEMPTIONS, ALLOCATION_FAILURES = "scheduler_preemptions", "scheduler_memory_preemptions"
"""A failed allocation is one for a request that runs: somebody has to go for it."""
REALTIME_WAITS, REALTIME_WAIT_MS = "scheduler_realtime_waits", "scheduler_realtime_wait_ms"
BATCH_WAITS, BATCH_WAIT_MS = "scheduler_batch_waits", "scheduler_batch_wait_ms"
"""Requests that were first scheduled, and how long they had waited in all."""
OUT_OF_MEMORY = "out_of_memory"
"""Requests that an engine ended for want of memory."""


def requests_of(workload: Workload) -> str:
    """That ended, however."""
    return f"{workload.value}_requests"


def over(workload: Workload) -> str:
    """That missed an objective."""
    return f"{workload.value}_over"


def requests_of_length(length: LengthClass) -> str:
    return f"{length.value}_requests"


OWN_COUNTERS: tuple[str, ...] = (
    REQUESTS,
    ERRORS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    OUT_OF_MEMORY,
    *(requests_of(w) for w in Workload),
    *(over(w) for w in Workload),
    *(requests_of_length(c) for c in LengthClass),
)
"""Those of a worker's front process; beside them are the scheduler's (`scheduling.STATS`), each with `scheduler_` before its name."""
