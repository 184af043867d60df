"""The pure parts of tools/setup.py; `make setup` itself is its own test."""

import sys
from pathlib import Path

import pip_settings
import pytest
import setup

PIP_CONFIG = """\
:env:.cert='/certs/env.pem'
:env:.default-timeout='180'
global.cert='/certs/global.pem'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='\\n/wheels\\n/more-wheels'
global.index-url='mirror'
install.index-url='mirror-for-install'
freeze.index-url='never'
"""


def test_the_machine_chooses_the_engine_unless_the_user_does() -> None:
    assert setup.accelerator({}, gpu_seen=False) == "cpu"
    assert setup.accelerator({}, gpu_seen=True) == "gpu"
    assert setup.accelerator({"TRIMTAB_ACCELERATOR": "cpu"}, gpu_seen=True) == "cpu"
    assert setup.accelerator({"TRIMTAB_ACCELERATOR": " GPU "}, gpu_seen=False) == "gpu"


def test_an_unknown_accelerator_is_refused_with_the_way_out() -> None:
    with pytest.raises(setup.SetupError, match="tpu") as caught:
        setup.accelerator({"TRIMTAB_ACCELERATOR": "tpu"}, gpu_seen=False)
    assert "cpu or gpu" in caught.value.hint


def test_pip_settings_are_read_with_pips_own_precedence() -> None:
    assert pip_settings.parse_pip_config(PIP_CONFIG) == {
        "cert": "/certs/env.pem",
        "timeout": "180",
        "extra-index-url": "file:///a/simple file:///b/simple",
        "find-links": "/wheels /more-wheels",
        "index-url": "mirror-for-install",
    }


def test_uv_is_told_what_pip_knows() -> None:
    env = pip_settings.uv_environment(pip_settings.parse_pip_config(PIP_CONFIG), {"PATH": "/bin"})
    assert env == {
        "PATH": "/bin",
        "UV_DEFAULT_INDEX": "mirror-for-install",
        "UV_EXTRA_INDEX_URL": "file:///a/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more-wheels",
        "SSL_CERT_FILE": "/certs/env.pem",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_what_the_user_told_uv_itself_stands() -> None:
    told = {"UV_INDEX_URL": "mine", "UV_INDEX": "more", "UV_FIND_LINKS": "there", "SSL_CERT_FILE": "/own.pem"}
    env = pip_settings.uv_environment(pip_settings.parse_pip_config(PIP_CONFIG), told)
    assert {k: v for k, v in env.items() if k != "UV_HTTP_TIMEOUT"} == told


def test_without_pip_settings_uv_is_told_nothing() -> None:
    assert pip_settings.uv_environment({}, {}) == {}


def test_the_fingerprint_follows_every_input() -> None:
    base = setup.fingerprint([b"a", b"b"], "3.11.7", "cpu")
    assert base == setup.fingerprint([b"a", b"b"], "3.11.7", "cpu")
    others = {
        setup.fingerprint([b"a", b"c"], "3.11.7", "cpu"),
        setup.fingerprint([b"ab"], "3.11.7", "cpu"),
        setup.fingerprint([b"a", b"b"], "3.12.1", "cpu"),
        setup.fingerprint([b"a", b"b"], "3.11.7", "gpu"),
    }
    assert base not in others
    assert len(others) == 4


def test_a_venv_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    here, version = tmp_path, sys.version_info[:2]
    assert setup.venv_fault(None, here, here, version) == "it has no working interpreter"
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("not a program")
    python.chmod(0o755)
    assert setup.venv_fault(None, here, here, version) == "its interpreter does not start"
    python.unlink()
    python.symlink_to(sys.executable)
    assert setup.venv_fault(None, here, here, version) is None
    running = f"{version[0]}.{version[1]}"
    assert setup.venv_fault(None, here, here, (3, 9)) == f"it is of Python {running}, not 3.9"
    assert "another directory" in str(setup.venv_fault("/elsewhere", here, here, version))


def test_every_extra_is_in_the_project_and_every_pin_is_a_plain_version() -> None:
    project = (setup.ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in (*setup.CONSTRAINTS, *setup.LOCKED))
    for name in setup.CONSTRAINTS.values():
        lines = [x for x in (setup.ROOT / name).read_text().splitlines() if not x.startswith("#")]
        assert all("==" in line and "/" not in line and "@" not in line for line in lines)
        assert not [line for line in lines if line.startswith(setup.UNWANTED)]


def test_a_pin_for_gpus_is_of_no_build_for_the_cpu() -> None:
    pins = "torch==2.13.0+cpu\ntqdm==4.67.1\n"
    assert setup.of_kind("gpu", pins) == "torch==2.13.0\ntqdm==4.67.1\n"
    assert setup.of_kind("cpu", pins) == pins
