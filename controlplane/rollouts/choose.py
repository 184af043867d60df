"""Which workers are canaries. Pure.

Workers of one pool and one model are a group: only they can be compared. Of each group that is changed somebody stays as he is, so that
there is something to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.errors import InvalidRequest, PolicyRefused, Violation
from trimtab.snapshot import Node

Group = tuple[str, str]
"""(pool, model)"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How canaries are to be chosen: by their number, their share, a label or their ids. None of it is one of each group."""

    count: int = 0
    share: float = 0.0
    label: str = ""
    node_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """One that may be a canary: it serves, and the change would reach it."""

    node: Node
    model: str

    @property
    def node_id(self) -> str:
        return self.node.node_id

    @property
    def group(self) -> Group:
        return (self.node.pool, self.model)


def groups_of(workers: Iterable[Worker]) -> dict[Group, list[Worker]]:
    found: dict[Group, list[Worker]] = {}
    for w in sorted(workers, key=lambda w: (w.group, w.node_id)):
        found.setdefault(w.group, []).append(w)
    return found


def choose(workers: Sequence[Worker], wanted: Wanted) -> tuple[str, ...]:
    """Node ids. PolicyRefused where nobody could stay as he is, or nobody can be one; InvalidRequest for ids that are none."""
    groups = groups_of(workers)
    if not groups:
        raise PolicyRefused(
            "no worker that serves would be changed by it: it can't be tried (trimtab fleet shows who serves, trimtab policy set sets it)",
            reason="NOBODY_TO_TRY",
        )
    found = _named(workers, wanted) if wanted.node_ids or wanted.label else _drawn(groups, wanted)
    for (pool, model), members in groups.items():
        if all(w.node_id in found for w in members):
            raise PolicyRefused(
                f"all workers that serve {model or 'a model'} in pool {pool} would be canaries ({_names(members)}), and nobody is left "
                "to compare with: name fewer, start another worker, or set it at once (trimtab policy set)",
                reason="NOBODY_LEFT",
            )
    return tuple(sorted(found))


def _named(workers: Sequence[Worker], wanted: Wanted) -> set[str]:
    known = {w.node_id for w in workers}
    if wanted.node_ids:
        strangers = [n for n in wanted.node_ids if n not in known]
        if strangers:
            message = (
                f"{', '.join(strangers)}: no worker that serves and that it would change; those are {_names(workers)}"
            )
            raise InvalidRequest(message, violations=(Violation("canary_node_ids", message),))
        return set(wanted.node_ids)
    found = {w.node_id for w in workers if wanted.label in {f"{k}={v}" for k, v in w.node.labels.items()}}
    if not found:
        raise PolicyRefused(f"no worker that serves has the label {wanted.label}", reason="NOBODY_TO_TRY")
    return found


def _drawn(groups: Mapping[Group, Sequence[Worker]], wanted: Wanted) -> set[str]:
    """One from each group in turn, until there are as many as are wanted; somebody stays in each."""
    able = {g: list(members)[:-1] for g, members in groups.items() if len(members) > 1}
    if not able:
        pool, model = next(iter(groups))
        raise PolicyRefused(
            f"pool {pool} has one worker that serves {model or 'its model'}: a canary needs another beside it to be compared with; "
            "start one, or set it at once (trimtab policy set)",
            reason="NOBODY_LEFT",
        )
    if wanted.share:
        return {w.node_id for g, some in able.items() for w in some[: math.ceil(wanted.share * len(groups[g]))]}
    wants = wanted.count or len(able)
    turns = [some[i].node_id for i in range(max(map(len, able.values()))) for some in able.values() if i < len(some)]
    if wants > len(turns):
        raise PolicyRefused(
            f"{wants} canaries are too many: one of each pool and model stays as it is, so {len(turns)} at most",
            reason="NOBODY_LEFT",
        )
    return set(turns[:wants])


def more(rest: Sequence[Worker]) -> tuple[str, ...]:
    """Half of those that do not have it yet, of each group; somebody stays in each."""
    found: list[str] = []
    for members in groups_of(rest).values():
        take = min(math.ceil(len(members) / 2), len(members) - 1)
        found += [w.node_id for w in members[:take]]
    return tuple(found)


def _names(workers: Iterable[Worker]) -> str:
    names = sorted(w.node_id for w in workers)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
