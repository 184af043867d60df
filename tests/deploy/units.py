"""What systemd makes of an installed unit, done by hand: its drop-ins, specifiers, variables, credentials and sockets, and the very command of
its ExecStart line. Paths of the machine are those below the root that it was installed into."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "deploy" / "bare-metal" / "install.sh"
ENVIRONMENT = INSTALL.with_name("environment.sh")
VENV = Path(sys.executable).parent.parent
PATIENCE_S = 60.0
OURS = ("/opt/trimtab/", "/etc/trimtab/")
"""What is below the root; /bin/sh and the like are this machine's."""


def install(root: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The installer, with the environment that runs this test in the place of a new one."""
    command = ["bash", str(INSTALL), "--root", str(root), *words]
    if "--uninstall" not in words and "--link-venv" not in words:
        command += ["--link-venv", str(VENV)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )


@dataclass(frozen=True)
class Unit:
    """`name` may be an instance of a template: trimtab-worker@0.service."""

    root: Path
    name: str

    @property
    def template(self) -> str:
        stem, at, _ = self.name.partition("@")
        return f"{stem}@.service" if at else self.name

    @property
    def instance(self) -> str:
        return self.name.removesuffix(".service").partition("@")[2]

    @property
    def files(self) -> list[Path]:
        """The unit, then its drop-ins by name."""
        etc = self.root / "etc/systemd/system"
        folders = dict.fromkeys((etc / f"{self.template}.d", etc / f"{self.name}.d"))
        drop_ins = [file for folder in folders for file in folder.glob("*.conf")]
        return [self.root / "usr/local/lib/systemd/system" / self.template, *sorted(drop_ins, key=lambda f: f.name)]

    def values(self, key: str) -> list[str]:
        """Every value that is given for it, specifiers replaced."""
        lines = [line for file in self.files for line in file.read_text().splitlines()]
        return [self._whole(line.partition("=")[2]) for line in lines if line.startswith(f"{key}=")]

    @property
    def credentials(self) -> Path:
        return self.root / "run/credentials" / self.name

    def _whole(self, value: str) -> str:
        var = self.root / "var"
        meant = {"%i": self.instance, "%S": var / "lib", "%C": var / "cache", "%d": self.credentials}
        for specifier, what in meant.items():
            value = value.replace(specifier, str(what))
        return value

    def place(self, path: str) -> str:
        return f"{self.root}{path}" if path.startswith(OURS) else path

    @property
    def command(self) -> list[str]:
        """With ${VARIABLES} of its environment replaced."""
        (line,) = self.values("ExecStart")
        env = self.environment
        return [re.sub(r"\$\{(\w+)\}", lambda m: env[m[1]], self.place(word)) for word in shlex.split(line)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment=, and over it the files, of which those with a dash may be missing."""
        found = dict(pair.split("=", 1) for line in self.values("Environment") for pair in shlex.split(line))
        for path in self.values("EnvironmentFile"):
            file = Path(self.place(path.removeprefix("-")))
            if not path.startswith("-") or file.exists():
                lines = [line.strip() for line in file.read_text().splitlines()]
                found |= dict(line.split("=", 1) for line in lines if line and line[0] not in "#;")
        return {name: self.place(value) for name, value in found.items()}

    def prepare(self) -> None:
        """Its state and cache directories, and copies of its credentials."""
        for key, where in (("StateDirectory", "lib"), ("CacheDirectory", "cache")):
            for name in self.values(key):
                (self.root / "var" / where / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        for line in self.values("LoadCredential"):
            name, path = line.split(":", 1)
            self.credentials.mkdir(parents=True, exist_ok=True)
            (self.credentials / name).write_bytes(Path(self.place(path)).read_bytes())
            (self.credentials / name).chmod(0o400)


class Manager:
    """The service manager's end of a notification socket: a path, or with "@" an abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[str] = []
        """Every line, in order."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def read(self, within_s: float = PATIENCE_S) -> list[str]:
        """The next message's lines; TimeoutError where none comes."""
        self._socket.settimeout(within_s)
        lines = self._socket.recv(4096).decode().split("\n")
        self.heard += lines
        return lines

    def until(self, line: str) -> None:
        """Wait for it, if it has not been heard."""
        while line not in self.heard:
            self.read()

    def silence(self, within_s: float) -> list[str]:
        """All that is said within that time."""
        said: list[str] = []
        with suppress(TimeoutError):
            while True:
                said += self.read(within_s)
        return said

    def close(self) -> None:
        self._socket.close()


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@dataclass
class Service:
    """A unit that runs."""

    unit: Unit
    process: subprocess.Popen[bytes]
    manager: Manager
    log: Path

    def until_ready(self) -> None:
        """READY=1; AssertionError with its last words where it ends before."""
        while "READY=1" not in self.manager.heard:
            try:
                self.manager.read(within_s=1.0)
            except TimeoutError:
                assert self.process.poll() is None, self.said[-5:]

    def stop(self) -> int:
        """As systemctl stop does; the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    @property
    def said(self) -> list[str]:
        return self.log.read_text().splitlines()


@contextmanager
def started(unit: Unit, *, abstract: bool = False, watchdog_s: float | None = None, **env: str) -> Iterator[Service]:
    """By the ExecStart line, with nothing of this process's environment. `watchdog_s` stands in for WatchdogSec."""
    unit.prepare()
    (watchdog,) = [watchdog_s] if watchdog_s else [float(v) for v in unit.values("WatchdogSec")]
    name = f"trimtab-{os.getpid()}-{unit.name}"
    socket_path = unit.root / "run" / f"{unit.instance}{unit.name[:12]}"
    socket_path.parent.mkdir(exist_ok=True)
    manager = Manager(f"@{name}" if abstract else str(socket_path))
    log = unit.root / f"{unit.name}.log"
    given = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": str(int(watchdog * 1e6)),
        **unit.environment,
        **env,
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'export WATCHDOG_PID=$$; exec "$@"', "sh", *unit.command],
            env=given,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield Service(unit, process, manager, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        manager.close()
