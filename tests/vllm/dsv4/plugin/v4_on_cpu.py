"""Stand-ins with which vLLM 0.32 runs DeepSeek-V4 on a CPU: for tests alone, and no part of the product.

V4's attention kernels have CPU versions in vLLM; what prepares their metadata is Triton, which has no back end for CPUs. The functions here
compute the same in PyTorch and take the kernels' place by vLLM's own `register_kernels`, which calls them with the kernels' arguments by name
and without their grid. Three more changes: the CPU's window builder forgets keys that are read later (KeyError 'c1a'); V4's chunked prefill and
prefix cache, which vLLM keeps for CPUs with AMX, are switched on for every CPU, as the kernels themselves do without; and a model directory
without weights gets made-up ones, from a fixed seed.

vLLM loads this as a plug-in: this directory on PYTHONPATH, and `v4_on_cpu` in VLLM_PLUGINS.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

MODEL_TYPE = "deepseek_v4"
METADATA, BACKENDS = "vllm.v1.attention.ops.metadata.", "vllm.v1.attention.backends.mla."


def register() -> None:
    """vLLM's hook, called in each of its processes; safe to repeat."""
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "v4_on_cpu"):
        return
    CpuPlatform.v4_on_cpu = True
    overrides = CpuPlatform.register_triton_kernel_overrides.__func__
    settled = CpuPlatform.check_and_update_config.__func__

    def register_triton_kernel_overrides(cls: Any) -> None:
        overrides(cls)
        _install()

    def check_and_update_config(cls: Any, config: Any) -> Any:
        if getattr(getattr(config.model_config, "hf_config", None), "model_type", None) != MODEL_TYPE:
            return settled(cls, config)
        if not any(Path(config.model_config.model).glob("*.safetensors")):
            config.load_config.load_format = "dummy"
        asked = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            return settled(cls, config)
        finally:
            torch.cpu._is_amx_tile_supported = asked

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _install() -> None:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(
        {
            METADATA + "_token_request_mapping_kernel": token_request_mapping,
            METADATA + "_indexer_decode_metadata_kernel": indexer_decode_metadata,
            BACKENDS + "sparse_swa.ComputePrefillMetadataKernel.kernel": prefill_metadata,
            BACKENDS + "sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": window_indices,
            BACKENDS + "compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slot_mapping,
            BACKENDS + "indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk_metadata,
            BACKENDS + "indexer.PrepareUniformDecodeKernel.kernel": uniform_decode,
        }
    )
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, _: defaultdict(lambda: None)


# Parameters have the kernels' own names, by which they are called.


def token_request_mapping(
    query_start_loc: Any, output: Any, num_reqs: int, num_mapped: int, num_tokens: int, num_warps: int = 4
) -> None:
    """Of each token, which request it belongs to; 0 for those that only pad the batch."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc[1 : num_reqs + 1].contiguous(), tokens, right=True)
    request.clamp_(max=num_reqs - 1)
    request[num_mapped:] = 0
    output[:num_tokens] = request.to(output.dtype)


def prefill_metadata(
    prefill_gather_lens_ptr: Any,
    seq_lens_ptr: Any,
    query_start_loc_ptr: Any,
    replay_start_ptr: Any,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    BLOCK_SIZE: int,
) -> None:
    """How many tokens each prefill gathers: its own, and what its first one sees of the window before it."""
    first, end = num_decodes, num_decodes + num_prefills
    own = query_start_loc_ptr[first + 1 : end + 1] - query_start_loc_ptr[first:end]
    before = (seq_lens_ptr[first:end] - own - replay_start_ptr[first:end]).clamp(min=0, max=window_size - 1)
    prefill_gather_lens_ptr[:num_prefills] = (own + before).to(prefill_gather_lens_ptr.dtype)


def window_indices(
    swa_indices_ptr: Any,
    swa_indices_stride: Any,
    swa_lens_ptr: Any,
    window_size: Any,
    index_width: Any,
    left_visible_ptr: Any,
    right_visible_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    token_to_req_indices_ptr: Any,
    is_valid_token_ptr: Any,
    block_table_ptr: Any,
    block_table_stride: Any,
    block_size: Any,
    replay_start_ptr: Any,
    token_offset: Any,
    HAS_IMAGE: Any,
    TRITON_BLOCK_SIZE: Any,
) -> None:
    """Nothing: attention on a CPU finds the window by positions and never reads these rows."""


def compressed_slot_mapping(
    compressed_slot_mapping_ptr: Any,
    slot_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    block_table_ptr: Any,
    block_table_stride: Any,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """The slot of each group of COMPRESS_RATIO tokens, at the last of them; PAD_ID at the others."""
    requests = min(block_table_ptr.shape[0], seq_lens_ptr.shape[0], query_start_loc_ptr.shape[0] - 1)
    starts = query_start_loc_ptr[: requests + 1].long()
    lengths, count = starts[1:] - starts[:-1], int(starts[requests])
    request = torch.repeat_interleave(torch.arange(requests), lengths)
    position = seq_lens_ptr[:requests].long()[request] - lengths[request] + torch.arange(count) - starts[request]
    whole = ((position + 1) % COMPRESS_RATIO == 0) & (slot_mapping_ptr[:count] != PAD_ID)
    group = position // COMPRESS_RATIO
    column = (group // block_size).clamp(max=block_table_ptr.shape[1] - 1)
    slot = block_table_ptr[request, column].long() * block_size + group % block_size
    slot = torch.where(whole, slot, torch.full_like(slot, PAD_ID))
    compressed_slot_mapping_ptr[:count] = slot.to(compressed_slot_mapping_ptr.dtype)


def prefill_chunk_metadata(
    query_start_loc_ptr: Any,
    uncompressed_seq_lens_ptr: Any,
    cu_compressed_seq_lens_ptr: Any,
    row_start_cu_compressed_seq_lens_ptr: Any,
    token_to_seq_ptr: Any,
    cu_compressed_seq_len_ks_ptr: Any,
    cu_compressed_seq_len_ke_ptr: Any,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    COMPRESS_RATIO: int,
) -> None:
    """For each token of the slice, from where to where it sees compressed ones; and of each compressed one, its request."""
    requests = min(
        query_start_loc_ptr.shape[0] - 1, uncompressed_seq_lens_ptr.shape[0], cu_compressed_seq_lens_ptr.shape[0] - 1
    )
    for r in range(requests):
        begin, end = int(query_start_loc_ptr[r]), int(query_start_loc_ptr[r + 1])
        before = int(uncompressed_seq_lens_ptr[r]) - (end - begin)
        row = int(row_start_cu_compressed_seq_lens_ptr[r])
        offset = torch.arange(end - begin)
        place = offset + begin
        inside = (place >= query_slice_start) & (place < query_slice_stop)
        to = (place - query_slice_start)[inside]
        seen = ((before + 1 + offset) // COMPRESS_RATIO)[inside]
        cu_compressed_seq_len_ks_ptr[to] = row
        cu_compressed_seq_len_ke_ptr[to] = (row + seen).to(cu_compressed_seq_len_ke_ptr.dtype)
        token_to_seq_ptr[int(cu_compressed_seq_lens_ptr[r]) : int(cu_compressed_seq_lens_ptr[r + 1])] = r


def uniform_decode(
    seq_lens_ptr: Any,
    decode_seq_lens_ptr: Any,
    block_table_ptr: Any,
    block_table_stride: Any,
    expanded_block_table_ptr: Any,
    expanded_bt_stride: Any,
    decode_lens_ptr: Any,
    max_decode_len: int,
    BLOCK_SIZE: int,
) -> None:
    """Requests that each decode as many tokens become as many requests of one token."""
    count = seq_lens_ptr.shape[0] * max_decode_len
    index = torch.arange(count)
    request = index // max_decode_len
    lengths = seq_lens_ptr[request] - max_decode_len + index % max_decode_len + 1
    decode_seq_lens_ptr[:count] = lengths.clamp(min=0).to(decode_seq_lens_ptr.dtype)
    width = min(expanded_block_table_ptr.shape[1], block_table_ptr.shape[1])
    expanded_block_table_ptr[:count, :width] = block_table_ptr[request, :width]
    decode_lens_ptr[:count] = 1


def indexer_decode_metadata(
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    output_seq_lens: Any,
    output_block_table: Any,
    decode_lens: Any,
    indices: Any,
    per_req_lens: Any,
    num_reqs: int,
    num_tokens: int,
    capacity: int,
    input_stride: int,
    output_stride: int,
    BLOCK_COLS: int,
) -> None:
    """The same where requests decode different numbers of tokens, and which request each of them is of; tokens that pad are of length 0."""
    starts = query_start_loc[: num_reqs + 1].long()
    lengths = starts[1:] - starts[:-1]
    request = torch.repeat_interleave(torch.arange(num_reqs), lengths)[:num_tokens]
    real = request.shape[0]
    offset = torch.arange(real) - starts[request]
    output_seq_lens[:capacity] = 0
    output_seq_lens[:real] = (seq_lens[request] - lengths[request] + offset + 1).to(output_seq_lens.dtype)
    width = min(BLOCK_COLS, output_block_table.shape[1], block_table.shape[1])
    output_block_table[:num_tokens, :width] = 0
    output_block_table[:real, :width] = block_table[request, :width]
    decode_lens[:num_tokens] = 1
    indices[:real] = request.to(indices.dtype)
    indices[real:num_tokens] = num_reqs + torch.arange(num_tokens - real, dtype=indices.dtype)
    per_req_lens[:num_reqs] = lengths.to(per_req_lens.dtype)
