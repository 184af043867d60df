"""What `trimtab up` does about presets once the mesh answers: where the window is small, it measures one stream and writes `small`.

Nobody's decision is overwritten: a field that the policy sets bars the write, and with `auto` one that was ever changed does too, so that
what was undone stays undone. All fields are written or none. A failure is a warning: the mesh serves by the policy that it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from controlplane.admin.client import AdminClient
from controlplane.render import answer_of
from trimtab.client import Client, Model
from trimtab.codec import decode_partial
from trimtab.errors import TrimtabError
from trimtab.presets import decided, in_place, itl_budget_ms, small, suits
from trimtab_cli import calibration, doors
from trimtab_cli.greeting import patiently, served
from trimtab_cli.plan import Plan
from trimtab_cli.progress import Screen
from trimtab_cli.ready import policy_set
from trimtab_cli.settings import AUTO, NONE, UpSettings

AUTHOR = "trimtab up"
HISTORY = 1024
"""Entries; all that the store keeps."""
WAIT_MS = 3000
"""For the workers' answers to the write."""

Measure = Callable[[Client, str], Awaitable[calibration.Measured]]


async def settle(show: Screen, up: UpSettings, plan: Plan, *, measure: Measure = calibration.measure) -> None:
    """One event that says what was done, or none where there was nothing to decide. Never raises."""
    if up.preset == NONE or (up.preset == AUTO and not up.prompt):
        return
    try:
        async with doors.gateway(plan.gateway) as client, doors.control(plan.control) as admin:
            await _settle(show, up, plan, client, admin, measure)
    except Exception as e:
        why = e.message if isinstance(e, TrimtabError) else str(e) or repr(e)
        show.event("preset_failed", f"warning: preset small is not applied: {why}", preset="small", why=why)


async def _settle(
    show: Screen, up: UpSettings, plan: Plan, client: Client, admin: AdminClient, measure: Measure
) -> None:
    model = await patiently(lambda: served(client, admin))
    if up.preset == AUTO and not suits(model.max_model_len):
        return
    if await _barred(show, up, admin, await admin.get_policy()):
        return
    measured = await measure(client, model.name)
    # Somebody may have decided meanwhile; what is written between this look and ours is a conflict.
    before = await admin.get_policy()
    if await _barred(show, up, admin, before):
        return
    fields = small(itl_budget_ms(measured.token_ms), measured.ttft_ms)
    found = f"{_window(model)}, one stream gives a token every {measured.token_ms:.2f} ms, the first after {measured.ttft_ms:.0f} ms"
    if not measured.steady:
        found += " (unsteady: no two streams agreed)"
    answer = await admin.set_policy(
        fields, author=AUTHOR, reason=f"preset small: {found}", expect_version=before.spec_version, wait_ms=WAIT_MS
    )
    words = " ".join(f"{path}={value}" for path, value in fields.items())
    undo = policy_set(up.mesh, plan, *(f"{path}=default" for path in fields))
    late = [node.node_id for node in answer.nodes if answer_of(node, answer.identity) != "applied"]
    behind = f" (not yet on {', '.join(late)}: trimtab fleet)" if late else ""
    show.event(
        "preset",
        f"preset small: {found}: {words}{behind}\n  undo: {undo}",
        preset="small",
        applied=True,
        window=model.max_model_len,
        token_ms=round(measured.token_ms, 3),
        ttft_ms=round(measured.ttft_ms, 3),
        steady=measured.steady,
        fields=fields,
        not_yet_on=late,
    )


async def _barred(show: Screen, up: UpSettings, admin: AdminClient, policy: Any) -> bool:
    """Whether somebody has decided on a field of the preset; says so."""
    if in_place(decode_partial(policy.effective), policy.sources):
        show.event("preset", "preset small: the policy has it already", preset="small", applied=False, set_before=[])
        return True
    history = (await admin.history(HISTORY)).entries
    # Newest first: who changed each field last.
    authors = {change.field: entry.author for entry in reversed(history) for change in entry.changes}
    held = decided(policy.sources, set(authors) if up.preset == AUTO else set())
    if held:
        why = _who_has_set(held, authors)
        show.event("preset", f"preset small is not applied: {why}", preset="small", applied=False, set_before=held)
    return bool(held)


def _who_has_set(fields: Sequence[str], authors: Mapping[str, str]) -> str:
    """In words; `up` itself where an earlier one of a mesh with this store did."""
    by_author: dict[str, list[str]] = {}
    for path in fields:
        by_author.setdefault(authors.get(path, "somebody"), []).append(path)
    return "; ".join(
        f"{'an earlier `trimtab up`' if author == AUTHOR else author} has set {', '.join(paths)}"
        for author, paths in by_author.items()
    )


def _window(model: Model) -> str:
    return f"window {model.max_model_len}" if model.max_model_len else "window unknown"
