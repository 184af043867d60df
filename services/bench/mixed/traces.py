"""Public traces as mixes of 30 % realtime and 70 % batch, by count: who arrives when, with which lengths.

The files are never part of the project; each may be absent. Formats: Azure 2023 (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake
(timestamp in ms, input_length, output_length) and Vidur's arXiv summaries (num_prefill_tokens, num_decode_tokens, no times).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trimtab.messages import Workload

REALTIME_SHARE = 0.3
MOONCAKE_GRID_S = 3.0
"""Mooncake's times are multiples of this; requests are spread over it, or up to 28 would come in one instant that no user made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`at_s` from the beginning; lengths in tokens."""

    at_s: float
    workload: Workload
    prompt: int
    output: int
    number: int = 0
    """Its place in the mix."""


@dataclass(frozen=True, slots=True)
class Mix:
    """`files` are below the directory of traces; `read` makes so many entries of them."""

    name: str
    says: str
    files: tuple[str, ...]
    read: Callable[[Sequence[Path], int, random.Random], list[Entry]]

    def entries(self, directory: Path, count: int, seed: int) -> list[Entry]:
        """In the order of their arrival."""
        found = self.read([directory / name for name in self.files], count, random.Random(f"{seed}/{self.name}"))
        return [replace(e, number=i) for i, e in enumerate(sorted(found, key=lambda e: e.at_s))]


def read_azure(path: Path) -> list[tuple[float, int, int]]:
    """(seconds from the first, prompt, output) of each row; times with 7 digits, with or without an offset."""
    with path.open(newline="") as f:
        rows = [
            (datetime.fromisoformat(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r in csv.DictReader(f)
        ]
    return [((at - rows[0][0]).total_seconds(), prompt, output) for at, prompt, output in rows]


def read_mooncake(path: Path) -> list[tuple[float, int, int]]:
    with path.open() as f:
        rows = [json.loads(line) for line in f if line.strip()]
    return [(r["timestamp"] / 1000.0, r["input_length"], r["output_length"]) for r in rows]


def read_vidur(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) of each row."""
    with path.open(newline="") as f:
        return [(int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in csv.DictReader(f)]


def _chat_and_documents(paths: Sequence[Path], count: int, rng: random.Random) -> list[Entry]:
    """Chat at its own times; documents, which have none, at random over the same span."""
    chat_rows, documents = read_azure(paths[0]), read_vidur(paths[1])
    chat = [
        Entry(at, Workload.REALTIME, prompt, max(1, output))
        for at, prompt, output in chat_rows[: round(count * REALTIME_SHARE)]
    ]
    span_s = chat[-1].at_s
    batch = [
        Entry(rng.uniform(0.0, span_s), Workload.BATCH, prompt, max(1, output))
        for prompt, output in rng.sample(documents, min(len(documents), count - len(chat)))
    ]
    return [*chat, *batch]


def _long_conversations(paths: Sequence[Path], count: int, rng: random.Random) -> list[Entry]:
    """One trace; which of its requests are realtime is drawn."""
    rows = read_mooncake(paths[0])[:count]
    realtime = set(rng.sample(range(len(rows)), round(len(rows) * REALTIME_SHARE)))
    return [
        Entry(
            at + rng.uniform(0.0, MOONCAKE_GRID_S),
            Workload.REALTIME if i in realtime else Workload.BATCH,
            max(1, prompt),
            max(1, output),
        )
        for i, (at, prompt, output) in enumerate(rows)
    ]


MIXES = (
    Mix(
        "azure-arxiv",
        "realtime: Azure 2023 conversations at their times; batch: arXiv summaries (Vidur's lengths) at random times",
        (
            "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
            "vidur-arxiv-summ/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        ),
        _chat_and_documents,
    ),
    Mix(
        "mooncake",
        "Mooncake (FAST'25) conversations, prompts up to 126k tokens; 30 % drawn as realtime; times spread over their grid of 3 s",
        ("mooncake-fast25/conversation_trace.jsonl",),
        _long_conversations,
    ),
)
