"""Who may ask what of the control plane: roles, by certificate or by token. Pure but for reading one file.

    [viewer]                          # may look
    users = ["*"]                     # names in certificates; * is every certificate of the mesh's authority
    [operator]                        # may change the policy, steer requests and workers, in its own name
    users = ["oncall"]
    [admin]                           # may do so in anybody's name
    users = ["ada"]
    [[token]]                         # counts more than a certificate: TRIMTAB_TOKEN, sent as a bearer token
    name = "ci"                       # (with TLS its bearer needs a certificate of the authority too, of any kind)
    role = "operator"
    sha256 = "9f86d0…"                # of the token; the token itself is kept nowhere

A certificate that is issued to a viewer, operator or admin says so itself (`trimtab certs issue`); a name in the file counts more.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.kit.tls import NODES, PLAIN, Caller

MAX_TOKENS = 1000
MIN_TOKEN_CHARS = 16
"""Shorter ones can be guessed, and are worth nothing."""


class Role(enum.IntEnum):
    """Each may do what the ones below it may."""

    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


NEEDS: Mapping[str, Role] = {
    "GetPolicy": Role.VIEWER,
    "ListPolicyHistory": Role.VIEWER,
    "GetPolicyRevision": Role.VIEWER,
    "ListPolicyAnswers": Role.VIEWER,
    "AwaitPolicy": Role.VIEWER,
    "GetFleet": Role.VIEWER,
    "ListBreakers": Role.VIEWER,
    "ListActions": Role.VIEWER,
    "GetTelemetry": Role.VIEWER,
    "ListReports": Role.VIEWER,
    "GetScale": Role.VIEWER,
    "GetBlocks": Role.VIEWER,
    "ListRollouts": Role.VIEWER,
    "WhoAmI": Role.NONE,
    "SetPolicy": Role.OPERATOR,
    "ApplyPolicy": Role.OPERATOR,
    "PinPolicy": Role.OPERATOR,
    "SteerRequests": Role.OPERATOR,
    "ForceBreaker": Role.OPERATOR,
    "DrainNode": Role.OPERATOR,
    "ReloadNode": Role.OPERATOR,
    "ReblockNodes": Role.OPERATOR,
    "StartRollout": Role.OPERATOR,
    "EndRollout": Role.OPERATOR,
    "StartRestart": Role.OPERATOR,
}
"""By method of AdminService; one that is not here needs an admin."""
SCALER_NEEDS = Role.VIEWER
"""Of KEDA's external scaler, which says no more than GetScale."""
ROLES = {role.name.lower(): role for role in Role if role}


class AccessFault(Exception):
    """What is wrong with the file, in words."""


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    role: Role
    sha256: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Who a caller is taken for."""

    caller: Caller
    role: Role

    @property
    def words(self) -> str:
        role = self.role.name.lower() if self.role else "no role"
        return f"{self.caller.name} ({role}, by {self.caller.by})"


@dataclass(frozen=True, slots=True)
class Access:
    """`closed` once a file was given: then plain text alone gives no role."""

    users: Mapping[str, Role] = field(default_factory=dict)
    tokens: tuple[Token, ...] = ()
    closed: bool = False

    def grant(self, caller: Caller, token: str = "") -> Grant:
        """The caller's role. A token that is known counts more than a certificate; one that is not gives nothing at all."""
        if token:
            digest = hashlib.sha256(token.encode()).hexdigest()
            for known in self.tokens if len(token) >= MIN_TOKEN_CHARS else ():
                if hmac.compare_digest(known.sha256, digest):
                    return Grant(Caller("", known.name, "token"), known.role)
            return Grant(Caller("", "unknown", "token"), Role.NONE)
        if caller == PLAIN:
            return Grant(caller, Role.NONE if self.closed else Role.ADMIN)
        if caller.kind == "control":
            # The other replicas, which were asked by somebody who may, or lead.
            return Grant(caller, Role.ADMIN)
        if not caller.known:
            return Grant(caller, Role.NONE)
        if caller.kind in NODES:
            return Grant(caller, Role.NONE)
        said = ROLES.get(caller.kind, Role.NONE)
        named = self.users.get(caller.name)
        role = named if named is not None else max(said, self.users.get("*", Role.NONE))
        return Grant(caller, role)


def read_access(path: Path) -> Access:
    """AccessFault names what is wrong with the file."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise AccessFault(f"can't read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise AccessFault(f"{path} is not TOML: {e}") from e
    users: dict[str, Role] = {}
    for name, role in ROLES.items():
        for user in _users(said.pop(name, {}), name, path):
            users[user] = max(role, users.get(user, Role.NONE))
    rows = said.pop("token", [])
    if said:
        raise AccessFault(f"{path}: {_unknown(next(iter(said)), [*ROLES, 'token'])}")
    if not isinstance(rows, list) or len(rows) > MAX_TOKENS:
        raise AccessFault(f"{path}: token is a list of tables, [[token]], {MAX_TOKENS} at most")
    return Access(users, tuple(_token(row, path) for row in rows), closed=True)


def _users(said: Any, role: str, path: Path) -> list[str]:
    if not isinstance(said, dict):
        raise AccessFault(f"{path}: {role} is a table, [{role}]")
    for key in said:
        if key != "users":
            raise AccessFault(f"{path}: {role}.{_unknown(key, ['users'])}")
    users = said.get("users", [])
    if not isinstance(users, list) or not all(isinstance(u, str) and u for u in users):
        raise AccessFault(f"{path}: {role}.users is a list of names")
    if "*" in users and role != "viewer":
        raise AccessFault(f"{path}: everybody (*) can be a viewer, not {role}")
    return users


def _token(row: Any, path: Path) -> Token:
    if not isinstance(row, dict):
        raise AccessFault(f"{path}: token is a list of tables, [[token]]")
    for key in row:
        if key not in ("name", "role", "sha256"):
            raise AccessFault(f"{path}: token.{_unknown(key, ['name', 'role', 'sha256'])}")
    name, role, sha256 = (str(row.get(key, "")) for key in ("name", "role", "sha256"))
    if not name or role not in ROLES:
        raise AccessFault(f"{path}: a token has a name and a role ({', '.join(ROLES)})")
    if len(sha256) != 64 or not set(sha256.lower()) <= set("0123456789abcdef"):
        raise AccessFault(
            f"{path}: token {name}: sha256 is 64 hex digits, such as `printf %s TOKEN | sha256sum` prints"
        )
    return Token(name, ROLES[role], sha256.lower())


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"{key} is unknown" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")
