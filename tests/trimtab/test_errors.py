"""Errors keep their meaning across the wire, and say whose fault they were."""

import pytest

from trimtab import errors as e
from trimtab.kit import rpc


def concrete():
    return sorted(
        {kind for kind in e.BY_REASON.values() if kind.__init__ is e.TrimtabError.__init__}, key=lambda k: k.reason
    )


@pytest.mark.parametrize("kind", concrete())
def test_an_error_is_the_same_after_the_wire(kind):
    sent = kind("why", violations=(e.Violation("f", "bad"),), metadata={"k": "v"}, retry_after_ms=1500)
    got = rpc.decode_status(rpc.encode_status(sent))
    assert type(got) is kind
    assert (got.message, got.violations, got.metadata, got.retry_after_ms) == ("why", sent.violations, {"k": "v"}, 1500)


def test_reasons_are_upper_snake_and_codes_exist():
    import grpc

    for reason, kind in e.BY_REASON.items():
        assert reason.replace("_", "").isalnum() and reason == reason.upper()
        assert hasattr(grpc.StatusCode, kind.grpc_code)
        assert 400 <= kind.http_status < 600


def test_back_pressure_client_and_engine_faults_never_share_an_outcome():
    assert e.QueueFull.outcome is e.NoWorker.outcome is e.Draining.outcome is e.Outcome.BACK_PRESSURE
    assert e.InvalidRequest.outcome is e.ModelNotFound.outcome is e.Outcome.CLIENT_FAULT
    assert e.EngineDead.outcome is e.StreamCut.outcome is e.Internal.outcome is e.Outcome.ENGINE_FAULT


def test_unavailable_from_a_draining_worker_is_no_engine_fault():
    assert e.outcome_of("UNAVAILABLE", "DRAINING") is e.Outcome.BACK_PRESSURE
    assert e.outcome_of("UNAVAILABLE") is e.Outcome.ENGINE_FAULT
    assert e.outcome_of("OK") is e.Outcome.OK
    assert e.outcome_of("UNKNOWN") is e.Outcome.UNKNOWN


def test_a_status_from_elsewhere_keeps_its_code():
    from google.rpc import status_pb2

    got = rpc.decode_status(status_pb2.Status(code=8, message="too many"))
    assert (got.grpc_code, got.outcome, got.http_status) == ("RESOURCE_EXHAUSTED", e.Outcome.BACK_PRESSURE, 429)
