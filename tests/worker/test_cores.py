"""The cores that an engine on a CPU counts on, by files as kernels and container engines have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker.engines import cores


def a_machine(where: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(/proc/self/cgroup, /sys/fs/cgroup)."""
    (where / "cgroup").write_text(groups)
    for name, text in files.items():
        file = where / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return where / "cgroup", where / "fs"


def test_one_core_is_left_to_everything_else() -> None:
    assert [cores.threads(n) for n in (1, 2, 8)] == [1, 1, 7]


@pytest.mark.parametrize(("engines", "expected"), [(1, 8), (2, 4), (3, 2), (8, 1), (9, 1)])
def test_engines_side_by_side_divide_what_one_would_have(engines: int, expected: int) -> None:
    assert cores.threads_each(9, engines) == expected


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(64, None, 64), (64, 4.0, 4), (64, 1.5, 2), (64, 0.1, 1), (2, 8.0, 2)],
)
def test_a_quota_bounds_the_cores_and_a_part_of_one_counts(affinity: int, quota: float | None, expected: int) -> None:
    assert cores.bounded(affinity, quota) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("x y", None), ("100000 0", None), ("100000", None)],
)
def test_cpu_max_is_in_cores(text: str, expected: float | None) -> None:
    assert cores.v2(text) == expected


def test_a_quota_of_version_1_is_in_cores() -> None:
    assert cores.v1("400000\n", "100000\n") == 4.0
    assert cores.v1("-1\n", "100000\n") is None
    assert cores.v1("", "") is None


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert cores.quota(*a_machine(tmp_path, "0::/\n", {"cpu.max": "400000 100000\n"})) == 4.0


def test_the_least_of_a_group_and_those_above_it_holds(tmp_path: Path) -> None:
    files = {
        "trimtab.slice/cpu.max": "200000 100000\n",
        "trimtab.slice/trimtab-worker@0.service/cpu.max": "max 100000\n",
        "other.slice/cpu.max": "100000 100000\n",
    }
    assert cores.quota(*a_machine(tmp_path, "0::/trimtab.slice/trimtab-worker@0.service\n", files)) == 2.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_is_read_where_the_container_engine_mounts_it(tmp_path: Path, mount: str) -> None:
    """The path is the machine's; what is mounted is the container's own group."""
    groups = (
        "12:memory:/docker/4f\n4:cpu,cpuacct:/docker/4f\n1:name=systemd:/docker/4f\n0::/system.slice/docker.service\n"
    )
    files = {f"{mount}/cpu.cfs_quota_us": "300000\n", f"{mount}/cpu.cfs_period_us": "100000\n"}
    assert cores.quota(*a_machine(tmp_path, groups, files)) == 3.0


@pytest.mark.parametrize("groups", ["", "0::/\n", "9:name=systemd:/\n8:pids:/\n", "4:cpu:/\n"])
def test_without_a_quota_the_affinity_counts(tmp_path: Path, groups: str) -> None:
    assert cores.quota(*a_machine(tmp_path, groups, {})) is None
    assert cores.usable(*a_machine(tmp_path, groups, {})) == len(os.sched_getaffinity(0))


def test_the_quota_is_what_counts_where_it_is_less(tmp_path: Path) -> None:
    assert cores.usable(*a_machine(tmp_path, "0::/\n", {"cpu.max": "50000 100000\n"})) == 1


def test_a_path_that_leads_out_of_the_namespace_stays_within_the_mount(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    where = tmp_path / "machine"
    where.mkdir()
    assert cores.quota(*a_machine(where, "0::/../..\n", {"cpu.max": "800000 100000\n"})) == 8.0
