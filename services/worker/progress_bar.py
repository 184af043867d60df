"""Progress on stderr: a bar in a terminal, a line now and then elsewhere, so that logs stay readable.

stdout is left to the caller. rich is imported only when something is shown.
"""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

LINE_EVERY_S = 10.0


class Stages:
    """Runs commands one after another and shows where each stands."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars = not quiet and sys.stderr.isatty()

    def say(self, text: str) -> None:
        if not self._quiet:
            print(f"model: {text}", file=sys.stderr, flush=True)

    def run(
        self,
        command: Sequence[str],
        label: str,
        *,
        env: Mapping[str, str] | None = None,
        watch: Path | None = None,
        total: int | None = None,
    ) -> tuple[int, str]:
        """(exit code, the last lines it said). `watch` is a directory whose largest file grows to `total` bytes."""
        if not self._bars:
            self.say(label)
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said: deque[str] = deque(maxlen=6)
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            (self._bar if self._bars else self._lines)(process, label, watch, total)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        reader.join(timeout=5)
        return process.returncode, "".join(said).strip() or "it said nothing"

    def _lines(self, process: subprocess.Popen[str], label: str, watch: Path | None, total: int | None) -> None:
        started = time.monotonic()
        while True:
            try:
                process.wait(timeout=LINE_EVERY_S)
                return
            except subprocess.TimeoutExpired:
                share = f", {100 * min(arrived(watch), total) // total} %" if watch and total else ""
                self.say(f"  {time.monotonic() - started:.0f} s{share}")

    def _bar(self, process: subprocess.Popen[str], label: str, watch: Path | None, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("model: {task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(label, total=total)
            while process.poll() is None:
                if watch and total:
                    progress.update(task, completed=min(arrived(watch), total))
                time.sleep(0.1)
            if process.returncode == 0:
                progress.update(task, total=total or 1, completed=total or 1)


def arrived(directory: Path) -> int:
    """Size of the largest file below the directory, while others write there."""
    largest = 0
    for path in directory.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:
            continue
    return largest
