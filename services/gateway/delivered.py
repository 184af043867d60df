"""What a request's client has been given so far, and how another worker is told to go on from there."""

from __future__ import annotations

from array import array

from trimtab.messages import Resume
from trimtab.v1 import inference_pb2


class Delivered:
    """Token ids, and bytes of text. `before` is what the client had already from somewhere else."""

    def __init__(self, before: Resume | None = None) -> None:
        self.token_ids = array("I", before.token_ids if before else ())
        self.text_bytes = before.text_bytes if before else 0
        self.prompt_digest = before.prompt_digest if before else b""
        self._attempts_before = before.attempt if before else 0
        self.before = self.text_bytes > 0 or len(self.token_ids) > 0
        """Whether there was any."""

    @property
    def next_index(self) -> int:
        return len(self.token_ids)

    def take(self, delta: inference_pb2.Delta) -> None:
        """It is on its way to the client."""
        ids, text = delta.token_ids, delta.text
        # Most have one token, and this is done for each: an iterator over it costs more than all the rest here.
        if len(ids) == 1:
            self.token_ids.append(ids[0])
        else:
            self.token_ids.extend(ids)
        self.text_bytes += len(text) if text.isascii() else len(text.encode())

    def resume(self, attempt: int) -> inference_pb2.Resume:
        """For the `attempt`-th worker, counted from 1."""
        return inference_pb2.Resume(
            token_ids=self.token_ids,
            text_bytes=self.text_bytes,
            attempt=self._attempts_before + attempt,
            prompt_digest=self.prompt_digest,
        )
