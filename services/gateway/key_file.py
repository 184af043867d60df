"""The key file: which tenants a gateway has, how each is known, and what each may. YAML:

    tenants:
      acme:
        keys: ["sha256:9f86…"]                  # `trimtab keys new acme` makes a key and prints this line
        identities: [acme-batch]                # names in client certificates
        realtime: false                         # whether it may send REALTIME requests; true where nothing is said
        share: 0.5                              # of the mesh's slots, above 0 and at most 1; else all of them
        requests_per_s: 20                      # in the whole mesh; unbounded where nothing is said, and so are tokens
        tokens_per_s: 50000                     # prompt, and max_tokens where the request says it
        workload: batch                         # of requests that name none
        deadline_s: {realtime: 60, batch: 3600} # of requests that set none

A key is 256 bits drawn at random, which nobody finds by trying; so the file holds plain SHA-256, and a key is looked up by it. A slow hash
guards passwords that people choose, and would cost each request its time for nothing. How long a look-up takes tells nothing either: who can't
choose the hash of what he sends learns nothing from how far it matches. Faults name places in the file, and never a word that may be a key or
its hash.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.messages import Workload
from trimtab.tenant import Tenant

PREFIX = "sha256:"
RESERVED = "other"
"""What metrics call all those for whom there is no label left."""
TOP = ("tenants",)
FIELDS = (
    "keys", "identities", "realtime", "share", "requests_per_s", "tokens_per_s", "workload", "deadline_s",
)  # fmt: skip
WORKLOADS = tuple(w.value for w in Workload)
MAX_FILE_BYTES = 4 << 20
MAX_DEADLINE_S = 30 * 86_400.0
"""A deadline is a timer in the gateway and milliseconds on the wire; nobody waits longer than a month."""
LARGE = 1e12
"""Beyond any rate."""
SHOWN = 24
"""Characters of a name that is not known. A key and a hash are longer, wherever somebody has put them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class KeyFileFault(Exception):
    """Every fault of the file, one line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class KeyFile:
    """`by_key` is by the hexadecimal SHA-256 of a key, `by_identity` by the name in a client's certificate."""

    tenants: tuple[Tenant, ...]
    by_key: Mapping[str, Tenant] = field(repr=False)
    by_identity: Mapping[str, Tenant]


def digest(key: str) -> str:
    """What the file holds of a key, after the prefix."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read(path: Path) -> KeyFile:
    """KeyFileFault where it can't be read, or is wrong."""
    try:
        data = path.read_bytes()
        return parse(data.decode())
    except OSError as e:
        raise KeyFileFault([f"can't be read: {e.strerror}"]) from e
    except UnicodeDecodeError as e:
        raise KeyFileFault([f"is not UTF-8 at byte {e.start}"]) from e


def parse(text: str) -> KeyFile:
    """KeyFileFault with every fault, each at its place in the file."""
    if len(text) > MAX_FILE_BYTES:
        raise KeyFileFault([f"is larger than {MAX_FILE_BYTES >> 20} MiB"])
    faults: list[str] = []
    top = _mapping(_load(text), "", TOP, faults)
    tenants: list[Tenant] = []
    keys = _Owned("key")
    identities = _Owned("identity")
    for name, said in _pairs(top.get("tenants"), "tenants", faults):
        at = f"tenants.{_shown(name)}"
        if not _NAME.fullmatch(name):
            faults.append(f"{at}: a name is up to 64 letters, digits, dots, dashes and underscores")
        elif name == RESERVED:
            faults.append(f"{at}: is what metrics call those without a label of their own; take another name")
        entry = _mapping(said, at, FIELDS, faults)
        tenant = _tenant(name, entry, at, faults)
        keys.take(tenant, _keys(entry, at, faults), f"{at}.keys", faults)
        identities.take(tenant, _identities(entry, at, faults), f"{at}.identities", faults)
        if not entry.get("keys") and not entry.get("identities"):
            faults.append(f"{at}: has neither keys nor identities, so nobody could be this tenant")
        tenants.append(tenant)
    if not tenants and not faults:
        # A file that is being written anew is empty for a moment, and would turn everybody away.
        faults.append("tenants: names nobody")
    if faults:
        raise KeyFileFault(faults)
    return KeyFile(tuple(tenants), keys.found, identities.found)


class _Owned:
    """What belongs to one tenant alone: keys, or identities."""

    def __init__(self, kind: str) -> None:
        self.found: dict[str, Tenant] = {}
        self._kind = kind
        self._places: dict[str, str] = {}

    def take(self, tenant: Tenant, values: Iterable[tuple[int, str]], at: str, faults: list[str]) -> None:
        for i, value in values:
            place = f"{at}[{i}]"
            if value in self.found:
                faults.append(f"{place}: is the same {self._kind} as {self._places[value]}")
                continue
            self.found[value], self._places[value] = tenant, place


def _tenant(name: str, entry: Mapping[str, Any], at: str, faults: list[str]) -> Tenant:
    realtime = entry.get("realtime", True)
    if not isinstance(realtime, bool):
        faults.append(f"{at}.realtime: true or false, not {_kind(realtime)}")
        realtime = True
    workload = _workload(entry.get("workload"), f"{at}.workload", faults)
    if not realtime and workload is Workload.REALTIME:
        faults.append(f"{at}.workload: realtime is what this tenant may not send (realtime: false)")
    if not realtime and workload is None:
        # Else each of its requests that names no workload would be refused.
        workload = Workload.BATCH
    return Tenant(
        name,
        realtime,
        _number(entry.get("share"), f"{at}.share", faults, at_most=1.0) or 1.0,
        _number(entry.get("requests_per_s"), f"{at}.requests_per_s", faults),
        _number(entry.get("tokens_per_s"), f"{at}.tokens_per_s", faults),
        workload,
        _deadlines(entry.get("deadline_s"), f"{at}.deadline_s", faults),
    )


def _workload(said: Any, at: str, faults: list[str]) -> Workload | None:
    if said is None:
        return None
    if said not in WORKLOADS:
        faults.append(f"{at}: {' or '.join(WORKLOADS)}, not {_kind(said)}")
        return None
    return Workload(said)


def _number(said: Any, at: str, faults: list[str], *, at_most: float = math.inf) -> float | None:
    """Above 0; None where nothing is said, or what is said is wrong."""
    if said is None:
        return None
    bound = f" and at most {at_most:.12g}" if math.isfinite(at_most) else ""
    if isinstance(said, bool) or not isinstance(said, int | float):
        faults.append(f"{at}: a number above 0{bound}, not {_kind(said)}")
    elif not (0 < said <= at_most and said < LARGE):
        faults.append(f"{at}: must be above 0{bound}, not {_kind(said)}")
    else:
        return float(said)
    return None


def _deadlines(said: Any, at: str, faults: list[str]) -> dict[Workload, float]:
    found = {
        Workload(name): _number(value, f"{at}.{name}", faults, at_most=MAX_DEADLINE_S)
        for name, value in _mapping(said, at, WORKLOADS, faults).items()
        if name in WORKLOADS
    }
    return {workload: seconds for workload, seconds in found.items() if seconds is not None}


def _keys(entry: Mapping[str, Any], at: str, faults: list[str]) -> list[tuple[int, str]]:
    """(place in the list, hexadecimal SHA-256) of each."""
    found: list[tuple[int, str]] = []
    for i, said in enumerate(_list(entry.get("keys"), f"{at}.keys", faults)):
        hexadecimal = said.removeprefix(PREFIX) if isinstance(said, str) and said.startswith(PREFIX) else ""
        if _HEX.fullmatch(hexadecimal):
            found.append((i, hexadecimal.lower()))
        else:
            faults.append(
                f"{at}.keys[{i}]: must be {PREFIX} and 64 hexadecimal digits, as `trimtab keys new` prints it"
            )
    return found


def _identities(entry: Mapping[str, Any], at: str, faults: list[str]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for i, said in enumerate(_list(entry.get("identities"), f"{at}.identities", faults)):
        if isinstance(said, str) and said and said.isprintable():
            found.append((i, said))
        else:
            faults.append(f"{at}.identities[{i}]: must be the name in a client's certificate, as text")
    return found


def _mapping(said: Any, at: str, known: tuple[str, ...], faults: list[str]) -> dict[str, Any]:
    found = dict(_pairs(said, at or "the file", faults))
    faults += [
        f"{at + '.' if at else ''}{_shown(name)}: is unknown{_near(name, known)}" for name in found if name not in known
    ]
    return found


def _pairs(said: Any, at: str, faults: list[str]) -> list[tuple[str, Any]]:
    if said is None:
        return []
    if not isinstance(said, Mapping):
        faults.append(f"{at}: names and values, not {_kind(said)}")
        return []
    faults += [f"{at}: a name is text, so put {_shown(str(key))} in quotes" for key in said if not isinstance(key, str)]
    return [(key, value) for key, value in said.items() if isinstance(key, str)]


def _list(said: Any, at: str, faults: list[str]) -> list[Any]:
    if said is None:
        return []
    if not isinstance(said, list):
        faults.append(f"{at}: a list, not {_kind(said)}")
        return []
    return said


def _kind(said: Any) -> str:
    """A value, where it says no more than a number or a word would; else what kind of value it is."""
    if isinstance(said, int | float) and not isinstance(said, bool):
        # Python puts no number of thousands of digits into words.
        return f"{said:.12g}" if abs(said) < LARGE else "a number beyond all bounds"
    if said is None or isinstance(said, bool):
        return str(said).lower()
    return repr(_shown(said)) if isinstance(said, str) else type(said).__name__


def _shown(name: str) -> str:
    return name if len(name) <= SHOWN else f"{name[: SHOWN // 2]}…"


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def _load(text: str) -> Any:
    """As PyYAML's safe loader has it. Where it fails, the place alone is told: its words show the line, and there may be a key in it."""
    import yaml

    class Twice(Exception):
        pass

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A name that comes twice is an error: YAML says so, and one of the two would be lost."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
                if name and name in seen:
                    raise Twice(f"line {key.start_mark.line + 1}: {_shown(name)} comes twice")
                seen.add(name)
            whole: dict[Any, Any] = super().construct_mapping(node, deep)
            return whole

    try:
        return yaml.load(text, Loader=Loader)
    except Twice as e:
        raise KeyFileFault([str(e)]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise KeyFileFault([f"{where}is not YAML"]) from None
