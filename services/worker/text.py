"""From output tokens to text, and to the end of it: incremental detokenising and stop strings.

The worker does this itself, so that a stream can move to another worker: primed with the prompt only, fed silently with what was already
delivered, it goes on at the next byte (DESIGN §3). Invariants: only whole characters leave; the deltas joined are the whole text; text
that might be the beginning of a stop string is held back until it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.engines import TextStream


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push gave: `text` to send, `kept` of the pushed tokens that belong to the output, and the stop string that ended it."""

    text: str
    kept: int
    stop: str | None = None


class TextAssembler:
    """One stream's text. `min_tokens` output tokens must exist before a stop string can end it."""

    def __init__(
        self,
        stream: TextStream,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._longest = max((len(s) for s in stop), default=0)
        self._tokens = 0

    def push(self, token_ids: tuple[int, ...], *, silent_last: bool = False) -> Piece:
        """Take new tokens. `silent_last`: the last one is a stop token and gives no text."""
        if not self._stop:
            self._tokens += len(token_ids)
            visible = token_ids[:-1] if silent_last else token_ids
            return Piece("".join(map(self._stream.step, visible)), len(token_ids))
        out = ""
        for i, token in enumerate(token_ids):
            self._tokens += 1
            if silent_last and i == len(token_ids) - 1:
                break
            new = self._stream.step(token)
            before = len(self._held)
            self._held += new
            if new and self._tokens > self._min_tokens:
                hit = self._find(before)
                if hit is not None:
                    start, stop = hit
                    end = start + len(stop) if self._include_stop else start
                    out += self._held[:end]
                    self._held = ""
                    return Piece(out, i + 1, stop)
            keep = self._hold_back()
            out += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        return Piece(out, len(token_ids))

    def flush(self) -> str:
        """What was held back for a stop string that did not come. Bytes of an incomplete character are dropped."""
        text, self._held = self._held, ""
        return text

    def _find(self, before: int) -> tuple[int, str] | None:
        """The stop string that ends first in the held text and ends in its new part; ties go to the order given."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._held.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return (best[1], best[2]) if best else None

    def _hold_back(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        top = min(self._longest - 1, len(self._held))
        for n in range(top, 0, -1):
            tail = self._held[-n:]
            if any(stop.startswith(tail) for stop in self._stop):
                return n
        return 0
