"""The installer, in a scratch root: what it makes, what it leaves alone, and what is left when it has taken itself off."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from controlplane.settings import ControlSettings
from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from tests.deploy.units import ENVIRONMENT, INSTALL, ROOT, VENV, Unit, install
from trimtab.kit.config import load

UNCHANGED = "nothing to do: it is installed as it should be\n"
SETTINGS = {"control": ControlSettings, "gateway": GatewaySettings, "worker": WorkerSettings}


def files(root: Path) -> dict[str, tuple[int, bytes]]:
    """(mode, content) of all that is there; a link's content is where it leads. Without the databases of users."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = (0, os.fsencode(path.readlink()))
        elif path.is_file() and name not in ("etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", "etc/.pwd.lock"):
            found[name] = (path.stat().st_mode, path.read_bytes())
    return found


@pytest.mark.slow
def test_shellcheck_has_nothing_to_say() -> None:
    words = [str(Path(sys.executable).parent / "shellcheck"), "--enable=require-double-brackets", "--external-sources"]
    files = [str(INSTALL), str(ENVIRONMENT)]
    done = subprocess.run([*words, *files], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_second_run_changes_nothing_and_says_so(tmp_path: Path) -> None:
    words = ("--gpus", "2", "--numa", "0 1", "--tls", "--scale")
    first = install(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    before = files(tmp_path)
    second = install(tmp_path, *words)
    assert (second.returncode, second.stdout) == (0, UNCHANGED)
    assert files(tmp_path) == before


def test_an_administrators_umask_is_not_that_of_what_is_installed(tmp_path: Path) -> None:
    """The user trimtab reads and runs it."""
    before = os.umask(0o077)
    try:
        done = install(tmp_path, "--gpus", "0")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert {oct(path.stat().st_mode & 0o005) for path in tmp_path.glob("usr/local/**/*") if path.is_dir()} == {"0o5"}


def test_an_administrators_own_unit_is_left_alone(tmp_path: Path) -> None:
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    own = wants / "trimtab-backup.service"
    own.symlink_to("/etc/systemd/system/trimtab-backup.service")
    for words in (("--gpus", "0"), ("--uninstall",)):
        done = install(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert own.is_symlink() and "trimtab-backup" not in done.stdout


def test_a_dry_run_says_what_a_run_does_and_does_nothing(tmp_path: Path) -> None:
    dry = install(tmp_path, "--gpus", "1", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert list(tmp_path.iterdir()) == []
    wet = install(tmp_path, "--gpus", "1")
    assert [line.removeprefix("would: ") for line in dry.stdout.splitlines()[:-2]] == wet.stdout.splitlines()[:-2]


@pytest.mark.slow
def test_what_somebody_has_edited_is_never_written_over(tmp_path: Path) -> None:
    install(tmp_path, "--gpus", "1")
    for name in ("trimtab.toml", "worker-0.env"):
        (tmp_path / "etc/trimtab" / name).write_text("# mine\n")
    unit = tmp_path / "usr/local/lib/systemd/system/trimtab-gateway.service"
    unit.write_text("# of an older version\n")
    again = install(tmp_path, "--gpus", "1")
    assert "kept: /etc/trimtab/trimtab.toml (yours)\n" in again.stdout
    assert "kept: /etc/trimtab/worker-0.env (yours)\n" in again.stdout
    assert "write /usr/local/lib/systemd/system/trimtab-gateway.service\n" in again.stdout
    assert "installed: 1 changes\n" in again.stdout
    assert (tmp_path / "etc/trimtab/trimtab.toml").read_text() == "# mine\n"
    assert unit.read_text() == (ROOT / "deploy/systemd/trimtab-gateway.service").read_text()


def test_a_role_brings_what_it_needs_and_one_more_is_added(tmp_path: Path) -> None:
    install(tmp_path, "--role", "gateway")
    units = tmp_path / "usr/local/lib/systemd/system"
    assert {p.name for p in units.iterdir()} == {"trimtab.target", "trimtab-gateway.service"}
    assert wanted(tmp_path) == {"trimtab-gateway.service"}
    install(tmp_path, "--role", "gateway", "--role", "worker", "--gpus", "2")
    assert wanted(tmp_path) == {
        "trimtab-gateway.service",
        "trimtab-worker@0.service",
        "trimtab-worker@1.service",
    }
    assert (tmp_path / "etc/trimtab/worker-1.env").exists()
    assert not (tmp_path / "etc/trimtab/control.env").exists()


def wanted(root: Path) -> set[str]:
    return {p.name for p in (root / "etc/systemd/system/trimtab.target.wants").iterdir()}


@pytest.mark.slow
def test_what_is_not_asked_for_any_more_is_disabled_and_named(tmp_path: Path) -> None:
    install(tmp_path, "--gpus", "3", "--scale")
    mine = tmp_path / "etc/systemd/system/trimtab.target.wants/backup.service"
    mine.symlink_to("/etc/systemd/system/backup.service")
    fewer = install(tmp_path, "--role", "worker", "--role", "gateway", "--gpus", "2")
    gone = {"trimtab-control.service", "trimtab-scale.service", "trimtab-worker@2.service"}
    assert set(re.findall(r"^disable (\S+), which", fewer.stdout, re.MULTILINE)) == gone
    assert wanted(tmp_path) == {
        "backup.service",
        "trimtab-gateway.service",
        "trimtab-worker@0.service",
        "trimtab-worker@1.service",
    }
    assert (tmp_path / "etc/trimtab/worker-2.env").exists()
    again = install(tmp_path, "--role", "worker", "--role", "gateway", "--gpus", "2")
    assert again.stdout.endswith(UNCHANGED)


def test_an_address_is_where_every_process_listens_and_a_name_is_in_every_node_s(tmp_path: Path) -> None:
    done = install(tmp_path, "--gpus", "2", "--address", "10.0.0.5", "--name", "box", "--tls", "--scale")
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "etc/trimtab/trimtab.toml").read_text())
    assert [written[section]["control"] for section in ("gateway", "worker")] == [["10.0.0.5:7071"]] * 2
    assert Unit(tmp_path, "trimtab-scale.service").environment["TRIMTAB_CONTROL"] == "10.0.0.5:7071"
    tls = tmp_path / "etc/trimtab/tls"
    expected = {
        "trimtab-control.service": ("control-box-c0", {"LISTEN": "10.0.0.5:7071"}),
        "trimtab-gateway.service": (
            "gateway-box-g0",
            {"NODE_ID": "box-g0", "LISTEN": "10.0.0.5:7070", "HTTP": "10.0.0.5:7080"},
        ),
        "trimtab-worker@1.service": (
            "worker-box-w1",
            {"NODE_ID": "box-w1", "LISTEN": "10.0.0.5:7101", "METRICS": "127.0.0.1:7201"},
        ),
    }
    for name, (certificate, settings) in expected.items():
        section = re.split("[-@.]", name)[1].upper()
        settings |= {"TLS_CERT": str(tls / f"{certificate}.pem"), "TLS_KEY": str(tls / f"{certificate}-key.pem")}
        environment = Unit(tmp_path, name).environment
        assert {key: environment[f"TRIMTAB_{section}_{key}"] for key in settings} == settings


@pytest.mark.slow
def test_secrets_are_for_root_alone_and_certificates_for_the_units_user(tmp_path: Path) -> None:
    install(tmp_path, "--tls", "--scale", "--gpus", "1")
    key = tmp_path / "etc/trimtab/tls/worker-w0-key.pem"
    key.write_text("a key")
    key.chmod(0o600)
    install(tmp_path, "--tls", "--scale", "--gpus", "1")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "etc/trimtab").iterdir() if p.is_file()}
    assert set(modes.values()) == {0o640}
    if os.geteuid() == 0:
        user = int(re.search(r"^trimtab:x:(\d+):", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)[1])
        assert user != 0
        secret = {p.name: p.stat().st_gid for p in (tmp_path / "etc/trimtab").glob("*.env")}
        assert set(secret.values()) == {0}
        assert (tmp_path / "etc/trimtab/trimtab.toml").stat().st_gid == user
        assert (mode_of(key.parent), mode_of(key)) == ((0o750, user), (0o640, user))


def mode_of(path: Path) -> tuple[int, int]:
    """And the group."""
    return path.stat().st_mode & 0o777, path.stat().st_gid


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files to others")
def test_certificates_that_systemd_copies_are_for_root_alone_also_in_a_later_run(tmp_path: Path) -> None:
    for words in (["--tls-credentials"], []):
        assert install(tmp_path, "--gpus", "1", *words).returncode == 0
        key = tmp_path / "etc/trimtab/tls/worker-w0-key.pem"
        key.touch(0o644)
        install(tmp_path, "--gpus", "1", *words)
        assert (mode_of(key.parent), mode_of(key)) == ((0o700, 0), (0o600, 0))


def test_taking_it_off_leaves_settings_and_a_purge_leaves_nothing(tmp_path: Path) -> None:
    install(tmp_path, "--gpus", "2", "--numa", "0 0", "--tls", "--scale")
    state = tmp_path / "var/lib/trimtab/default/policy-w0.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    before = files(tmp_path)
    assert install(tmp_path, "--uninstall").returncode == 0
    left = files(tmp_path)
    assert left == {name: what for name, what in before.items() if name in left}
    assert {name.split("/")[0] for name in left} == {"etc", "var"}
    assert not any("wants" in name for name in left)
    assert install(tmp_path, "--uninstall").stdout == "taken off: 0 changes\n"
    assert install(tmp_path, "--uninstall", "--purge").returncode == 0
    assert files(tmp_path) == {}
    assert (VENV / "bin" / "trimtab").exists()  # the link went, and not what it led to


def test_a_directory_that_it_has_not_made_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "opt/trimtab/precious"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    done = install(tmp_path)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    assert "kept: /opt/trimtab" in install(tmp_path, "--uninstall", "--purge").stdout
    assert theirs.read_text() == "x"


def test_another_prefix_is_in_the_units(tmp_path: Path) -> None:
    assert install(tmp_path, "--prefix", "/srv/mesh").returncode == 0
    unit = (tmp_path / "usr/local/lib/systemd/system/trimtab-control.service").read_text()
    assert "ExecStart=/srv/mesh/bin/trimtab-control --config" in unit
    assert "/opt/trimtab" not in unit
    assert (tmp_path / "srv/mesh").resolve() == VENV.resolve()


@pytest.mark.slow
def test_where_it_is_installed_is_found_again(tmp_path: Path) -> None:
    assert install(tmp_path, "--prefix", "/srv/mesh", "--gpus", "0").returncode == 0
    assert install(tmp_path, "--gpus", "0").stdout == UNCHANGED
    assert install(tmp_path, "--uninstall", "--purge").returncode == 0
    assert files(tmp_path) == {}


@pytest.mark.slow
def test_certificates_may_be_taken_the_other_way_later(tmp_path: Path) -> None:
    def drop_in(role: str) -> Path:
        return tmp_path / f"etc/systemd/system/trimtab-{role}.service.d/20-tls.conf"

    words = ("--gpus", "1", "--name", "here")
    for way, copied in (("--tls", False), ("--tls-credentials", True), ("--tls", False)):
        done = install(tmp_path, *words, way)
        assert done.returncode == 0 and "20-tls.conf (yours)" not in done.stdout
        for role in ("control", "gateway", "worker@"):
            assert ("LoadCredential=" in drop_in(role).read_text()) is copied
            assert f"/tls/{role.rstrip('@')}-here-" in drop_in(role).read_text()
        assert install(tmp_path, *words, way).stdout == UNCHANGED
    drop_in("gateway").write_text("# mine\n")
    done = install(tmp_path, *words, "--tls-credentials")
    assert "kept: /etc/systemd/system/trimtab-gateway.service.d/20-tls.conf (yours)\n" in done.stdout
    assert drop_in("gateway").read_text() == "# mine\n" and "LoadCredential=" in drop_in("control").read_text()


def a_machine_with_gpus(where: Path, nodes: dict[str, str]) -> dict[str, str]:
    """The environment in which nvidia-smi lists these bus addresses, and the kernel has them at these NUMA nodes."""
    smi = where / "bin" / "nvidia-smi"
    smi.parent.mkdir(parents=True)
    smi.write_text("#!/bin/sh\n" + "".join(f"echo {bus}\n" for bus in nodes))
    smi.chmod(0o755)
    for bus, node in nodes.items():
        device = where / "sys/bus/pci/devices" / bus[-12:].lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return {**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}", "TRIMTAB_SYSFS": str(where / "sys")}


def test_each_gpu_gets_a_worker_beside_it(tmp_path: Path) -> None:
    gpus = {"00000000:17:00.0": "0", "00000000:3D:00.0": "0", "00000000:99:00.0": "1", "00000000:BB:00.0": "-1"}
    env = a_machine_with_gpus(tmp_path / "machine", gpus)
    root = tmp_path / "root"
    done = install(root, "--role", "worker", env=env)
    assert done.returncode == 0, done.stderr
    etc = root / "etc/systemd/system"
    found = {}
    for drop_in in etc.glob("trimtab-worker@*.service.d/10-numa.conf"):
        lines = [line for line in drop_in.read_text().splitlines() if "=" in line]
        found[drop_in.parent.name[len("trimtab-worker@")]] = lines
    at = ["NUMAPolicy=bind", "CPUAffinity=numa"]
    assert found == {n: [at[0], f"NUMAMask={node}", at[1]] for n, node in (("0", "0"), ("1", "0"), ("2", "1"))}
    assert wanted(root) == {f"trimtab-worker@{i}.service" for i in range(4)}


def test_an_nvidia_smi_that_fails_counts_no_gpus(tmp_path: Path) -> None:
    env = a_machine_with_gpus(tmp_path / "machine", {})
    (tmp_path / "machine/bin/nvidia-smi").write_text(
        "#!/bin/sh\necho NVIDIA-SMI has failed because of: a driver\nexit 9\n"
    )
    done = install(tmp_path / "root", "--role", "worker", env=env)
    assert done.returncode == 0, done.stderr
    assert wanted(tmp_path / "root") == {"trimtab-worker@0.service"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--role", "store"], "--role must be"),
        (["--gpus", "many"], "--gpus must be a number"),
        (["--gpus", "2", "--numa", "0"], "a NUMA node for each of 2 GPUs"),
        (["--prefix", "opt"], "--prefix must be an absolute path"),
        (["--purge"], "--purge goes with --uninstall"),
        (["--link-venv", str(VENV), "--gpus"], "--gpus needs a value"),
        (["--address", "0.0.0.0"], "--address must be one that other machines reach"),
        (["--address", "fd00::5"], "such as 10.0.0.5 or [fd00::5]"),
        (["--name", "a b"], "--name must be letters"),
        (["--scale", "--role", "gateway"], "--scale is for a machine with workers"),
        (["--engine", "tpu"], "--engine must be"),
        (["--whell", "x"], "no such option: --whell"),
        (["--link-venv", "/nowhere"], "there is no bin/trimtab-worker"),
    ],
)
def test_a_mistake_is_named_before_anything_is_done(tmp_path: Path, words: list[str], why: str) -> None:
    root = tmp_path / "root"
    done = install(root, *words)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    assert not root.exists()


def test_the_example_s_settings_exist_and_show_the_defaults(tmp_path: Path) -> None:
    text = (ROOT / "deploy/bare-metal/trimtab.toml").read_text()
    shown = re.sub(r"^#([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)
    assert shown.count(" = ") > text.count("\n#mesh") + 15
    file = tmp_path / "trimtab.toml"
    file.write_text(shown)
    for section, settings in SETTINGS.items():
        assert load(settings, section, env={}, file=file) == settings()
    for section in SETTINGS:
        for line in (ROOT / f"deploy/bare-metal/{section}.env").read_text().splitlines():
            name = line.lstrip("#").partition("=")[0]
            if name.startswith("TRIMTAB_"):
                assert name.removeprefix(f"TRIMTAB_{section.upper()}_").lower() in settings_of(section)


def settings_of(section: str) -> set[str]:
    return set(SETTINGS[section].__dataclass_fields__)
