"""Why an engine is gone, and whether it was for want of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

KILLED = "the engine process was killed by SIGKILL; nobody here did it, and the kernel does so where memory runs out"
_WORDS = re.compile(
    r"\bOutOfMemoryError\b|\bMemoryError\b|out of memory|DefaultCPUAllocator: (?:can't|not enough)|cannot allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|ErrorMemoryAllocation|No available memory for the cache blocks|could not create a primitive",
    re.IGNORECASE,
)
"""Of torch on CPUs and GPUs, Python, the system (ENOMEM), vLLM, and oneDNN, which says no more where it gets no memory for a shape that is
new: an engine that has served lacks nothing else."""


@dataclass(frozen=True, slots=True)
class Death:
    """`words` are for people."""

    words: str
    out_of_memory: bool = False


def wants_memory(words: str) -> bool:
    """Whether this error message is of a lack of memory."""
    return _WORDS.search(words) is not None


def described(error: BaseException) -> str:
    """Its kind and message, and those of what caused it, the newest first."""
    parts: list[str] = []
    found: BaseException | None = error
    while found is not None and len(parts) < 8:
        parts.append(f"{type(found).__name__}: {found}")
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "; because of ".join(parts)


def death_of(last_words: str, *, killed: bool) -> Death:
    """`last_words` are what the engine process could still say; `killed`: it ended by a SIGKILL that we did not send."""
    if last_words:
        return Death(f"the engine process is gone: {last_words}", wants_memory(last_words))
    return Death(KILLED, True) if killed else Death("the engine process is gone")
