"""`trimtab certs`: the mesh's authority and certificates, as files. Connects to nothing."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from trimtab.kit.cli import ExitCode, echo_json, json_option
from trimtab.kit.tls import ANY_NAME, KINDS, NODES, OTHERS, PEOPLE, CertificateError

if TYPE_CHECKING:
    from trimtab.kit.certificates import About, Pair

CA, CA_KEY = "ca.pem", "ca-key.pem"
EXPIRES_SOON = datetime.timedelta(days=30)

_dir = click.option(
    "--dir", "where", type=click.Path(file_okay=False, path_type=Path), default=Path("certs"), show_default=True, metavar="DIR",
    help="Where the files are.",
)  # fmt: skip


@click.group()
def certs() -> None:
    """Make and show the certificates with which the parts of a mesh know each other.

    `init` makes the authority, and certificates for a small site if it is told whose; `issue` makes one for one process or person; `renew`
    makes those anew that end soon. Processes take files that have changed without a restart. In a cluster an issuer such as cert-manager
    does all this instead.
    """


@certs.command()
@_dir
@click.option("--mesh", default="default", show_default=True, metavar="NAME", help="Mesh that it is for.")
@click.option(
    "--days",
    type=click.IntRange(1, 36500),
    default=3650,
    show_default=True,
    metavar="N",
    help="The authority lasts so long.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="KIND/NAME[=HOST,...]",
    help="Issue a certificate too, such as gateway/g0=llm.example.org or operator/ada; repeat it.",
)
@click.option(
    "--hosts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The same from a file, one a line: KIND NAME [HOST ...]",
)
@click.option(
    "--host-days", type=click.IntRange(1, 3650), default=90, show_default=True, metavar="N", help="Those last so long."
)
@json_option
def init(
    where: Path, mesh: str, days: int, hosts: tuple[str, ...], file: Path | None, host_days: int, as_json: bool
) -> None:
    """Make the authority of a mesh. Its key signs every certificate: keep it off the machines that serve. Nothing is overwritten."""
    from trimtab.kit import certificates as c

    try:
        site = [*(c.site(file.read_text()) if file else ()), *(c.wanted(each) for each in hosts)]
        pair = c.authority(mesh, days=days, now=_now())
        made = [
            (w, c.issue(pair, mesh, w.kind, w.name, hosts=w.hosts, days=host_days, now=_now()))
            for w in dict.fromkeys(site)
        ]
    except (CertificateError, OSError, UnicodeDecodeError) as e:
        raise click.UsageError(str(e)) from e
    if twice := {w.stem for w in site if sum(x.stem == w.stem for x, _ in made) > 1}:
        raise click.UsageError(f"{', '.join(sorted(twice))} is named twice, with other hosts")
    if (where / CA).exists() or (where / CA_KEY).exists():
        _fail(
            f"{where} has an authority already; what it signed would be worth nothing. Take another --dir, or move it away"
        )
    if there := [path for w, _ in made for path in _files(where, w.stem) if path.exists()]:
        _fail(f"{there[0]} is there already; take another --dir, or move it away")
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(where / CA_KEY, pair.key, 0o600)
    _write(where / CA, pair.cert, 0o644)
    for w, each in made:
        _write_pair(where, w.stem, each)
    if as_json:
        rows = [dict(zip(("cert", "key"), map(str, _files(where, w.stem)), strict=True)) for w, _ in made]
        echo_json({"ca": str(where / CA), "key": str(where / CA_KEY), "mesh": mesh, "certificates": rows})
        return
    click.echo(f"authority of mesh {mesh}: {where / CA}, its key {where / CA_KEY}")
    for w, _ in made:
        click.echo(f"{w.kind} {w.name}: {_files(where, w.stem)[0]}")
    if not made:
        click.echo(f"next: trimtab certs issue control c0 --dir {where}")


@certs.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[FILE...]")
@_dir
@click.option(
    "--within",
    type=click.IntRange(0, 3650),
    default=EXPIRES_SOON.days,
    show_default=True,
    metavar="DAYS",
    help="Renew those that end within so many days.",
)
@click.option("--all", "everyone", is_flag=True, help="Renew them all, whenever they end.")
@click.option(
    "--days", type=click.IntRange(1, 3650), metavar="N", help="They last so long. [default: as long as the old ones]"
)
@json_option
def renew(files: tuple[Path, ...], where: Path, within: int, everyone: bool, days: int | None, as_json: bool) -> None:
    """Make certificates anew, with new keys, for the same names: these files, or those among DIR/*.pem that end soon. Processes take them
    without a restart. The authority is not renewed: another one is brought in beside it (docs/security.md)."""
    from trimtab.kit import certificates as c

    signer = _signer(where)
    soon = _now() + datetime.timedelta(days=within)
    rows = []
    for cert in files or sorted(where.glob("*.pem")):
        key = cert.with_name(f"{cert.stem}-key.pem")
        try:
            old = cert.read_bytes()
            if not files and (b"BEGIN CERTIFICATE-----" not in old or not c.about(old).kind or not key.exists()):
                continue
            if not (files or everyone or c.about(old).not_after <= soon):
                continue
            pair = c.renew(signer, old, days=days, now=_now())
        except (CertificateError, OSError) as e:
            raise click.UsageError(f"{cert}: {e}") from e
        _write(key, pair.key, 0o600)
        _write(cert, pair.cert, 0o644)
        said = c.about(pair.cert)
        rows.append({"file": str(cert), "whose": _whose(said), "not_after": said.not_after.isoformat()})
    if as_json:
        echo_json(rows)
        return
    for row in rows:
        click.echo(f"{row['file']}: {row['whose']}, until {row['not_after'][:10]}")
    if not rows:
        click.echo(f"no certificate in {where} ends within {within} days")


@certs.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address that clients from outside call it by; repeat it.",
)
@_dir
@click.option("--mesh", metavar="NAME", help="Mesh that it is for. [default: the authority's]")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=90, show_default=True, metavar="N", help="It lasts so long."
)
@json_option
def issue(
    kind: str, name: str, hosts: tuple[str, ...], where: Path, mesh: str | None, days: int, as_json: bool
) -> None:
    """Issue, or renew, a certificate for a control, worker or gateway process of that node id, or for a person who is viewer, operator or
    admin. The name * is for a whole pool of pods: any node id of the kind."""
    from trimtab.kit import certificates as c

    signer = _signer(where)
    try:
        mesh = mesh or c.mesh_of(signer.cert) or "default"
        pair = c.issue(signer, mesh, kind, name, hosts=hosts, days=days, now=_now())
    except CertificateError as e:
        raise click.UsageError(str(e)) from e
    cert, key = _write_pair(where, c.Wanted(kind, name).stem, pair)
    until = c.about(pair.cert).not_after
    if as_json:
        files = {"ca": str(where / CA), "cert": str(cert), "key": str(key)}
        echo_json({**files, "kind": kind, "name": name, "mesh": mesh, "not_after": until.isoformat()})
        return
    click.echo(f"{kind} {name} of mesh {mesh}, until {until:%Y-%m-%d}: {cert}")
    if kind in PEOPLE:
        click.echo(
            f"use it: export TRIMTAB_TLS_CA={where / CA} TRIMTAB_TLS_CERT={cert} TRIMTAB_TLS_KEY={key} TRIMTAB_TLS_MESH={mesh}"
        )
    else:
        me = f" --node-id {name}" if kind in NODES and name != ANY_NAME else ""
        click.echo(f"use it: --tls-ca {where / CA} --tls-cert {cert} --tls-key {key} --mesh {mesh}{me}")


@certs.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE..."
)
@json_option
def show(files: tuple[Path, ...], as_json: bool) -> None:
    """Show whose certificates these are, and until when they hold. Exit code 1 when one has run out. Private keys among the files are passed
    over, with a warning where everybody on the machine can read them."""
    from trimtab.kit.certificates import about

    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            data = file.read_bytes()
            if b"PRIVATE KEY-----" in data and b"BEGIN CERTIFICATE-----" not in data:
                if file.stat().st_mode & OTHERS:
                    click.secho(
                        f"warning: everybody on this machine can read {file}: chmod 600 {file}", fg="yellow", err=True
                    )
                continue
            a = about(data)
        except (CertificateError, OSError) as e:
            raise click.UsageError(f"{file}: {e}") from e
        left = a.not_after - _now()
        state = "expired" if left <= datetime.timedelta(0) else "expires soon" if left < EXPIRES_SOON else "good"
        rows.append(
            {
                "file": str(file),
                "whose": _whose(a),
                "serial": f"{a.serial:x}",
                "hosts": list(a.hosts),
                "not_after": a.not_after.isoformat(),
                "state": state,
            }
        )
    if as_json:
        echo_json(rows)
    else:
        for row in rows:
            hosts = f" ({', '.join(row['hosts'])})" if row["hosts"] else ""
            click.echo(f"{row['file']}: {row['whose']}{hosts}, until {row['not_after'][:10]}: {row['state']}")
    if any(row["state"] == "expired" for row in rows):
        raise SystemExit(ExitCode.GOAL_FAILED)


def _whose(a: About) -> str:
    return "authority" if a.authority else f"{a.kind} {a.name} of mesh {a.mesh}" if a.kind else a.subject


def _signer(where: Path) -> Pair:
    from trimtab.kit.certificates import Pair

    try:
        return Pair((where / CA).read_bytes(), (where / CA_KEY).read_bytes())
    except OSError as e:
        _fail(f"can't read {e.filename}: {e.strerror}; make the authority first: trimtab certs init --dir {where}")


def _files(where: Path, stem: str) -> tuple[Path, Path]:
    return where / f"{stem}.pem", where / f"{stem}-key.pem"


def _write_pair(where: Path, stem: str, pair: Pair) -> tuple[Path, Path]:
    """Whoever reads them meanwhile goes on with the old ones: a key that is not that of its certificate is passed over."""
    cert, key = _files(where, stem)
    _write(key, pair.key, 0o600)
    _write(cert, pair.cert, 0o644)
    return cert, key


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others meanwhile: a server may be reading it."""
    new = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as f:
        f.write(data)
    new.chmod(mode)
    new.replace(path)


def _fail(message: str) -> NoReturn:
    click.secho(f"error: {message}", fg="red", err=True)
    raise SystemExit(ExitCode.REFUSED)
