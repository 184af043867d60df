"""Settings that the control plane told this worker: kept on disk, and laid over everything else that its next start reads.

They win over flags too, as whoever supervises a worker gives it flags: otherwise no worker of `trimtab up` could be told anything. Two starts
in a row that did not come to serve with them are enough: the next one goes by what served before, or without, and says so. Ends that say
nothing of the settings don't count.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from services.worker.settings import WorkerSettings
from trimtab.kit.config import ConfigError
from trimtab.kit.process import write_atomically
from trimtab.worker_settings import FIXED, SECTION

log = structlog.get_logger(__name__)

BAD_SETTING = "BAD_SETTING"
STARTS = 2
"""That may fail with what was told; as many again with what served before."""
GIVEN_UP_S = 1200.0
"""Whoever ends a start by a signal means the process. One that runs for so long may be ended because it does not come to serve: systemd
(TimeoutStartSec) and Helm (startupSeconds) wait half an hour."""
MOST = 64
"""Settings in all; a WorkerSettings has half as many."""
MAX_CHARS = 512


class BadSetting(Exception):
    """What was told is no setting of a worker, or none that this worker could start with; in words."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the file holds. `failed` counts the starts in a row that have not come to serve, the one under way included; `good` are the
    settings that a start came to serve with last."""

    settings: Mapping[str, str] = field(default_factory=dict)
    failed: int = 0
    good: Mapping[str, str] = field(default_factory=dict)

    @property
    def next(self) -> Mapping[str, str]:
        """What the next start goes by."""
        if self.failed < STARTS:
            return self.settings
        return self.good if self.failed < 2 * STARTS else {}

    def encoded(self) -> bytes:
        said = {"settings": dict(self.settings), "failed": self.failed, "good": dict(self.good)}
        return json.dumps(said, sort_keys=True).encode()


def decoded(data: bytes) -> Kept:
    """ValueError for what is no such file."""
    said: Any = json.loads(data)
    if not isinstance(said, dict) or type(said.get("failed")) is not int:
        raise ValueError("it must hold settings, failed and good")
    return Kept(_words(said.get("settings")), said["failed"], _words(said.get("good")))


def _words(said: Any) -> dict[str, str]:
    if not isinstance(said, dict) or not all(isinstance(x, str) for pair in said.items() for x in pair):
        raise ValueError("settings are names and values in words")
    return said


def merged(before: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """`told` upon what was told before, by names without the section; an empty value takes one back. BadSetting for a name that is fixed
    or none of the worker's."""
    after = dict(before)
    for name, value in told.items():
        key = name.removeprefix(SECTION)
        if key == name:
            raise BadSetting(f"{name}: only settings of the worker can be told, such as {SECTION}max_num_seqs")
        if key in FIXED:
            raise BadSetting(f"{name} says who and where a worker is: it is not changed this way")
        if len(name) > MAX_CHARS or len(value) > MAX_CHARS or not value.isprintable():
            raise BadSetting(f"{name[:MAX_CHARS]}: at most {MAX_CHARS} printable characters")
        if value:
            after[key] = value
        else:
            after.pop(key, None)
    if len(after) > MOST:
        raise BadSetting(f"{len(after)} settings where {MOST} are the most")
    return after


Load = Callable[[Mapping[str, str]], WorkerSettings]
"""This process's settings as they would be with these laid over them; ConfigError with every fault."""


class Told:
    """Belongs to one process. `load` reads its flags, its environment and its file anew."""

    def __init__(self, path: Path, load: Load, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_force: Mapping[str, str] = {}
        """By their names in trimtab.toml; what this process was started with."""
        self._path = path
        self._load = load
        self._clock = clock
        self._begun: Mapping[str, str] = {}
        self._begun_at = 0.0
        self._before: Kept | None = None
        """What the file held before this start was counted; None where nothing is to be put back."""
        self._left_out = ""

    def begin(self) -> WorkerSettings:
        """At a start, before the engine's: the settings to start with. What can't be read or is no longer a setting is left out and said."""
        kept = self._read()
        told, plain = kept.next, self._load({})
        if told != kept.settings:
            instead = shown(told) or "none"
            self._left_out = (
                f"{kept.failed} starts in a row did not come to serve with {shown(kept.settings)}; it goes by {instead}"
            )
        if not told:
            return plain
        try:
            settings = self._load(told)
        except ConfigError as e:
            self._left_out = "; ".join(e.faults)
            return plain
        self._before, self._begun_at = kept, self._clock()
        try:
            write_atomically(self._path, replace(kept, failed=kept.failed + 1).encoded())
        except OSError as e:
            # A start that nobody counts could fail with them for ever.
            self._left_out = f"{self._path} can't be written: {e}"
            return plain
        self.in_force = {SECTION + name: value for name, value in told.items()}
        self._begun = told
        return settings

    def say(self) -> None:
        """Once there is a log: what this start does with them."""
        if self._left_out:
            log.error(
                "settings that were told are left out",
                because=self._left_out,
                next="tell it others (trimtab rollout restart --set), or the same again",
            )
        if self.in_force:
            log.warning("settings were told by the control plane", settings=dict(self.in_force), file=str(self._path))

    def spare(self) -> None:
        """This start ends for a reason that is none of the settings: it does not count."""
        kept, self._before = self._before, None
        if kept is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._path, kept.encoded())

    def mind_signals(self) -> None:
        """Until somebody else takes them: a start that is ended by SIGTERM or SIGINT does not count, unless it has run for GIVEN_UP_S."""

        def end(number: int, _frame: object) -> None:
            if self._clock() - self._begun_at < GIVEN_UP_S:
                self.spare()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # The first process of a container outlives that.
            os._exit(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)

    def served(self) -> None:
        """This start has come to serve: what it went by is kept, and what failed before it is not."""
        self._before = None
        if self._begun:
            try:
                write_atomically(self._path, Kept(self._begun, 0, self._begun).encoded())
            except OSError as e:
                log.error("this start counts as one that failed", file=str(self._path), because=str(e))

    def tell(self, told: Mapping[str, str]) -> Callable[[], None]:
        """From the next start on. BadSetting where that start could not be, and nothing is kept; the answer takes it back.

        What was left out at this start is not built upon: the engine does not start with it.
        """
        kept = self._read()
        after = merged(kept.next, told)
        try:
            settings = self._load(after)
        except ConfigError as e:
            raise BadSetting("; ".join(e.faults)) from e
        if missing := missing_model(settings):
            raise BadSetting(missing)
        try:
            write_atomically(self._path, Kept(after, 0, kept.good).encoded())
        except OSError as e:
            raise BadSetting(f"it can't be kept: {e}") from e
        return lambda: write_atomically(self._path, kept.encoded())

    def _read(self) -> Kept:
        try:
            return decoded(self._path.read_bytes())
        except FileNotFoundError:
            return Kept()
        except (OSError, ValueError) as e:
            self._left_out = f"{self._path} can't be read: {e}"
            return Kept()


def shown(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{SECTION}{name}={value}" for name, value in sorted(settings.items()))


def missing_model(settings: WorkerSettings) -> str:
    """Why no engine finds that model, where that is plain; a hub's name is found out at the start."""
    path = Path(settings.model).expanduser()
    if settings.engine == "vllm" and settings.model.startswith(("/", "./", "../", "~")) and not path.is_dir():
        return f"{SECTION}model: there is no directory {settings.model}"
    return ""
