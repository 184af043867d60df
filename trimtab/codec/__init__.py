"""Protobuf ⇄ values: the one translator at the door. Everything behind it handles parsed, plain values.

Decoding an unknown enum number gives the documented fallback, so that a newer peer never breaks an older one; a malformed message
raises InvalidRequest or PolicyRefused. `encode_x(decode_x(m)) == m` for every message that this build writes.
"""

from trimtab.codec.event import (
    decode_accepted,
    decode_delta,
    decode_event,
    decode_finish,
    decode_notice,
    encode_accepted,
    encode_delta,
    encode_event,
    encode_finish,
    encode_notice,
)
from trimtab.codec.node import (
    decode_hello,
    decode_limits,
    decode_load,
    decode_node,
    decode_report,
    decode_state,
    encode_hello,
    encode_limits,
    encode_load,
    encode_report,
    encode_state,
)
from trimtab.codec.policy import (
    decode_document,
    decode_identity,
    decode_partial,
    decode_scope,
    decode_snapshot,
    encode_document,
    encode_identity,
    encode_partial,
    encode_scope,
    encode_snapshot,
    seal,
)
from trimtab.codec.request import (
    decode_request,
    decode_sampling,
    encode_request,
    encode_sampling,
)

__all__ = [
    "decode_accepted",
    "decode_delta",
    "decode_document",
    "decode_event",
    "decode_finish",
    "decode_hello",
    "decode_identity",
    "decode_limits",
    "decode_load",
    "decode_node",
    "decode_notice",
    "decode_partial",
    "decode_report",
    "decode_request",
    "decode_sampling",
    "decode_scope",
    "decode_snapshot",
    "decode_state",
    "encode_accepted",
    "encode_delta",
    "encode_document",
    "encode_event",
    "encode_finish",
    "encode_hello",
    "encode_identity",
    "encode_limits",
    "encode_load",
    "encode_notice",
    "encode_partial",
    "encode_report",
    "encode_request",
    "encode_sampling",
    "encode_scope",
    "encode_snapshot",
    "encode_state",
    "seal",
]
