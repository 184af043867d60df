"""`trimtab blocks` and `trimtab reblock`: KV blocks of running engines, shown and cut to another size."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import ask, user
from trimtab.kit.cli import control_option, echo_json, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

WHEN = {"idle": 1, "now": 2}
"""ReblockWhen's numbers."""


@click.command()
@control_option
@json_option
def blocks(control: str | None, as_json: bool) -> None:
    """Show KV blocks: of each worker the size, how many there are, what is wasted in them now and would be at other sizes, how much of the
    prefix cache's hits other sizes would keep; of each pool what is planned, and why.

    Exit codes: 0 done, 3 no control plane answers.
    """
    from controlplane import render_blocks as render

    answer = ask(control, as_json, lambda client: client.blocks())
    if as_json:
        echo_json(render.blocks_json(answer))
    else:
        click.echo(render.blocks_text(answer))


@click.command()
@click.argument("target", metavar="POOL|WORKER")
@click.argument("size", metavar="SIZE", type=click.IntRange(1, 1 << 20))
@click.option("--dry-run", is_flag=True, help="Ask every worker what it would do and cost; change nothing.")
@click.option(
    "--when",
    type=click.Choice(sorted(WHEN)),
    default="idle",
    show_default=True,
    help="idle: only if it costs less than block_plan.max_recompute_tokens says. now: whatever it costs.",
)
@click.option(
    "--recompute", is_flag=True, help="Have everything computed anew, also where the engine can carry its KV over."
)
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--reason", default="", metavar="TEXT", help="Why; `trimtab why W` tells it.")
@control_option
@json_option
def reblock(
    target: str,
    size: int,
    dry_run: bool,
    when: str,
    recompute: bool,
    author: str | None,
    reason: str,
    control: str | None,
    as_json: bool,
) -> None:
    """Cut the KV cache of a running worker, or of a pool's workers one after another, into blocks of SIZE tokens. Streams go on: their KV
    is carried over where the engine knows how, and computed anew where not. Prefixes that nobody runs on are lost.

    After a worker that does not do it the others are left as they are. A worker named as a pool is comes before the pool.

    Exit codes: 0 done, 2 usage or an unknown name, 3 no control plane answers, 4 refused (the sizes that would be accepted are named),
    5 some did it and one did not, or one gave no answer.
    """
    from controlplane import render_blocks as render

    async def changing(client: AdminClient) -> tuple[Any, list[str]]:
        known = (await client.blocks()).nodes
        names = [n.node_id for n in known if n.pool == target]
        is_pool = bool(names) and target not in {n.node_id for n in known}
        answer = await client.reblock(
            () if is_pool else (target,),
            size,
            pool=target if is_pool else "",
            when=WHEN[when],
            recompute=recompute,
            dry_run=dry_run,
            author=author or user(),
            reason=reason,
            workers=len(names),
        )
        tried = {n.node_id for n in answer.nodes}
        return answer, [name for name in names if is_pool and name not in tried]

    answer, left = ask(control, as_json, changing)
    if as_json:
        echo_json(render.reblock_json(answer, size, dry_run=dry_run, left=left))
    elif text := render.reblock_text(answer):
        click.echo(("nothing is changed; it would be:\n" if dry_run else "") + text)
    for line in render.refusals(answer, size, dry_run=dry_run, left=left):
        click.secho(line, fg="red", err=True)
    sys.exit(render.reblock_code(answer.nodes))
