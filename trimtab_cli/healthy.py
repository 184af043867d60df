"""Does a process on this machine serve? `python -m trimtab_cli.healthy worker` exits with 0 where its gRPC health says so, else with 1.

For probes that can't speak TLS themselves. It reads the process's own settings, as the process did, so it asks at the address that this one
listens on, and shows its certificate.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

ANY_ADDRESS = ("0.0.0.0", "[::]")
"""What a process may listen on that is no address to dial; it is asked at loopback."""
ASKED_S = 5.0


@click.command()
@click.argument("kind", type=click.Choice(["control", "gateway", "worker"]))
@click.option("--config", metavar="FILE", help="Settings file, where the process was given one.")
def main(kind: str, config: str | None) -> None:
    """Ask the process of this KIND whether it serves: exit code 0, or 1; 2 where its settings are wrong."""
    from trimtab.kit.config import ConfigError, find_file, load
    from trimtab.kit.tls import tls_of
    from trimtab_cli.config import SECTIONS

    try:
        settings: Any = load(SECTIONS[kind], kind, file=find_file(config))
    except ConfigError as e:
        click.echo(e, err=True)
        sys.exit(2)
    serves = asyncio.run(_asked(kind, address(settings.listen), tls_of(settings, settings.mesh)))
    click.echo("serving" if serves else "not serving")
    sys.exit(0 if serves else 1)


def address(listen: str) -> str:
    """Where to reach who listens there, from the same machine."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host == ANY_ADDRESS[0] else f"[::1]:{port}" if host == ANY_ADDRESS[1] else listen


async def _asked(kind: str, where: str, tls: Any) -> bool:
    from trimtab.kit.rpc import use_tls
    from trimtab_cli.probe import serves

    use_tls(tls)
    try:
        async with asyncio.timeout(ASKED_S):
            return await serves(kind, where)
    except TimeoutError:
        return False


if __name__ == "__main__":
    main()
