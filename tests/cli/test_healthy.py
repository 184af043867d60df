"""The probe for those who can't speak TLS: it asks at the address that the process itself was given."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from trimtab.kit.process import free_port
from trimtab_cli.healthy import address, main


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("0.0.0.0:7071", "127.0.0.1:7071"),
        ("[::]:7071", "[::1]:7071"),
        ("10.0.0.7:7100", "10.0.0.7:7100"),
        ("127.0.0.1:7070", "127.0.0.1:7070"),
    ],
)
def test_whoever_listens_everywhere_is_asked_at_loopback(listen: str, asked: str) -> None:
    assert address(listen) == asked


def test_nobody_there_is_not_serving() -> None:
    done = CliRunner().invoke(main, ["gateway"], env={"TRIMTAB_GATEWAY_LISTEN": f"127.0.0.1:{free_port()}"})
    assert (done.exit_code, done.output) == (1, "not serving\n")


def test_a_setting_that_is_wrong_is_named() -> None:
    done = CliRunner().invoke(main, ["worker"], env={"TRIMTAB_WORKER_ENGIN": "vllm"})
    assert done.exit_code == 2
    assert "did you mean engine?" in done.output
