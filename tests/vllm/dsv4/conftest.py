"""A whole mesh on DeepSeek-V4's architecture, as processes: control plane, one worker with vLLM on the tiny model, a gateway.

`make test-v4` asks for these tests (TRIMTAB_V4=1); whoever runs all others does without: they take minutes, and fetch V4's tokenizer once.
"""

from __future__ import annotations

import os
import random
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ROOT, Mesh
from tests.vllm.dsv4 import tiny_model
from trimtab.client import Client
from trimtab.kit.process import free_port
from trimtab.messages import Accepted, Delta, Finish, Request, Sampling, Workload

MODEL = "tiny-v4"
WINDOW, STEP_TOKENS, MAX_SEQS = 131_072, 1024, 16
PLUGIN = Path(__file__).parent / "plugin"
WAIT_S = 600.0
FIGURES: list[str] = []
"""What tests measured and do not judge."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            if os.environ.get("TRIMTAB_V4") != "1":
                item.add_marker(pytest.mark.skip(reason="minutes long: `make test-v4` (TRIMTAB_V4=1) asks for it"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in FIGURES:
        terminalreporter.write_line(f"V4: {line}")


@dataclass
class V4Mesh(Mesh):
    """The worker starts as any other does; its environment alone brings the stand-ins in."""

    def command(self, name: str) -> list[str]:
        if name != "worker":
            return super().command(name)
        common = ["--mesh", "test", "--parent-pid", str(os.getpid()), "--listen", self.address("worker")]
        common += ["--metrics", self.address("worker-metrics"), "--control", self.address("control")]
        engine = ["--model", self.model, "--served-model-name", MODEL, "--max-num-seqs", str(MAX_SEQS)]
        engine += ["--max-step-tokens", str(STEP_TOKENS), "--max-model-len", str(WINDOW), "--kv-cache-gib", "1"]
        return ["-m", "services.worker", *common, *engine, "--chat-args", "enable_thinking=false"]

    def gauges(self) -> dict[str, float]:
        """The worker's metrics by name; of those with labels, one of them."""
        with urllib.request.urlopen(f"http://{self.address('worker-metrics')}/metrics", timeout=5) as answer:
            rows = [x.replace("{", " ").split() for x in answer.read().decode().splitlines() if x and x[0] != "#"]
        return {row[0]: float(row[-1]) for row in rows}


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V4Mesh]:
    model = tiny_model.make(tiny_model.default_directory())
    directory = tmp_path_factory.mktemp("v4-mesh")
    path = os.pathsep.join((str(ROOT), str(PLUGIN)))
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(directory / "state"), "PYTHONPATH": path, "TEST_REDIS": "memory://"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "v4_on_cpu"}
    m = V4Mesh(directory, str(model), env)
    for name in ("control", "control-metrics", "worker", "worker-metrics", "gateway", "http"):
        m.ports[name] = free_port()
    try:
        begun = time.monotonic()
        for name in ("control", "worker", "gateway"):
            m.start(name)
        m.wait_serving("control", 120)
        m.wait_serving("worker", 400)
        m.wait_serving("gateway", 120)
        FIGURES.append(f"the mesh served after {time.monotonic() - begun:.0f} s")
        yield m
    finally:
        m.stop()


@dataclass
class Answer:
    """One stream as its client saw it; times are seconds of the monotonic clock."""

    asked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    accepted: Accepted | None = None
    finish: Finish | None = None

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.asked

    @property
    def gap_s(self) -> float:
        """The longest between two tokens."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def ask(client: Client, prompt: Any, tokens: int, workload: Workload = Workload.REALTIME) -> Answer:
    """Greedy, to the end, of exactly so many tokens: nothing missing, nothing twice."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    seen = Answer(time.monotonic())
    async for event in client.generate(Request("", MODEL, prompt, sampling, workload), timeout_s=WAIT_S):
        match event:
            case Accepted():
                assert seen.accepted is None
                seen.accepted = event
            case Delta():
                assert event.first_index == len(seen.tokens), "an index is missing or doubled"
                seen.tokens += event.token_ids
                seen.times += [time.monotonic()] * len(event.token_ids)
                seen.text += event.text
            case Finish():
                seen.finish = event
            case _:
                pass
    assert len(seen.tokens) == tokens and seen.finish is not None and seen.accepted is not None
    assert seen.finish.usage.completion_tokens == tokens
    return seen


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """A prompt of so many token ids, the same for the same seed."""
    chance = random.Random(seed)
    return tuple(chance.randrange(100, 120_000) for _ in range(count))
