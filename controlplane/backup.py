"""A backup of what people own in a mesh's store, as one JSON file: what `trimtab backup` writes and `trimtab restore` reads. Pure.

It holds the spec (the base, overlays, pins), the breakers that are forced, and the newest history, which is for reading alone. What
controllers do is not in it: it expires by itself within a minute, and they decide anew. The file carries a digest of itself, since what a
spec does not say goes back to the default: half a file would be a policy too, and a wrong one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controlplane import spec_file
from controlplane.breakers import MAX_FORCE_MS, Side
from controlplane.spec import Spec
from trimtab.errors import InvalidRequest, PolicyRefused, Violation
from trimtab.policy import POLICY_SCHEMA
from trimtab.snapshot import Document

FORMAT = 1
MAX_FILE_BYTES = 64 << 20
KEYS = ("format", "made_unix_ms", "identity", "spec_version", "author", "reason", "policy", "breakers", "history")
DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class Forced:
    """An operator's word on a worker's breaker: `to` is open or closed, until `until_unix_ms`."""

    node_id: str
    to: str
    until_unix_ms: int
    author: str
    reason: str

    def left_ms(self, now_unix_ms: int) -> int:
        """Of it; 0 once it is over. Never more than a breaker can be forced for, whatever the clocks say."""
        return max(0, min(MAX_FORCE_MS, self.until_unix_ms - now_unix_ms))


@dataclass(frozen=True, slots=True)
class Backup:
    """`policy` is what `trimtab policy apply -f` takes. `author` and `reason` are of the newest write; `history` is None where the store
    could not be asked for it."""

    made_unix_ms: int
    identity: Mapping[str, Any]
    spec_version: int
    author: str
    reason: str
    policy: Mapping[str, Any]
    breakers: tuple[Forced, ...] = ()
    history: Sequence[Mapping[str, Any]] | None = None

    @property
    def place(self) -> str:
        """epoch.revision of the policy that it was made from."""
        return f"{self.identity.get('epoch', 0)}.{self.identity.get('revision', 0)}"


def policy_of(document: Document) -> dict[str, Any]:
    """The spec of a document as a file has it. PolicyRefused where a newer build wrote fields that this one would leave out."""
    import yaml

    if document.needs_schema > POLICY_SCHEMA:
        raise PolicyRefused(
            f"the policy needs schema {document.needs_schema}, this command understands {POLICY_SCHEMA} and would leave out what it does "
            "not know: make the backup with the control plane's own version of trimtab",
            reason="SCHEMA_TOO_OLD",
        )
    said: dict[str, Any] = yaml.safe_load(spec_file.write(document, None))
    return said


def spec_of(backup: Backup) -> Spec:
    """InvalidRequest, with each fault at its place, for what this build does not take."""
    import yaml

    # By way of YAML, as people's files come, so that there is one reader of a spec.
    return spec_file.read(yaml.safe_dump(dict(backup.policy), sort_keys=False, allow_unicode=True)).spec


def write(backup: Backup) -> str:
    """Such that `read` gives it back."""
    said = {"format": FORMAT, **asdict(backup)}
    ordered = {key: said[key] for key in KEYS}
    return json.dumps({**ordered, DIGEST: _digest(ordered)}, indent=2, ensure_ascii=False) + "\n"


def read(text: str) -> Backup:
    """InvalidRequest for what is no backup, is of a newer build, or was cut short or changed since it was written."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _invalid(f"is not JSON, or was cut short: {e}") from e
    if not isinstance(said, dict) or type(said.get("format")) is not int:
        raise _invalid("is not what `trimtab backup` writes")
    if said["format"] != FORMAT:
        raise _invalid(
            f"has format {said['format']}, this build reads {FORMAT}: use the version of trimtab that wrote it"
        )
    digest = said.pop(DIGEST, None)
    if digest != _digest(said):
        raise _invalid(
            "is not as it was written: its digest differs. To use a policy that was changed by hand, cut it out: "
            "jq .policy FILE | trimtab policy apply -f -"
        )
    try:
        breakers = tuple(_forced(each) for each in said["breakers"])
        return Backup(**{key: said[key] for key in KEYS if key not in ("format", "breakers")}, breakers=breakers)
    except (KeyError, TypeError, ValueError) as e:
        raise _invalid(f"lacks or has too much of something: {e}") from e


def _forced(said: Mapping[str, Any]) -> Forced:
    forced = Forced(**said)
    Side(forced.to)
    return forced


def _digest(said: Mapping[str, Any]) -> str:
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _invalid(fault: str) -> InvalidRequest:
    return InvalidRequest("the backup can't be used", violations=(Violation("file", fault),))
