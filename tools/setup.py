"""Make `.venv` and everything in it: `make setup`, or `python3 tools/setup.py`.

Runs before anything is installed, so it uses only the standard library. Invariant: `.venv/trimtab-setup.json`
exists only after a complete installation and names what was installed; a second run that finds the same
fingerprint there does nothing. The engine is chosen by what the machine has (TRIMTAB_ACCELERATOR=cpu|gpu
overrides). Packages come through uv, which knows nothing of pip's settings: this file hands them over.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pip_settings import parse_pip_config, uv_environment

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
STAMP = VENV / "trimtab-setup.json"
UV = "uv==0.13.9"
EXTRAS = ("embedded", "dev")
LOCKED = (*EXTRAS, "learn")
CONSTRAINTS = {"cpu": "requirements/constraints.txt", "gpu": "requirements/constraints-gpu.txt"}
UNWANTED = ("torchaudio", "torchcodec", "torchvision")
OLDEST, TOO_NEW = (3, 11), (3, 15)
NEEDED_GB = {"cpu": 5, "gpu": 15}


class SetupError(Exception):
    """Something that the person at the keyboard has to put right; `hint` says how."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def succeeds(command: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Run it silently in the checkout."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    return done.returncode == 0


def accelerator(env: Mapping[str, str], gpu_seen: bool) -> str:
    asked = env.get("TRIMTAB_ACCELERATOR", "").strip().lower()
    if asked not in ("", "auto", "cpu", "gpu"):
        hint = "Set it to cpu or gpu, or unset it to let the machine decide."
        raise SetupError(f"TRIMTAB_ACCELERATOR is {asked!r}", hint)
    return asked if asked in ("cpu", "gpu") else ("gpu" if gpu_seen else "cpu")


def gpu_seen() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and succeeds([smi, "-L"])


def fingerprint(parts: Iterable[bytes], python: str, kind: str) -> str:
    digest = hashlib.sha256(f"{python} {kind} {UV} {EXTRAS}".encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def sources(root: Path) -> list[bytes]:
    return [p.read_bytes() for p in (root / "pyproject.toml", *sorted((root / "requirements").glob("*.txt")))]


def venv_fault(recorded_root: str | None, root: Path, venv: Path, wanted: tuple[int, int]) -> str | None:
    """Why `.venv` cannot be used, or None."""
    python = venv / "bin" / "python"
    if not python.exists():
        return "it has no working interpreter"
    ask = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "its interpreter does not start"
    if done.returncode != 0:
        return "its interpreter does not start"
    found = ".".join(done.stdout.split())
    if found != f"{wanted[0]}.{wanted[1]}":
        return f"it is of Python {found}, not {wanted[0]}.{wanted[1]}"
    if recorded_root is not None and recorded_root != str(root):
        return "it was made for another directory, and its scripts point there"
    return None


def recorded() -> dict[str, str]:
    try:
        found = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def step(text: str) -> None:
    print(f"==> {text}", flush=True)


def call(command: Sequence[str], problem: str, hint: str, env: Mapping[str, str] | None = None) -> None:
    sys.stdout.flush()
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if code != 0:
        raise SetupError(f"{problem} (exit code {code})", hint)


def make_venv() -> None:
    fault = venv_fault(recorded().get("root"), ROOT, VENV, sys.version_info[:2]) if VENV.exists() else "missing"
    if fault is None:
        return
    if VENV.exists():
        step(f".venv is rebuilt: {fault}")
        shutil.rmtree(VENV)
    step(f"making .venv with Python {sys.version.split()[0]}")
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    hint = f"Debian and Ubuntu keep this part of Python in a package of its own: apt install {package}"
    behind = getattr(sys, "_base_executable", None) or sys.executable  # it may be .venv's own Python that runs this
    call([behind, "-m", "venv", str(VENV)], "python -m venv failed", hint)


def room(kind: str) -> None:
    if not os.access(ROOT, os.W_OK):
        raise SetupError(f"{ROOT} is not writable", "Run as its owner, or copy the checkout to a place of your own.")
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < NEEDED_GB[kind] and not STAMP.exists():
        need = f"{free:.1f} GB are free here and the {kind} installation needs about {NEEDED_GB[kind]} GB"
        raise SetupError(need, "Free some space, or move the checkout to a larger disk.")


def pip_config() -> dict[str, str]:
    ask = [PYTHON, "-m", "pip", "config", "list"]
    return parse_pip_config(subprocess.run(ask, capture_output=True, text=True, check=False).stdout)


def get_uv() -> str:
    uv = VENV / "bin" / "uv"
    if not uv.exists():
        step(f"getting {UV} with pip")
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV]
        call(pip, "pip could not install uv", "Check the network, or pip's index settings (`pip config list`).")
    return str(uv)


def torch_choices(kind: str, dry_run: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Flags that tell uv where torch's CPU build lies: nothing where the configured places carry it."""
    if kind == "gpu" or env.get("UV_TORCH_BACKEND"):
        return []
    step("looking for torch's CPU build in the configured places")
    return [] if succeeds(dry_run, env) else ["--torch-backend", "cpu"]


def install(kind: str, uv: str, env: Mapping[str, str]) -> None:
    target = ["-e", f".[{','.join((kind, *EXTRAS))}]"]
    pins = ["--constraint", CONSTRAINTS[kind], "--override", "requirements/overrides.txt"]
    # Byte code is compiled here, once: where PYTHONDONTWRITEBYTECODE is set, or .venv is read-only to the process,
    # each of an engine's processes would compile vLLM and torch anew (80 s instead of 33 s to a ready engine).
    command = [uv, "pip", "install", "--compile-bytecode", "--python", PYTHON, *pins, *target]
    torch = torch_choices(kind, [*command, "--dry-run", "--quiet"], env)
    step(f"installing trimtab with the {kind} engine")
    hint = "uv's message above says what it could not get. Check the network, the index settings (`pip config list`, "
    hint += "UV_*) and the free space here and in `uv cache dir`, then run `make setup` again."
    if torch:
        hint += (
            "\n       Of torch's CPU build the configured places have none for this Python, so PyTorch's own index was"
        )
        hint += "\n       asked. If they have one for another version, name it: make setup PYTHON=python3.11"
    call([*command, *torch], "uv could not install the packages", hint, env)
    unwanted = [n for n in UNWANTED if any(VENV.glob(f"lib/python*/site-packages/{n}"))]
    if unwanted:
        step(f"removing {', '.join(unwanted)}: their builds break torch here, and nothing needs them")
        remove = [uv, "pip", "uninstall", "--python", PYTHON, *unwanted]
        call(remove, "uv could not remove them", "Remove .venv and run `make setup` again.", env)


def lock(uv: str, env: Mapping[str, str], *, upgrade: bool) -> None:
    """Rewrite the constraint files: every version pinned, nothing said about where packages come from.

    What is pinned stays as it is unless everything is to be as new as can be.
    """
    for kind, name in CONSTRAINTS.items():
        step(f"resolving {name}")
        extras = [flag for extra in (kind, *LOCKED) for flag in ("--extra", extra)]
        what = ["pip", "compile", "pyproject.toml", *extras, "--override", "requirements/overrides.txt"]
        what += ["--python-version", "3.11", "--no-annotate"]
        command = [uv, *what, "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--quiet"]
        full = [*command, *torch_choices(kind, command, env)]
        with tempfile.TemporaryDirectory() as directory:
            # uv keeps the versions that it finds in the file that it is to write.
            out = Path(directory) / "constraints.txt"
            out.write_text((ROOT / name).read_text())
            full += ["--output-file", str(out), *(["--upgrade"] if upgrade else [])]
            done = subprocess.run(full, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, text=True, check=False)
            if done.returncode != 0:
                raise SetupError(f"{name} could not be resolved", "uv's message above says why.")
            pins = out.read_text()
        header = (
            f"# Every version of a {kind} installation. Written by `make lock`, do not edit:\n# uv {' '.join(what)}\n"
        )
        (ROOT / name).write_text(header + of_kind(kind, pins))


def of_kind(kind: str, pins: str) -> str:
    """A machine without a GPU may know only builds for the CPU; on one with a GPU that pin could never be met."""
    return pins.replace("+cpu", "") if kind == "gpu" else pins


def run(args: argparse.Namespace) -> None:
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        raise SetupError(f"this is Python {sys.version.split()[0]}", "Use 3.11 to 3.14: make setup PYTHON=python3.12")
    kind = accelerator(os.environ, gpu_seen())
    python = "{}.{}".format(*sys.version_info)
    now = {"fingerprint": fingerprint(sources(ROOT), python, kind), "root": str(ROOT), "accelerator": kind}
    if args.lock or args.force or recorded() != now or venv_fault(None, ROOT, VENV, sys.version_info[:2]):
        room(kind)
        make_venv()
        uv = get_uv()
        env = uv_environment(pip_config(), {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"})
        if args.lock:
            lock(uv, env, upgrade=args.upgrade)
            return
        STAMP.unlink(missing_ok=True)
        install(kind, uv, env)
        STAMP.write_text(json.dumps(now) + "\n")
    if not args.no_model:
        model = [PYTHON, "-m", "services.worker.model", "fetch"]
        hint = "The message above says why; `make setup` goes on from there. TRIMTAB_CACHE_DIR moves the model."
        call(model, "the default model is not ready", hint)
    step(f"ready: {kind} engine in .venv (next: make up, or .venv/bin/trimtab --help)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make .venv with everything in it; does nothing when it is up to date."
    )
    parser.add_argument("--force", action="store_true", help="install again even if nothing changed")
    parser.add_argument("--no-model", action="store_true", help="leave the default model alone")
    parser.add_argument("--lock", action="store_true", help="rewrite the constraint files in requirements/")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: the newest versions, not those pinned now")
    args = parser.parse_args()
    directory = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)  # two setups at once would install into each other
    try:
        run(args)
    except SetupError as error:
        print(f"\nsetup: {error}\n       {error.hint}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"\nsetup: {error}\n       Check that the disk is writable and not full, then run it again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again, it goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
