"""What is asked: prompts of differing lengths, both workloads, some with stop strings; all with one right answer. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.bench.arms import MODEL
from services.bench.load import prompts
from trimtab.messages import Request, Sampling, Workload

WORDS = ((4, 12), (16, 40), (60, 120))
"""Of short, middling and long prompts: the fewest and the most."""
TOKENS = (40, 120)
STOPS = ("ship —", "舵 🚢", "rudder, and", ".\n", " and the")
"""The first three are of what simulated engines say, the others of what small models like to say."""
WITH_STOP = 0.2
BATCH = 0.4


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to ask; asked again, it has the same answer."""

    prompt: str
    sampling: Sampling
    workload: Workload

    def request(self) -> Request:
        return Request("", MODEL, self.prompt, self.sampling, self.workload)


def cases(seed: int, count: int) -> tuple[Case, ...]:
    """So many different ones; the same seed gives the same."""
    rng = random.Random(f"{seed}/cases")
    kinds = [prompts(f"{seed}/{number}", count, words=words) for number, words in enumerate(WORDS)]
    return tuple(_case(rng, rng.choice(texts)) for texts in zip(*kinds, strict=True))


def _case(rng: random.Random, prompt: str) -> Case:
    stop: Sequence[str] = rng.sample(STOPS, 2) if rng.random() < WITH_STOP else ()
    sampling = Sampling(max_tokens=rng.randint(*TOKENS), temperature=0.0, ignore_eos=True, stop=tuple(stop))
    return Case(prompt, sampling, Workload.BATCH if rng.random() < BATCH else Workload.REALTIME)
