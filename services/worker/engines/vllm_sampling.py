"""A job's sampling as vLLM takes it, and vLLM's own check of it before any engine has the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.worker.engines import Job
from services.worker.engines.vllm_plugin import EXTRA_KEY
from trimtab.errors import InvalidRequest, Violation
from trimtab.messages import Sampling, Structure, StructureKind

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

KNOWN = 256
"""Structures that are remembered as good: a large schema takes a while, and vLLM looks at each once more as it takes the request."""


class Samplings:
    """`processor` is vLLM's input processor; `defaults` are the model's own (generation_config.json), by vLLM's names."""

    def __init__(self, processor: Any, defaults: Mapping[str, Any]) -> None:
        self._processor = processor
        self._defaults = dict(defaults)
        self._good: dict[Structure, None] = {}

    def params(self, job: Job) -> SamplingParams:
        """InvalidRequest for what vLLM's parameters can't be."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        s = job.sampling
        named = {
            name: getattr(s, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
                         "repetition_penalty", "logprobs")
            if getattr(s, name) is not None
        }  # fmt: skip
        for name, value in self._defaults.items():
            named.setdefault(name, value)
        try:
            return SamplingParams(
                **named,
                max_tokens=job.max_tokens,
                min_tokens=max(0, (s.min_tokens or 0) - job.delivered),
                stop_token_ids=list(s.stop_token_ids) or None,
                ignore_eos=bool(s.ignore_eos),
                logit_bias=dict(s.logit_bias) or None,
                structured_outputs=_structure(s, StructuredOutputsParams),
                extra_args={EXTRA_KEY: _told(job)},
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except ValueError as e:
            raise _refused(e) from e

    def check(self, job: Job) -> None:
        """InvalidRequest for what vLLM would refuse once it has the request: a schema that is none, a bias for a token that is none."""
        params, structure, processor = self.params(job), job.sampling.structure, self._processor
        known = structure is None or structure in self._good
        structured = None if known else processor.structured_outputs_config
        try:
            params.verify(processor.model_config, processor.speculative_config, structured, processor.tokenizer)
        except Exception as e:
            # It looks at nothing but the request, so whatever it stumbles over is the request's fault and not an engine's.
            raise _refused(e) from e
        if structure is not None and not known:
            if len(self._good) >= KNOWN:
                del self._good[next(iter(self._good))]
            self._good[structure] = None


def _refused(error: Exception) -> InvalidRequest:
    text = str(error) or type(error).__name__
    return InvalidRequest(text, violations=(Violation("sampling", text),))


def _told(job: Job) -> dict[str, Any]:
    """What the scheduler in the engine's process must know of a request."""
    return {
        "request_id": job.request_id,
        "workload": job.workload.value,
        "arrival_ms": job.arrival_ms,
        "tenant": job.tenant,
        "delta": job.delta,
        "isolated": job.isolated,
    }


def _structure(s: Sampling, params: Any) -> Any:
    if s.structure is None:
        return None
    match s.structure.kind:
        case StructureKind.JSON_SCHEMA:
            return params(json=s.structure.value)
        case StructureKind.JSON_OBJECT:
            return params(json_object=True)
        case StructureKind.REGEX:
            return params(regex=s.structure.value)
        case StructureKind.CHOICES:
            return params(choice=list(s.structure.choices))
        case StructureKind.GRAMMAR:
            return params(grammar=s.structure.value)
