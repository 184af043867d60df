"""Batches as files, and the verb that runs them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from services.cli_batch import batch


def a_line(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A completion; `prompt` and the like go into its body."""
    body = {"model": "m", "prompt": f"Say {custom_id}", "max_tokens": 8} | changes
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def a_chat(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"Say {custom_id}"}]} | changes
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def written(path: Path, lines: Sequence[Any]) -> Path:
    """Each as JSON, but for what is text already."""
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    """Every line of it, whole."""
    raw = path.read_bytes()
    assert raw.endswith(b"\n") or not raw
    return [json.loads(line) for line in raw.splitlines()]


def ids(path: Path) -> list[str]:
    return sorted(str(a["custom_id"]) for a in answers(path))


def said(result: Result) -> Any:
    """The JSON on stdout, among what a gateway in this process logs there."""
    return json.JSONDecoder().raw_decode(result.stdout[result.stdout.index("{\n") :])[0]


def command(source: Path | str, out: Path, address: str, *flags: str) -> list[str]:
    return ["run", str(source), str(out), "--gateway", address, *flags]


async def run(source: Path | str, out: Path, address: str, *flags: str, stdin: bytes | None = None) -> Result:
    """The verb in a thread of its own, since it brings its own event loop."""
    args = command(source, out, address, *flags)
    return await asyncio.to_thread(CliRunner().invoke, batch, args, input=stdin)


async def start(source: Path, out: Path, address: str, *flags: str) -> asyncio.subprocess.Process:
    """The verb as a process, to be killed."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trimtab_cli", "batch", *command(source, out, address, *flags),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
