"""A request of vLLM's own gRPC service (`vllm.grpc.engine`) as one of ours.

What is not set there gets the value that vLLM's own servicer gives it, and not the model's default: gateways of that protocol know the model's
defaults from GetModelInfo, and send them. Every field that a request sets is either obeyed or refused by its name: an answer to another
question than the one that was asked is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from trimtab import messages as m
from trimtab import validation
from trimtab.errors import InvalidRequest, Violation

WORKLOAD_KEY = "trimtab-workload"
"""Metadata of a call that says its workload: the protocol has no field for priority."""

OBEYED = {
    "request": {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"},
    "tokenized": {"original_text", "input_ids"},
    "sampling_params": {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "min_tokens",
        "stop", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "n", "logprobs", "seed",
        "include_stop_str_in_output", "logit_bias", "grammar_from_first_token",
        "json_schema", "regex", "grammar", "json_object", "choice",
    },
}  # fmt: skip
"""Also what cannot change token ids (`original_text`, spaces between special tokens), and where grammars start here in any case."""

REFUSED = {
    "mm_inputs": "this worker takes text only",
    "extra_mm_inputs": "this worker takes text only",
    "media_refs": "this worker takes text only",
    "kv_transfer_params": "this worker does prefill and decode itself",
    "kv_transfer_params_json": "this worker does prefill and decode itself",
    "prompt_logprobs": "log probabilities are given of the output only",
    "truncate_prompt_tokens": "prompts are never cut; send what fits the window",
    "structural_tag": "use json_schema, regex, grammar or choice",
}
"""Why; any other field that is not obeyed is one that this build does not know."""

RENAMED = {
    "sampling.choices": "sampling_params.choice",
    "sampling.include_stop": "sampling_params.include_stop_str_in_output",
}


def decode(pb: Any, workload: str = "") -> m.Request:
    """Ours of a GenerateRequest; `workload` is what WORKLOAD_KEY said. InvalidRequest names every field that can't be taken."""
    found = [*_strangers(pb, "request", ""), *_strangers(pb.sampling_params, "sampling_params", "sampling_params.")]
    found += _strangers(pb.tokenized, "tokenized", "tokenized.")
    found += _out_of_reach(pb)
    if workload and workload not in {w.value for w in m.Workload}:
        found.append(Violation(WORKLOAD_KEY, f"must be {' or '.join(w.value for w in m.Workload)}, not {workload!r}"))
    validation.raise_if(found)
    return m.Request(
        request_id=pb.request_id,
        model="",
        prompt=_prompt(pb),
        sampling=_sampling(pb.sampling_params),
        workload=m.Workload(workload) if workload else None,
    )


def in_their_words(error: InvalidRequest, input_field: str) -> InvalidRequest:
    """The same refusal by the names that the caller's protocol has; `input_field` is the one that held the prompt."""
    if not error.violations:
        return error
    named = tuple(replace(v, field=_their_name(v.field, input_field)) for v in error.violations)
    return InvalidRequest("; ".join(f"{v.field} {v.description}" for v in named), violations=named)


def _their_name(field: str, input_field: str) -> str:
    if field == "prompt":
        return input_field
    part, dot, rest = field.partition(".")
    return RENAMED.get(field, f"sampling_params{dot}{rest}" if part == "sampling" else field)


def _strangers(pb: Any, part: str, prefix: str) -> Iterator[Violation]:
    """Fields that are set, and that nothing here obeys."""
    for descriptor, _ in pb.ListFields():
        if descriptor.name not in OBEYED[part]:
            why = REFUSED.get(descriptor.name, "this build does not know it")
            yield Violation(prefix + descriptor.name, f"is not served here: {why}")
    unknown = UnknownFieldSet(pb)
    for i in range(len(unknown)):
        yield Violation(f"{prefix}{unknown[i].field_number}", "is a field that this build does not know; leave it out")


def _out_of_reach(pb: Any) -> Iterator[Violation]:
    """Fields that are obeyed for some values only."""
    s = pb.sampling_params
    if pb.data_parallel_rank:
        yield Violation("data_parallel_rank", f"must be 0, not {pb.data_parallel_rank}: this worker has one rank")
    if s.n > 1:
        yield Violation("sampling_params.n", f"must be 1, not {s.n}: send as many requests instead")
    if s.logprobs < 0:
        yield Violation("sampling_params.logprobs", f"must be at least 0, not {s.logprobs}")
    if any(token < 0 for token in s.logit_bias):
        yield Violation("sampling_params.logit_bias", f"names token id {min(s.logit_bias)}")


def _prompt(pb: Any) -> m.Prompt:
    match pb.WhichOneof("input"):
        case "text":
            return str(pb.text)
        case "tokenized":
            validation.check_prompt_length(len(pb.tokenized.input_ids))
            return tuple(pb.tokenized.input_ids)
        case _:
            raise InvalidRequest(
                "the request has no prompt: set tokenized or text", violations=(Violation("tokenized", "is missing"),)
            )


def _sampling(s: Any) -> m.Sampling:
    bias: Mapping[int, float] = dict(s.logit_bias)
    return m.Sampling(
        max_tokens=s.max_tokens if s.HasField("max_tokens") else None,
        min_tokens=s.min_tokens,
        temperature=s.temperature if s.HasField("temperature") else 1.0,
        top_p=s.top_p or 1.0,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=s.seed if s.HasField("seed") else None,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty or 1.0,
        stop=tuple(s.stop),
        stop_token_ids=tuple(s.stop_token_ids),
        include_stop=s.include_stop_str_in_output,
        ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
        structure=_structure(s),
        logit_bias=bias,
    )


def _structure(s: Any) -> m.Structure | None:
    match s.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return m.Structure(m.StructureKind.JSON_OBJECT) if s.json_object else None
        case "choice":
            return m.Structure(m.StructureKind.CHOICES, choices=tuple(s.choice.choices))
        case other:
            return m.Structure(m.StructureKind(other), value=getattr(s, other))
