"""V4's metadata kernels as vLLM ships them, run by Triton's interpreter, and the stand-ins, on the same made-up batches; differences are told.

TRITON_INTERPRET=1 PYTHONPATH=tests/vllm/dsv4/plugin python -m tests.vllm.dsv4.interpreted
"""

# ruff: noqa: E402 -- vLLM's kernels must find the real Triton as they are imported

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
import vllm.triton_utils

# vLLM puts placeholders in their place on a machine without a driver.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl

import v4_on_cpu
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from vllm.v1.attention.backends.mla.compressor_utils import CompressedSlotMappingKernel
from vllm.v1.attention.backends.mla.indexer import BuildPrefillChunkMetadataKernel, PrepareUniformDecodeKernel
from vllm.v1.attention.backends.mla.sparse_swa import ComputePrefillMetadataKernel
from vllm.v1.attention.ops import metadata

_load = InterpreterBuilder.create_masked_load


def _masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
    """The interpreter takes no mask that came of a scalar and a row; the compiler does."""
    return _load(self, ptrs, TensorHandle(mask.data.astype(bool), tl.int1), *others)


InterpreterBuilder.create_masked_load = _masked_load

CASES = 8
PAD = -1


def numbers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


class Batch:
    """Requests of which each computes some tokens after those that it has."""

    def __init__(self, chance: random.Random) -> None:
        self.own = [chance.choice((1, 1, 2, 7, 64, 200)) for _ in range(chance.randint(1, 5))]
        had = [chance.choice((0, 3, 127, 500, 5000)) for _ in self.own]
        self.seqs = numbers([a + b for a, b in zip(had, self.own, strict=True)])
        self.starts = numbers([sum(self.own[:i]) for i in range(len(self.own) + 1)])
        self.tokens, self.requests = sum(self.own), len(self.own)
        blocks = list(range(1, 1 + 90 * self.requests))
        chance.shuffle(blocks)
        self.table = numbers(blocks).reshape(self.requests, 90)


Case = tuple[str, Any, Callable[..., None], tuple[int, ...], dict[str, Any], tuple[str, ...]]
"""Its name, the kernel, the stand-in, the grid, the arguments by name, and which of them are written."""


def cases(b: Batch, chance: random.Random) -> Iterator[Case]:
    def own(kernel: Any) -> Any:
        return kernel.__dict__["kernel"].__func__

    padded = b.tokens + chance.choice((0, 3))
    yield (
        "token_request_mapping", metadata._token_request_mapping_kernel, v4_on_cpu.token_request_mapping, (-(-padded // 256),),
        {"query_start_loc": b.starts, "output": empty(padded), "num_reqs": b.requests, "num_mapped": b.tokens, "num_tokens": padded},
        ("output",),
    )  # fmt: skip
    decodes = chance.randint(0, b.requests - 1)
    yield (
        "prefill_metadata", own(ComputePrefillMetadataKernel), v4_on_cpu.prefill_metadata, (1,),
        {
            "prefill_gather_lens_ptr": empty(b.requests - decodes), "seq_lens_ptr": b.seqs, "query_start_loc_ptr": b.starts,
            "replay_start_ptr": torch.zeros_like(b.seqs), "num_prefills": b.requests - decodes, "num_decodes": decodes,
            "window_size": 128, "BLOCK_SIZE": 8,
        },
        ("prefill_gather_lens_ptr",),
    )  # fmt: skip
    slots = numbers([PAD if chance.random() < 0.1 else n for n in range(b.tokens)])
    for ratio in (4, 128):
        yield (
            f"compressed_slot_mapping, {ratio}", own(CompressedSlotMappingKernel), v4_on_cpu.compressed_slot_mapping, (b.requests,),
            {
                "compressed_slot_mapping_ptr": empty(b.tokens).long(), "slot_mapping_ptr": slots.long(),
                "query_start_loc_ptr": b.starts, "seq_lens_ptr": b.seqs, "block_table_ptr": b.table, "block_table_stride": b.table.stride(0),
                "block_size": 256 // ratio, "dcp_world_size": 1, "cp_interleave": 1, "COMPRESS_RATIO": ratio, "PAD_ID": PAD,
                "TRITON_BLOCK_SIZE": 1024,
            },
            ("compressed_slot_mapping_ptr",),
        )  # fmt: skip
    lengths = numbers([0, *torch.cumsum(b.seqs // 4, 0).tolist()])
    first = chance.choice((0, b.tokens // 3))
    yield (
        "prefill_chunk_metadata", own(BuildPrefillChunkMetadataKernel), v4_on_cpu.prefill_chunk_metadata, (b.requests,),
        {
            "query_start_loc_ptr": b.starts, "uncompressed_seq_lens_ptr": b.seqs, "cu_compressed_seq_lens_ptr": lengths,
            "row_start_cu_compressed_seq_lens_ptr": lengths, "token_to_seq_ptr": empty(int(lengths[-1])),
            "cu_compressed_seq_len_ks_ptr": empty(b.tokens - first), "cu_compressed_seq_len_ke_ptr": empty(b.tokens - first),
            "query_slice_start": first, "query_slice_stop": b.tokens, "DCP_RANK": 0, "DCP_WORLD": 1, "DCP_INTERLEAVE": 1,
            "BLOCK_SIZE": 1024, "COMPRESS_RATIO": 4,
        },
        ("token_to_seq_ptr", "cu_compressed_seq_len_ks_ptr", "cu_compressed_seq_len_ke_ptr"),
    )  # fmt: skip
    each = chance.choice((1, 2))
    yield (
        "uniform_decode", own(PrepareUniformDecodeKernel), v4_on_cpu.uniform_decode, (b.requests * each,),
        {
            "seq_lens_ptr": torch.cat((b.seqs[:-1], numbers([0]))), "decode_seq_lens_ptr": empty(b.requests * each),
            "block_table_ptr": b.table, "block_table_stride": b.table.stride(0), "expanded_block_table_ptr": empty(b.requests * each, 90),
            "expanded_bt_stride": 90, "decode_lens_ptr": empty(b.requests * each), "max_decode_len": each, "BLOCK_SIZE": 1024,
        },
        ("decode_seq_lens_ptr", "expanded_block_table_ptr", "decode_lens_ptr"),
    )  # fmt: skip
    capacity = padded + chance.choice((0, 5))
    yield (
        "indexer_decode_metadata", metadata._indexer_decode_metadata_kernel, v4_on_cpu.indexer_decode_metadata,
        (padded + -(-(capacity - padded) // 256),),
        {
            "query_start_loc": b.starts, "seq_lens": b.seqs, "block_table": b.table, "output_seq_lens": empty(capacity),
            "output_block_table": empty(padded, 90), "decode_lens": empty(padded), "indices": empty(padded),
            "per_req_lens": empty(b.requests), "num_reqs": b.requests, "num_tokens": padded, "capacity": capacity,
            "input_stride": b.table.stride(0), "output_stride": 90, "BLOCK_COLS": 90,
        },
        ("output_seq_lens", "output_block_table", "decode_lens", "indices", "per_req_lens"),
    )  # fmt: skip


def main() -> int:
    """The number of differences."""
    chance, wrong, compared = random.Random(1), 0, 0
    for _ in range(CASES):
        batch = Batch(chance)
        for name, kernel, stand_in, grid, given, written in cases(batch, chance):
            ours = given | {key: given[key].clone() for key in written}
            kernel[grid](**given)
            stand_in(**ours)
            for key in written:
                compared += 1
                if not torch.equal(given[key], ours[key]):
                    wrong += 1
                    print(f"{name}: {key} differs for {batch.own} tokens of {batch.seqs.tolist()}")
                    print(
                        f"  kernel {given[key].flatten()[:40].tolist()}\n  ours   {ours[key].flatten()[:40].tolist()}"
                    )
    print(f"{compared} outputs compared, {wrong} differ")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main()))
