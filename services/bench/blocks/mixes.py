"""Length mixes by which block sizes are weighed: seeded ones with the statistics of public traces, and those traces where they are here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.bench.mixed.traces import read_azure, read_mooncake, read_vidur
from trimtab.workload import CHAT, CODE, DOCUMENTS, SUMMARIES, Kind

DRAWN = 20_000


@dataclass(frozen=True, slots=True)
class Mix:
    """(prompt, output) in tokens of each request. `absent` says why there are none."""

    name: str
    says: str
    requests: tuple[tuple[int, int], ...] = ()
    absent: str = ""

    @property
    def lengths(self) -> list[int]:
        """Of the KV that each holds at its end: its last token was never put in."""
        return [prompt + output - 1 for prompt, output in self.requests]


PUBLISHED: tuple[tuple[str, str, Kind], ...] = (
    ("chat", "drawn with the statistics of Azure 2023, conversation", CHAT),
    ("code", "drawn with the statistics of Azure 2023, code", CODE),
    ("summaries", "drawn with the statistics of arXiv summarisation (Vidur)", SUMMARIES),
    ("documents", "drawn with the statistics of Mooncake FAST'25, conversation", DOCUMENTS),
)


def _azure(path: Path) -> list[tuple[int, int]]:
    return [(prompt, output) for _, prompt, output in read_azure(path)]


def _mooncake(path: Path) -> list[tuple[int, int]]:
    return [(prompt, output) for _, prompt, output in read_mooncake(path)]


TRACES: tuple[tuple[str, str, Callable[[Path], list[tuple[int, int]]]], ...] = (
    ("azure-conv", "azure-llm-2023/AzureLLMInferenceTrace_conv.csv", _azure),
    ("azure-code", "azure-llm-2023/AzureLLMInferenceTrace_code.csv", _azure),
    ("arxiv", "vidur-arxiv-summ/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", read_vidur),
    ("mooncake", "mooncake-fast25/conversation_trace.jsonl", _mooncake),
)


def drawn(seed: int) -> Iterator[Mix]:
    for name, says, kind in PUBLISHED:
        rng = random.Random(f"{seed}/{name}")
        yield Mix(name, says, tuple((kind.prompt.draw(rng), kind.output.draw(rng)) for _ in range(DRAWN)))


def traced(directory: Path) -> Iterator[Mix]:
    """Each public trace, or why it is not there."""
    for name, file, read in TRACES:
        try:
            rows = read(directory / file)
        except (OSError, ValueError, KeyError) as e:
            yield Mix(name, file, absent=f"{name} is left out: {type(e).__name__}, {file}")
            continue
        yield Mix(name, f"the trace itself, {len(rows):,} requests", tuple((max(1, p), max(1, o)) for p, o in rows))
