"""The key file: what it says, every fault at once, and that no fault holds a key or its hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.key_file import KeyFileFault, digest, parse, read
from trimtab.messages import Workload
from trimtab.tenant import Tenant

KEY = "tt-" + "k" * 43
HASH = f"sha256:{digest(KEY)}"
OTHER = f"sha256:{digest('other')}"


def faults(text: str) -> list[str]:
    with pytest.raises(KeyFileFault) as e:
        parse(text)
    return e.value.faults


def test_a_tenant_is_found_by_the_hash_of_its_key_and_by_its_identity() -> None:
    file = parse(
        f"""
        tenants:
          acme:
            keys: ["{HASH}", "{OTHER}"]
            identities: [acme-batch]
            share: 0.5
            requests_per_s: 20
            tokens_per_s: 50000
            workload: batch
            deadline_s: {{realtime: 60, batch: 3600}}
          globex: {{identities: [globex], realtime: false}}
        """
    )
    deadlines = {Workload.REALTIME: 60.0, Workload.BATCH: 3600.0}
    acme = Tenant("acme", True, 0.5, 20.0, 50_000.0, Workload.BATCH, deadlines)
    assert file.by_key == {digest(KEY): acme, digest("other"): acme}
    assert file.by_identity == {"acme-batch": acme, "globex": file.tenants[1]}


def test_who_may_not_send_realtime_sends_batch_where_it_names_none() -> None:
    (tenant,) = parse(f'tenants: {{acme: {{keys: ["{HASH}"], realtime: false}}}}').tenants
    assert tenant == Tenant("acme", realtime=False, workload=Workload.BATCH)


def test_what_is_not_said_is_as_for_everybody() -> None:
    (tenant,) = parse(f"tenants:\n  acme:\n    keys: [{HASH}]\n").tenants
    assert tenant == Tenant("acme")


def test_every_fault_is_told_at_once_at_its_place() -> None:
    text = f"""
    tenant: {{}}
    tenants:
      acme:
        keyz: []
        keys: ["{HASH}", "{HASH}", sha256:12]
        realtime: perhaps
        share: 1.5
        requests_per_s: 0
        tokens_per_s: many
        workload: slow
        deadline_s: {{realtime: -1, batsh: 3}}
      globex: {{keys: ["{HASH.upper().replace("SHA", "sha")}"], identities: [x, 7], realtime: false, workload: realtime}}
      initech: {{keys: {HASH}, identities: [x], share: true, deadline_s: 5}}
      nobody: {{}}
      other: {{keys: ["{OTHER}"]}}
      "a b": [1]
      12: {{}}
    """
    assert faults(text) == [
        "tenant: is unknown; did you mean tenants?",
        "tenants: a name is text, so put 12 in quotes",
        "tenants.acme.keyz: is unknown; did you mean keys?",
        "tenants.acme.realtime: true or false, not 'perhaps'",
        "tenants.acme.workload: realtime or batch, not 'slow'",
        "tenants.acme.share: must be above 0 and at most 1, not 1.5",
        "tenants.acme.requests_per_s: must be above 0, not 0",
        "tenants.acme.tokens_per_s: a number above 0, not 'many'",
        "tenants.acme.deadline_s.batsh: is unknown; did you mean batch?",
        "tenants.acme.deadline_s.realtime: must be above 0 and at most 2592000, not -1",
        "tenants.acme.keys[2]: must be sha256: and 64 hexadecimal digits, as `trimtab keys new` prints it",
        "tenants.acme.keys[1]: is the same key as tenants.acme.keys[0]",
        "tenants.globex.workload: realtime is what this tenant may not send (realtime: false)",
        "tenants.globex.keys[0]: is the same key as tenants.acme.keys[0]",
        "tenants.globex.identities[1]: must be the name in a client's certificate, as text",
        "tenants.initech.share: a number above 0 and at most 1, not true",
        "tenants.initech.deadline_s: names and values, not 5",
        "tenants.initech.keys: a list, not 'sha256:95b3c…'".replace("95b3c", digest(KEY)[:5]),
        "tenants.initech.identities[0]: is the same identity as tenants.globex.identities[0]",
        "tenants.nobody: has neither keys nor identities, so nobody could be this tenant",
        "tenants.other: is what metrics call those without a label of their own; take another name",
        "tenants.a b: a name is up to 64 letters, digits, dots, dashes and underscores",
        "tenants.a b: names and values, not list",
        "tenants.a b: has neither keys nor identities, so nobody could be this tenant",
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"tenants: {{acme: {{keys: [{KEY}]}}}}",
        f"tenants: {{acme: {{keys: {KEY}}}}}",
        f"tenants: {{acme: {{{KEY}: {HASH}}}}}",
        f"tenants: {{{KEY}: {{}}}}",
        f"tenants: {{acme: {{keys: {{{KEY}: 1}}}}}}",
        f"tenants: {{acme: {{realtime: {KEY}, share: {HASH}, workload: {KEY}, deadline_s: {HASH}}}}}",
        f'tenants: {{acme: {{keys: ["{HASH}" "{KEY}"]}}}}',
        f"tenants: {{acme: {{keys: [*{KEY}]}}}}",
        f"tenants: {{acme: {{keys: [!{KEY} x]}}}}",
        f"{KEY}: 1\n{KEY}: 2",
        KEY,
    ],
)
def test_no_fault_shows_a_key_or_its_hash_wherever_somebody_has_put_it(text: str) -> None:
    said = "\n".join(faults(text))
    assert KEY[:16] not in said
    assert HASH[len("sha256:") :][:16] not in said


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "tenants: names nobody"),
        ("tenants:", "tenants: names nobody"),
        ("[]", "the file: names and values, not list"),
        ("tenants: {a: 1\n", "is not YAML"),
        ("tenants:\n  acme: {}\n  acme: {}\n", "line 3: acme comes twice"),
        ("tenants: {acme: {share: .nan, keys: []}}", "tenants.acme.share: must be above 0 and at most 1, not a number"),
        (f"tenants: {{acme: {{requests_per_s: 0x{'f' * 5000}}}}}", "requests_per_s: must be above 0, not a number"),
        ("[" * 100_000, "is not YAML"),
        (f"tenants: {' ' * (5 << 20)}", "is larger than 4 MiB"),
    ],
)
def test_what_is_no_key_file_is_refused_in_words(text: str, fault: str) -> None:
    assert fault in "\n".join(faults(text))


def test_a_file_that_cant_be_read_is_a_fault_as_well(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"tenants: \xe9")
    for name, fault in (("none", "can't be read"), ("latin", "is not UTF-8 at byte 9"), (".", "can't be read")):
        with pytest.raises(KeyFileFault, match=fault):
            read(tmp_path / name)


def test_a_key_file_shows_no_hash_of_itself() -> None:
    assert digest(KEY) not in repr(parse(f'tenants: {{acme: {{keys: ["{HASH}"]}}}}'))
