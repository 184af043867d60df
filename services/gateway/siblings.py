"""What the processes of one gateway tell each other: their metrics, each over a socket in a directory of theirs.

A scraper reaches one of them, whichever the kernel chose, and gets the samples of all, each with the label `process`. A socket that
answers says besides that its process serves: that is what the one that started them waits for, and watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

LABEL = "process"
ANSWER_S = 1.0
"""What a sibling gets for its samples; a scraper waits for 10 s at most, and is given those of the others."""
MAX_PATH_BYTES = 107
"""Of a Unix socket (unix(7))."""


def socket_of(directory: Path, number: int) -> Path:
    return directory / f"{number}.sock"


async def ask(socket: Path, path: str, within_s: float = ANSWER_S) -> bytes | None:
    """What this process says there; None where it says nothing."""
    connector = aiohttp.UnixConnector(str(socket))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(within_s)) as session,
            session.get(f"http://sibling{path}") as answer,
        ):
            return await answer.read() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


class Siblings:
    """Belongs to one event loop; answers others from `start` to `stop`. `text` gives this process's own samples."""

    def __init__(self, directory: Path, me: int, of: int, text: Callable[[], bytes]) -> None:
        self._directory = directory
        self._me = me
        self._of = of
        self._text = text
        self._runner: web.ServerRunner | None = None

    async def start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        # Somebody may have cleared away what was old; of one that was killed a socket may be left.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = socket_of(self._directory, self._me)
        mine.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(mine)).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def text(self) -> bytes:
        """The samples of all that answer, in the Prometheus text format."""
        others = [n for n in range(1, self._of + 1) if n != self._me]
        said = await asyncio.gather(*(ask(socket_of(self._directory, n), "/metrics") for n in others))
        texts = {n: text.decode() for n, text in zip(others, said, strict=True) if text is not None}
        texts[self._me] = self._text().decode()
        return merged(dict(sorted(texts.items())))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/metrics":
                return web.Response(body=self._text(), content_type="text/plain", charset="utf-8")
            case "/alive":
                return web.Response()
            case _:
                return web.Response(status=404)


def merged(texts: Mapping[int, str]) -> bytes:
    """Several processes' samples as one text: each metric once, each sample with its process. Lines are labelled as they are: to parse them
    would take a process that serves a tenth of a second.
    """
    found: dict[str, tuple[list[str], list[str]]] = {}
    for process, text in texts.items():
        head: list[str] = []
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                head, samples = found.setdefault(line.split(" ", 3)[2], ([line], []))
            elif line.startswith("# TYPE "):
                head[1:] = [line]
            elif line:
                samples.append(_labelled(line, process))
    up = ["# HELP trimtab_gateway_processes_up Processes of this gateway that answered",
          "# TYPE trimtab_gateway_processes_up gauge", f"trimtab_gateway_processes_up {len(texts)}"]  # fmt: skip
    lines = [line for head, samples in found.values() for line in (*head, *samples)]
    return ("\n".join([*lines, *up]) + "\n").encode()


def _labelled(sample: str, process: int) -> str:
    end = min(i for i in (sample.find("{"), sample.find(" ")) if i >= 0)
    name, rest = sample[:end], sample[end:]
    if rest.startswith("{"):
        return f'{name}{{{LABEL}="{process}",{rest[1:]}'
    return f'{name}{{{LABEL}="{process}"}}{rest}'
