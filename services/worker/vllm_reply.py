"""What comes back for a request, in the words of vLLM's own gRPC service: token ids in chunks, then the whole.

A chunk counts its own tokens; the complete message holds all of them, whether chunks went before it or not. Text is the gateway's affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as pb

from trimtab import messages as m


@dataclass(slots=True)
class Reply:
    """One request's, as it grows."""

    sampling: m.Sampling
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[m.TokenLogprobs] = field(default_factory=list)

    def take(self, delta: m.Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def chunk(self, delta: m.Delta) -> pb.GenerateResponse:
        """How much of the prompt was cached is known at the end only."""
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=len(delta.token_ids),
                output_logprobs=_logprobs(delta.token_ids, delta.logprobs),
            )
        )

    def complete(self, finish: m.Finish) -> pb.GenerateResponse:
        response = self._whole(finish.reason.value, finish.usage.cached_prompt_tokens)
        if finish.stop:
            response.complete.matched_stop_str = finish.stop
        elif (
            finish.reason is m.FinishReason.STOP
            and self.token_ids
            and self.token_ids[-1] in self.sampling.stop_token_ids
        ):
            response.complete.matched_token_id = self.token_ids[-1]
        return response

    def aborted(self) -> pb.GenerateResponse:
        """As far as it had come."""
        return self._whole("abort", 0)

    def _whole(self, reason: str, cached: int) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=self.token_ids,
                finish_reason=reason,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=len(self.token_ids),
                cached_tokens=cached,
                output_logprobs=_logprobs(self.token_ids, self.logprobs),
            )
        )


def _logprobs(
    token_ids: tuple[int, ...] | list[int], found: tuple[m.TokenLogprobs, ...] | list[m.TokenLogprobs]
) -> pb.OutputLogProbs | None:
    """None where none were asked for; the best of each position only where some were."""
    if not found:
        return None
    top = [pb.TopLogProbs(values=[t.logprob for t in x.top], token_ids=[t.token_id for t in x.top]) for x in found]
    return pb.OutputLogProbs(
        token_logprobs=[x.logprob for x in found],
        token_ids=token_ids,
        top_logprobs=top if any(x.top for x in found) else (),
    )
