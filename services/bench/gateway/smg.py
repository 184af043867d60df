"""SMG before the same worker, where it is installed: `--smg PATH` names its command, of an environment of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import aiohttp

from services.bench.gateway.arms import MODEL, PROMPT
from services.bench.processes import BenchError, Processes
from trimtab.kit.cli import ExitCode
from trimtab.kit.process import free_port

START_S = 90.0


def check(path: Path) -> None:
    """BenchError where there is nothing to run."""
    if not os.access(path, os.X_OK):
        raise BenchError(
            f"--smg: there is no command {path} (uv venv DIR; uv pip install -p DIR smg; DIR/bin/smg)", ExitCode.USAGE
        )


def byte_tokenizer() -> dict[str, Any]:
    """As a Hugging Face tokenizer.json: one token a byte, its id the byte, and 256 the end; the simulated engine's own."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    alphabet = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": "<|end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {alphabet[b]: b for b in range(256)},
            "merges": [],
        },
    }


def byte_tokenizer_in(directory: Path) -> Path:
    """The simulated engine's tokenizer, as files."""
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return tokenizer


async def start(
    processes: Processes, session: aiohttp.ClientSession, path: Path, worker: str, *, tokenizer: Path
) -> str:
    """Its HTTP address, once it answers a request. BenchError says what it said last."""
    port, metrics = free_port(), free_port()
    # It has no option that ends it with its parent; our tether gives it one.
    tether = ["-m", "trimtab_cli.tether", str(os.getpid()), "--", str(path), "launch"]
    what = ["--worker-urls", f"grpc://{worker}", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    more = ["--prometheus-port", str(metrics), "--disable-tokenizer-autoload", "--worker-startup-check-interval", "1"]
    child = await processes.start("smg", [*tether, *what, *more])
    address = f"127.0.0.1:{port}"

    async def answers() -> bool:
        """Given the tokenizer, it answers. It has none by itself: the worker has no files, and its name is no hub's."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        try:
            async with session.post(f"http://{address}/v1/completions", json=body) as answer:
                if answer.status == 200:
                    return True
            given = {"name": MODEL, "source": str(tokenizer)}
            async with session.post(f"http://{address}/v1/tokenizers", json=given):
                return False
        except (aiohttp.ClientError, TimeoutError):
            return False

    await child.ready(answers, START_S)
    return address
