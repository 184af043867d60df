"""Values survive the wire; unknown things from newer peers do no harm."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import codec
from trimtab import messages as m
from trimtab import policy as p
from trimtab import snapshot as s
from trimtab.errors import InvalidRequest, PolicyRefused
from trimtab.kv_shape import KvGroup
from trimtab.v1 import control_pb2, inference_pb2, policy_pb2

text = st.text(max_size=20)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
identities = st.builds(s.Identity, u64, u64, st.binary(min_size=32, max_size=32))
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=","), min_size=1)


def value_of(f):
    """Any value that the field takes."""
    return {
        p.Kind.WHOLE: st.integers(f.minimum, f.maximum),
        p.Kind.FRACTION: st.floats(f.minimum, f.maximum) if f.numeric else st.nothing(),
        p.Kind.CHOICE: st.sampled_from(f.choices or ("",)),
        p.Kind.NAMES: st.lists(names, max_size=3, unique=True).map(tuple),
    }[f.kind]


partials = st.fixed_dictionaries({}, optional={path: value_of(f) for path, f in p.FIELDS.items()})
scopes = st.one_of(
    st.just(s.Scope()),
    *(st.builds(s.Scope, st.just(k), st.tuples(text)) for k in (s.ScopeKind.POOL, s.ScopeKind.LABEL, s.ScopeKind.NODE)),
    st.builds(s.Scope, st.just(s.ScopeKind.ROLLOUT), st.lists(text, max_size=3).map(tuple)),
)
i64 = st.integers(-(2**63), 2**63 - 1)
adjustments = st.one_of(
    st.builds(
        s.Adjustment, text, text, scopes, text, i64,
        factor=st.floats(0.1, 1.0), delta=st.just(0), evidence=text,
    ),
    st.builds(s.Adjustment, text, text, scopes, text, i64, factor=st.none(), delta=i64, evidence=text),
)  # fmt: skip
documents = st.builds(
    s.Document,
    base=partials,
    overlays=st.lists(st.builds(s.Overlay, text, scopes, partials, st.sampled_from(s.Owner)), max_size=3).map(tuple),
    adjustments=st.lists(adjustments, max_size=3).map(tuple),
    pins=st.lists(st.builds(s.Pin, text, text, text), max_size=3).map(tuple),
    written_unix_ms=i64,
    needs_schema=u32,
)
structures = st.one_of(
    st.none(),
    st.just(m.Structure(m.StructureKind.JSON_OBJECT)),
    st.builds(m.Structure, st.just(m.StructureKind.CHOICES), choices=st.lists(text, max_size=3).map(tuple)),
    *(st.builds(m.Structure, st.just(k), value=text) for k in (
        m.StructureKind.JSON_SCHEMA, m.StructureKind.REGEX, m.StructureKind.GRAMMAR)),
)  # fmt: skip
samplings = st.builds(
    m.Sampling,
    **{k: st.none() | u32 for k in ("max_tokens", "min_tokens", "top_k", "logprobs")},
    **{k: st.none() | f32 for k in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                    "repetition_penalty")},
    **{k: st.none() | st.booleans() for k in ("include_stop", "ignore_eos", "skip_special_tokens")},
    seed=st.none() | u64,
    stop=st.lists(text, max_size=3).map(tuple),
    stop_token_ids=st.lists(u32, max_size=3).map(tuple),
    structure=structures,
    logit_bias=st.dictionaries(u32, f32, max_size=3),
)  # fmt: skip
prompts = st.one_of(
    text,
    st.lists(u32, max_size=5).map(tuple),
    st.lists(st.builds(m.ChatMessage, text, text, text), min_size=1, max_size=3).map(tuple),
)
requests = st.builds(
    m.Request,
    request_id=text,
    model=text,
    prompt=prompts,
    sampling=samplings,
    workload=st.none() | st.sampled_from(m.Workload),
    tenant=text,
    session_id=text,
    slo=st.builds(m.SloTargets, u32, u32),
    resume=st.none() | st.builds(m.Resume, st.lists(u32, max_size=4).map(tuple), u64, u32, st.binary(max_size=32)),
)
matches = st.builds(
    m.RequestMatch,
    request_ids=st.frozensets(text, max_size=3),
    workload=st.none() | st.sampled_from(m.Workload),
    tenant=text,
    min_prompt_tokens=u32,
)
some = st.integers(1, 1 << 30)
kv_groups = st.lists(st.builds(KvGroup, some, u32, u32, u32, some), max_size=6).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(
    m.TokenLogprobs, f32, st.binary(max_size=4),
    st.lists(st.builds(m.TopLogprob, u32, f32, st.binary(max_size=4)), max_size=2).map(tuple),
)  # fmt: skip
events = st.one_of(
    st.builds(m.Accepted, text, text, identities, u32, u32, st.binary(max_size=32), st.booleans(), text),
    st.builds(m.Delta, u32, st.lists(u32, max_size=4).map(tuple), text, st.lists(logprobs, max_size=2).map(tuple)),
    st.builds(m.Notice, st.sampled_from(m.NoticeKind), text),
    st.builds(
        m.Finish,
        st.sampled_from(m.FinishReason),
        st.builds(m.Usage, u32, u32, u32),
        st.builds(m.Timings, finite, finite, finite, finite, u32),
        text,
    ),
)


@pytest.mark.slow
@given(documents)
@settings(max_examples=60)
def test_documents_survive(document):
    assert codec.decode_document(codec.encode_document(document)) == document


@pytest.mark.slow
@given(documents)
@settings(max_examples=20)
def test_equal_documents_give_equal_bytes_and_digests(document):
    first, second = (codec.seal(document, epoch=1, revision=2) for _ in range(2))
    assert first == second
    assert first.identity.sha256 == hashlib.sha256(first.document).digest()
    assert codec.decode_snapshot(codec.encode_snapshot(first)) == first


@given(requests)
@settings(max_examples=60)
def test_requests_survive(request):
    wire = codec.encode_request(request).SerializeToString()
    assert codec.decode_request(inference_pb2.GenerateRequest.FromString(wire)) == request


@given(matches)
@settings(max_examples=60)
def test_matches_survive(match):
    wire = codec.encode_match(match).SerializeToString()
    assert codec.decode_match(control_pb2.RequestMatch.FromString(wire)) == match


@pytest.mark.parametrize("newer", [b"\x10\x4d", b"\xfa\x01\x02hi"], ids=["a workload", "a condition"])
def test_a_match_of_a_newer_build_is_refused_instead_of_widened(newer):
    wire = codec.encode_match(m.RequestMatch(tenant="t")).SerializeToString()
    with pytest.raises(InvalidRequest, match="does not know"):
        codec.decode_match(control_pb2.RequestMatch.FromString(wire + newer))


@given(events)
@settings(max_examples=60)
def test_events_survive(event):
    wire = codec.encode_event(event).SerializeToString()
    assert codec.decode_event(inference_pb2.GenerateResponse.FromString(wire)) == event


@given(
    st.builds(m.Load, u32, u32, u64, u32, u32),
    st.builds(s.Limits, u32, u32, u32, u32, u32, text, kv_groups=kv_groups, carries_blocks=st.booleans()),
    identities,
)
@settings(max_examples=30)
def test_node_facts_survive(load, limits, identity):
    assert codec.decode_load(codec.encode_load(load)) == load
    assert codec.decode_limits(codec.encode_limits(limits)) == limits
    assert codec.decode_identity(codec.encode_identity(identity)) == identity


@pytest.mark.parametrize("state", m.NodeState)
def test_states_survive(state):
    assert codec.decode_state(codec.encode_state(state)) is state


def test_an_unknown_state_is_not_sent_work():
    assert codec.decode_state(99) is m.NodeState.STARTING


def test_bytes_that_do_not_match_their_digest_are_refused():
    pb = codec.encode_snapshot(codec.seal(s.Document(base={"batch.active": 3}), epoch=1, revision=1))
    pb.document += b"\0"
    with pytest.raises(PolicyRefused) as e:
        codec.decode_snapshot(pb)
    assert e.value.cause == "DIGEST_MISMATCH"


@pytest.mark.parametrize("path", sorted(p.FIELDS))
@given(data=st.data())
@settings(max_examples=10)
def test_a_field_survives_with_its_type_and_alone(data, path):
    value = data.draw(value_of(p.FIELDS[path]))
    wire = codec.encode_partial({path: value}).SerializeToString()
    back = codec.decode_partial(policy_pb2.Policy.FromString(wire))
    assert back == {path: value}
    assert type(back[path]) is type(value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("priority.batch_delta", -2),
        ("memory.pressure_threshold", 0.1),
        ("isolate.tenants", ()),
        ("isolate.tenants", ("ünï", "b")),
        ("prefill.itl_budget_ms", 0),
    ],
)
def test_values_at_the_edge_of_their_wire_type_are_set_and_exact(path, value):
    wire = codec.encode_partial({path: value}).SerializeToString()
    assert codec.decode_partial(policy_pb2.Policy.FromString(wire)) == {path: value}


@pytest.mark.parametrize("f", [f for f in p.FIELDS.values() if f.choices], ids=lambda f: f.path)
def test_the_words_on_the_wire_are_the_fields_own(f):
    numbers = set()
    for word in f.choices:
        part, name = f.path.split(".")
        numbers.add(getattr(getattr(codec.encode_partial({f.path: word}), part), name))
    assert numbers == set(range(1, len(f.choices) + 1))


@pytest.mark.parametrize("number", [0, 77])
def test_a_word_of_a_newer_build_refuses_the_document_instead_of_meaning_another(number):
    pb = policy_pb2.PolicyDocument()
    pb.base.preemption.mode = number
    with pytest.raises(PolicyRefused, match=rf"preemption\.mode .*number {number}") as e:
        codec.decode_document(pb.SerializeToString())
    assert (e.value.cause, e.value.field) == ("UNKNOWN_WORD", "preemption.mode")


def test_garbage_is_no_document():
    with pytest.raises(PolicyRefused) as e:
        codec.decode_document(b"\xff\xff\xff")
    assert e.value.cause == "MALFORMED"


def test_a_request_without_prompt_says_what_to_set():
    with pytest.raises(InvalidRequest, match="text, chat or token_ids"):
        codec.decode_request(inference_pb2.GenerateRequest())


def test_an_event_of_a_newer_build_is_passed_over():
    newer = inference_pb2.GenerateResponse.FromString(b"\xfa\x01\x02hi")
    assert codec.decode_event(newer) is None
    assert codec.decode_notice(inference_pb2.Notice(kind=77)) is None  # type: ignore[arg-type]


def test_a_scope_of_a_newer_build_refuses_the_document_instead_of_widening_it():
    pb = policy_pb2.PolicyDocument(overlays=[policy_pb2.Overlay(name="x", policy=policy_pb2.Policy())])
    with pytest.raises(PolicyRefused) as e:
        codec.decode_document(pb.SerializeToString())
    assert e.value.cause == "UNKNOWN_SCOPE"


def test_hello_gives_the_node_that_policy_is_resolved_for():
    hello = control_pb2.Hello(node_id="w0", labels={"a": "b"}, policy_schema=3)
    hello.limits.max_num_seqs = 8
    assert codec.decode_node(hello) == s.Node("w0", "default", {"a": "b"}, s.Limits(max_num_seqs=8), 3)
