"""docs/install-bare-metal.md, "More than one machine" and "Check": what it says is done, word by word, and every unit's settings hold."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli_keys import new
from tests.deploy.units import PATIENCE_S, ROOT, Unit, install
from trimtab.kit.config import host_port
from trimtab_cli.certs import certs

TEXT = (ROOT / "docs/install-bare-metal.md").read_text()
UNITS = {
    "a": ("trimtab-control.service", "trimtab-gateway.service"),
    "b": ("trimtab-worker@0.service", "trimtab-worker@1.service"),
}


def commands(beginning: str) -> list[list[str]]:
    """The document's lines that begin so, as words; what follows a # is left out."""
    return [shlex.split(line, comments=True) for line in TEXT.splitlines() if line.startswith(beginning)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The roots of a and b."""
    where = tmp_path_factory.mktemp("machines")
    (words,) = commands("trimtab certs init")
    words[words.index("certs", 2)] = str(where / "certs")
    made = CliRunner().invoke(certs, words[2:])
    assert made.exit_code == 0, made.output
    roots = {}
    for words in commands("deploy/bare-metal/install.sh --role"):
        name = words[words.index("--name") + 1]
        roots[name] = where / name
        done = install(roots[name], *words[1:])
        assert done.returncode == 0, done.stderr
    for (_, root), words in zip(sorted(roots.items()), commands("install -g"), strict=True):
        assert words[-2:] == ["-t", "/etc/trimtab/tls"]
        for pattern in words[words.index("0640") + 1 : -2]:
            found = list((where / "certs").glob(pattern))
            assert found
            for file in found:
                shutil.copy(file, root / "etc/trimtab/tls")
    (control,) = set(re.findall(r'`(control = \["[0-9.:]+"\])` under', TEXT))
    for root in roots.values():
        (root / "etc/trimtab/trimtab.toml").write_text(f"[worker]\n{control}\n[gateway]\n{control}\n")
    (keys,) = set(re.findall(r'`(keys = "/etc/trimtab/keys.yaml")` under', TEXT))
    shown = CliRunner().invoke(new, ["acme"]).stdout
    file = roots["a"] / "etc/trimtab/keys.yaml"
    file.write_text(shown[shown.index("tenants:") :])
    with (roots["a"] / "etc/trimtab/trimtab.toml").open("a") as toml:
        toml.write(keys.replace("/etc/trimtab/keys.yaml", str(file)) + "\n")
    return roots


def check(unit: Unit) -> subprocess.CompletedProcess[str]:
    """The document's command, for this unit; systemctl says what the unit has."""
    (command,) = re.findall(r"^\( export .*? \)$", TEXT, re.MULTILINE | re.DOTALL)
    section = re.split("[-@.]", unit.name)[1]
    if section == "worker":
        command = command.replace("trimtab-worker@0", f"trimtab-worker@{unit.instance}")
        command = command.replace("worker-0.env", f"worker-{unit.instance}.env")
    else:
        command = command.replace("trimtab-worker@0", f"trimtab-{section}").replace("; . /etc/trimtab/worker-0.env", "")
        command = command.replace("worker.env", f"{section}.env").replace("--section worker", f"--section {section}")
    for place in ("/etc/trimtab/", "/opt/trimtab/"):
        command = command.replace(place, f"{unit.root}{place}")
    tool = unit.root / "bin/systemctl"
    tool.parent.mkdir(exist_ok=True)
    said = " ".join(unit.values("Environment")).replace("=/etc/trimtab", f"={unit.root}/etc/trimtab")
    tool.write_text(f'#!/bin/sh\ntest "$4" = {unit.name.removesuffix(".service")} && echo "{said}"\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "HOME": str(unit.root)}
    return subprocess.run(
        ["sh", "-c", command], env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def units(machines: dict[str, Path]) -> list[Unit]:
    return [Unit(machines[name], unit) for name, them in UNITS.items() for unit in them]


@pytest.mark.slow
def test_every_unit_s_settings_hold_and_the_check_is_of_those(machines: dict[str, Path]) -> None:
    for unit in units(machines):
        done = check(unit)
        assert done.returncode == 0, (unit.name, done.stdout, done.stderr)


def test_the_check_finds_what_is_only_in_a_unit_s_own_variables(machines: dict[str, Path]) -> None:
    unit = Unit(machines["b"], "trimtab-worker@1.service")
    own = unit.root / "etc/trimtab/worker-1.env"
    before = own.read_text()
    own.write_text(before + "TRIMTAB_WORKER_METRIX=127.0.0.1:1\n")
    try:
        done = check(unit)
        assert (done.returncode, "METRIX" in done.stdout + done.stderr) == (2, True)
    finally:
        own.write_text(before)


def test_each_reaches_the_others_where_the_firewalls_let_it(machines: dict[str, Path]) -> None:
    """Nothing that others dial is left at loopback, and no port is missing in the table."""
    heard = {}
    for unit in units(machines):
        for name, value in unit.environment.items():
            if name.endswith(("_LISTEN", "_HTTP")):
                heard[f"{unit.name} {name}"] = host_port(value)
    assert {host for host, _ in heard.values()} == {"10.0.0.4", "10.0.0.5"}
    assert sorted(port for _, port in heard.values()) == [7070, 7071, 7080, 7100, 7101]
    table = TEXT[TEXT.index("| to | port | from |") : TEXT.index("7. Check the settings")]
    assert all(port in table for port in ("7070", "7071", "7080", "7100 + N"))
    assert heard["trimtab-control.service TRIMTAB_CONTROL_LISTEN"] == ("10.0.0.4", 7071)
    assert 'control = ["10.0.0.4:7071"]' in TEXT


def test_every_process_has_a_certificate_of_its_own_name(machines: dict[str, Path]) -> None:
    names = set()
    for unit in units(machines):
        env = unit.environment
        (cert,) = [Path(value) for name, value in env.items() if name.endswith("_TLS_CERT")]
        assert cert.is_file()
        assert all(Path(value).is_file() for name, value in env.items() if "_TLS_" in name)
        names.add(cert.stem)
        for name, value in env.items():
            if name.endswith("NODE_ID"):
                assert cert.stem.endswith(f"-{value}")
    assert len(names) == 4
