"""How many cores an engine on a CPU may keep busy: those that it may run on, and no more than its control groups let it use.

A container's quota (`limits.cpu`, `--cpus`, `CPUQuota=`) takes no core away, so the affinity alone shows all of the machine's. Threads of a step
wait for each other by spinning: more of them than the quota pays for burn it in a fraction of each period, and all stand still for the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")
V1_MOUNTS = ("cpu,cpuacct", "cpu", "cpuacct,cpu")


def threads(cores: int) -> int:
    """That compute, of so many cores: one is left to everything else, as vLLM does it too.

    Threads of a step wait for each other by spinning: a core that one of them shares with another program stalls all of them.
    """
    return max(1, cores - 1)


def threads_each(cores: int, engines: int) -> int:
    """That compute in each of so many engines side by side on these cores."""
    return max(1, threads(cores) // engines)


def usable(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Cores of this process: the fewer of its affinity and its quota, a part of one counted as one."""
    return bounded(len(os.sched_getaffinity(0)), quota(groups, mounts))


def bounded(affinity: int, quota: float | None) -> int:
    """`quota` in cores, None where there is none."""
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def quota(groups: Path = GROUPS, mounts: Path = MOUNTS) -> float | None:
    """In cores, the least of this process's control group and all above it; None where none has one, or this kernel has no control groups."""
    own = groups_of(_text(groups))
    found = [v2(_text(folder / "cpu.max")) for folder in _upward(mounts, own[""])] if "" in own else []
    if "cpu" in own:
        folders = (folder for name in V1_MOUNTS for folder in _upward(mounts / name, own["cpu"]))
        found += [v1(_text(f / "cpu.cfs_quota_us"), _text(f / "cpu.cfs_period_us")) for f in folders]
    return min((each for each in found if each is not None), default=None)


def groups_of(text: str) -> dict[str, str]:
    """/proc/self/cgroup as controller -> path; "" is the hierarchy of version 2."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return {name: path for _, names, path in lines for name in names.split(",")}


def v2(text: str) -> float | None:
    """cpu.max, "QUOTA PERIOD" in microseconds, in cores; None where it says "max" or nothing."""
    quota, _, period = text.strip().partition(" ")
    return v1(quota, period)


def v1(quota: str, period: str) -> float | None:
    """cpu.cfs_quota_us and cpu.cfs_period_us in cores; None for a quota of -1 or what is no number."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _upward(mount: Path, group: str) -> Iterator[Path]:
    """The group's directory and all above it. In a container the path may be the machine's, of which the mount shows the last part alone:
    what is not there reads as nothing, and the mount itself is the container's."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    for n in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:n])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
