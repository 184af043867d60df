"""Older and newer builds talk to each other. The older one is `protos/baseline.binpb`: the protos as they were at the last release."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings

from tests.trimtab import test_codec
from trimtab import codec
from trimtab import policy as p
from trimtab.errors import PolicyRefused
from trimtab.snapshot import Document, Node, resolve
from trimtab.v1 import control_pb2, inference_pb2, policy_pb2

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "protos" / "baseline.binpb"
ANCESTORS_SCHEMA = 4


class Build:
    """Message classes of another build, made from its descriptors, in a pool of their own."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        self._pool = pool

    def __getattr__(self, name: str):
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"trimtab.v1.{name}"))


def the_files() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes())


@pytest.fixture(scope="module")
def baseline() -> Build:
    return Build(the_files())


@pytest.fixture(scope="module")
def ancestor() -> Build:
    """A build from before some things existed: no log probabilities, no pins, and of the policy no more than its first four fields."""
    files = the_files()
    gone = {("Delta", "logprobs"), ("PolicyDocument", "pins"), ("Hello", "policy_schema")}
    for f in p.FIELDS.values():
        part, name = f.path.split(".")
        message = policy_pb2.Policy.DESCRIPTOR.fields_by_name[part].message_type
        if f.schema > ANCESTORS_SCHEMA:
            gone.add((message.name, name))
        if all(other.schema > ANCESTORS_SCHEMA for path, other in p.FIELDS.items() if path.startswith(f"{part}.")):
            gone.add(("Policy", part))
    for file in files.file:
        for kind in file.message_type:
            for dropped in [f for f in kind.field if (kind.name, f.name) in gone]:
                kind.field.remove(dropped)
                if dropped.proto3_optional:
                    del kind.oneof_decl[dropped.oneof_index]
                    for f in kind.field:
                        if f.HasField("oneof_index") and f.oneof_index > dropped.oneof_index:
                            f.oneof_index -= 1
    return Build(files)


@pytest.mark.slow
@given(request=test_codec.requests)
@settings(max_examples=25)
def test_a_baseline_peer_reads_and_returns_our_requests(request):
    other = Build(the_files()).GenerateRequest
    ours = codec.encode_request(request).SerializeToString()
    back = inference_pb2.GenerateRequest.FromString(other.FromString(ours).SerializeToString())
    assert codec.decode_request(back) == request


@given(document=test_codec.documents)
@settings(max_examples=25)
def test_an_older_control_plane_passes_newer_documents_on_unchanged(document):
    """The document travels as bytes, so whoever passes it on can't lose what it does not know."""
    snapshot = codec.seal(document, epoch=1, revision=1)
    other = Build(the_files()).PolicySnapshot
    passed = other.FromString(codec.encode_snapshot(snapshot).SerializeToString()).SerializeToString()
    assert codec.decode_snapshot(policy_pb2.PolicySnapshot.FromString(passed)) == snapshot


def test_an_ancestor_reads_what_it_knows_of_newer_messages(ancestor):
    delta = inference_pb2.Delta(first_index=3, token_ids=[1, 2], text="ab")
    delta.logprobs.add(logprob=-1.0)
    old = ancestor.Delta.FromString(delta.SerializeToString())
    assert (old.first_index, list(old.token_ids), old.text) == (3, [1, 2], "ab")
    assert inference_pb2.Delta.FromString(old.SerializeToString()) == delta


def test_we_read_an_ancestors_messages_with_what_it_lacks_at_its_default(ancestor):
    hello = control_pb2.Hello.FromString(ancestor.Hello(node_id="w0", pool="chat").SerializeToString())
    node = codec.decode_node(hello)
    assert (node.node_id, node.policy_schema) == ("w0", 0)


def a_value_away_from_the_default(f: p.Field) -> p.Value:
    """Any such value; one that resolves by itself."""
    match f.kind:
        case p.Kind.CHOICE:
            return next(word for word in f.choices if word != f.default)
        case p.Kind.NAMES:
            return ("acme",)
        case p.Kind.FRACTION:
            return next(x for x in (f.minimum, f.maximum) if x != f.default)
        case p.Kind.WHOLE:
            assert isinstance(f.default, int)
            return f.default - 1 if f.default > f.minimum else f.default + 1


@pytest.mark.parametrize("f", p.FIELDS.values(), ids=lambda f: f.path)
def test_a_node_of_an_older_schema_refuses_what_it_can_not_obey_and_takes_what_it_can(f):
    beyond = Document(base={f.path: a_value_away_from_the_default(f)})
    beyond = dataclasses.replace(beyond, needs_schema=beyond.own_schema())
    resolve(beyond, Node("w0", policy_schema=f.schema), now_unix_ms=0)
    older = Node("w0", policy_schema=f.schema - 1)
    with pytest.raises(PolicyRefused, match="upgrade the node") as e:
        resolve(beyond, older, now_unix_ms=0)
    assert e.value.cause == "SCHEMA_TOO_OLD"
    plain = Document(base={f.path: f.default})
    assert plain.own_schema() == 0
    resolve(plain, older, now_unix_ms=0)


def test_an_ancestor_sees_by_the_schema_that_it_must_not_obey_a_document_whose_fields_it_can_not_see(ancestor):
    document = Document({"batch.active": 4, "preemption.mode": "none", "isolate.tenants": ("acme",)})
    document = dataclasses.replace(document, needs_schema=document.own_schema())
    seen = ancestor.PolicyDocument.FromString(codec.encode_document(document))
    assert [(f.name, str(v).strip()) for f, v in seen.base.ListFields()] == [("batch", "active: 4")]
    assert seen.min_policy_schema == p.FIELDS["preemption.mode"].schema > ANCESTORS_SCHEMA
    old_fields = Document({"batch.active": 4, "admission.batch_queue": 9})
    assert old_fields.own_schema() == ANCESTORS_SCHEMA


def test_an_ancestors_document_leaves_every_newer_field_at_its_default(ancestor):
    theirs = ancestor.PolicyDocument(min_policy_schema=1)
    theirs.base.batch.active = 4
    resolved = resolve(codec.decode_document(theirs.SerializeToString()), Node("w0"), now_unix_ms=0)
    assert resolved.policy == p.with_fields(p.Policy(), {"batch.active": 4})


def test_nothing_on_the_wire_breaks_the_baseline():
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not installed (extra dev)")
    done = subprocess.run([buf, "breaking", "--against", str(BASELINE)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, textwrap.indent(done.stdout + done.stderr, "  ")
