"""What a worker tells a gateway of vLLM's own protocol of its model, its engine and its load.

Only what the engine itself says, or the model's files; what is not measured here (tokens a second, the cache's hit rate) stays 0, which that
protocol reads as unknown.
"""

from __future__ import annotations

import datetime

from smg_grpc_proto import vllm_engine_pb2 as pb

from services.worker.engines import Engine
from services.worker.model_files import ModelFiles
from trimtab.messages import Load
from trimtab.policy import Policy
from trimtab.snapshot import Limits

SERVER_TYPE = "vllm-grpc"
MAX_INT32 = (1 << 31) - 1


def model_info(engine: Engine, files: ModelFiles) -> pb.GetModelInfoResponse:
    window = engine.limits.max_model_len
    return pb.GetModelInfoResponse(
        model_path=files.path or engine.model,
        is_generation=True,
        max_context_length=window,
        vocab_size=engine.tokenizer.vocab_size,
        supports_vision=False,
        served_model_name=engine.model,
        tokenizer_path=files.path,
        model_type=files.model_type,
        architectures=files.architectures,
        eos_token_ids=sorted(engine.eos_token_ids),
        pad_token_id=files.pad_token_id,
        bos_token_id=files.bos_token_id,
        # One token of the window is the output's at least.
        max_req_input_len=window - 1,
        default_sampling_params_json=files.sampling_defaults,
    )


def server_info(
    limits: Limits, *, active: int, draining: bool, last_receive: float, uptime_s: float
) -> pb.GetServerInfoResponse:
    """`last_receive` in seconds since the epoch, 0 for never."""
    return pb.GetServerInfoResponse(
        active_requests=active,
        is_paused=draining,
        last_receive_timestamp=last_receive,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        # Engines here run no reasoning parser, so nothing holds a grammar back; the simulated one has no grammar.
        constrained_decoding_start="" if limits.engine == "simulated" else "first_token",
    )


def loads(
    load: Load, limits: Limits, policy: Policy, *, now: datetime.datetime, rank: int | None
) -> pb.GetLoadsResponse:
    """This worker is rank 0 of one; asked for another rank, there is nothing to tell."""
    found = [_scheduler(load, limits, policy)] if rank in (None, 0) else []
    return pb.GetLoadsResponse(timestamp=now.isoformat(), version=limits.engine, dp_rank_count=len(found), loads=found)


def _scheduler(load: Load, limits: Limits, policy: Policy) -> pb.SchedulerLoad:
    used_blocks = load.total_blocks - load.free_blocks
    used = used_blocks / load.total_blocks if load.total_blocks else 0.0
    return pb.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=min(MAX_INT32, used_blocks * limits.block_size),
        max_total_num_tokens=min(MAX_INT32, load.total_blocks * limits.block_size),
        token_usage=used,
        utilization=used,
        max_running_requests=min(limits.max_num_seqs, policy.batch.active),
        num_waiting_uncached_tokens=load.queued_prefill_tokens,
    )
