"""What `trimtab up` says once the mesh has answered: the answer, where everything listens, and what to try next."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from trimtab.kit.cli import KEY
from trimtab.kit.process import state_dir
from trimtab.kit.run_file import DEFAULT_MESH
from trimtab_cli.greeting import Greeting
from trimtab_cli.plan import Plan, Sections
from trimtab_cli.progress import Screen


def report(
    show: Screen, sections: Sections, plan: Plan, pids: Mapping[str, int], greeting: Greeting | None, took_s: float
) -> None:
    """One `ready` event: as JSON the facts, for people a screenful."""
    facts = {
        "mesh": sections.up.mesh,
        "engine": sections.worker.engine,
        "gateway": plan.gateway,
        "http": f"{scheme(sections)}://{plan.http}",
        "control": plan.control,
        "workers": list(plan.workers),
        "logs": str(state_dir(sections.up.mesh) / "logs"),
        "pids": dict(pids),
        "seconds": round(took_s, 2),
        "greeting": asdict(greeting) if greeting else None,
    }
    show.event("ready", _text(sections, plan, greeting, took_s), **facts)


def _text(sections: Sections, plan: Plan, greeting: Greeting | None, took_s: float) -> str:
    up, worker, ca, keys = sections.up, sections.worker, sections.gateway.tls_ca, bool(sections.gateway.keys)
    count = f"{up.workers} worker{'s' if up.workers > 1 else ''}"
    if up.controls > 1:
        count = f"{up.controls} control plane replicas, {count}"
    lines = [f"trimtab is up after {took_s:.1f} s: mesh {up.mesh}, {count}, engine {worker.engine}", ""]
    if greeting is not None:
        lines += [
            f"  prompt   {greeting.prompt}",
            f"  answer   {' '.join(greeting.answer.split())}",
            f"           TTFT {greeting.ttft_ms:.0f} ms, policy revision {greeting.policy}, worker {greeting.worker}",
            "",
        ]
    lines += [
        f"  gRPC     {plan.gateway}",
        f"  OpenAI   {scheme(sections)}://{plan.http}/v1",
        f"  metrics  {f'http://{plan.metrics}' if plan.metrics else f'{scheme(sections)}://{plan.http}'}/metrics",
        f"  control  {plan.control.replace(',', ', ')}",
        f"  logs     {_short(state_dir(up.mesh) / 'logs')}",
        "",
        "Try, in another terminal:",
        *(f"  {line}" for line in commands(up.mesh, plan, greeting.model if greeting else "MODEL", ca, keys=keys)),
        *((f"  (with a key of {sections.gateway.keys} in {KEY})",) if keys else ()),
        *(
            ("  (with a certificate of your own in TRIMTAB_TLS_CA, _CERT, _KEY: trimtab certs issue operator NAME)",)
            if ca
            else ()
        ),
        "",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def scheme(sections: Sections) -> str:
    """Of the gateway's HTTP door."""
    return "https" if sections.gateway.tls_cert else "http"


def commands(mesh: str, plan: Plan, model: str, ca: str = "", *, keys: bool = False) -> list[str]:
    """Three lines that work as they stand, pasted into a shell in this directory. `ca` is the authority's file where the mesh has TLS; with
    `keys` the gateway wants one, which trimtab's own verbs take from TRIMTAB_KEY."""
    me = own_name()
    gateway = f" --gateway {plan.gateway}" if mesh != DEFAULT_MESH else ""
    door = f"--cacert {ca} https" if ca else "http"
    key = f' -H "authorization: Bearer ${KEY}"' if keys else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return [
        f"{me} chat{gateway}",
        policy_set(mesh, plan, "batch.active=4"),
        f"curl {door}://{plan.http}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'",
    ]


def policy_set(mesh: str, plan: Plan, *assignments: str) -> str:
    """The verb that sets these fields in this mesh."""
    # Beside a mesh with a name of its own, another one may be the one that verbs find by themselves.
    control = f" --control {plan.control}" if mesh != DEFAULT_MESH else ""
    return " ".join((f"{own_name()} policy set{control}", *assignments))


def own_name() -> str:
    """How this command is typed: its bare name only where the shell would find this very program."""
    if Path(sys.argv[0]).name != "trimtab":
        return f"{_relative(sys.executable)} -m trimtab_cli"
    found = shutil.which("trimtab")
    if found is not None and Path(found).samefile(sys.argv[0]):
        return "trimtab"
    return _relative(sys.argv[0])


def _relative(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.startswith("..") else near


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
