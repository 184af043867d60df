"""A small model with a long window and random weights: what attention over a long context costs is the same whatever the weights say."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

WINDOW = 65_536
LAYERS, HEADS, KV_HEADS, HEAD = 2, 2, 1, 64
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
DONE = "config.json"


def make(like: Path, directory: Path) -> None:
    """Write it to `directory`, with the tokenizer of the model at `like`. What is there whole is left as it is."""
    if (directory / DONE).exists():
        return
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    of = AutoConfig.from_pretrained(like)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=of.vocab_size, hidden_size=HEADS * HEAD, intermediate_size=4 * HEADS * HEAD, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        bos_token_id=of.bos_token_id, eos_token_id=of.eos_token_id,
    )  # fmt: skip
    scratch = directory.with_suffix(".making")
    shutil.rmtree(scratch, ignore_errors=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copy(like / name, scratch / name)
    scratch.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the long model of `trimtab bench blocks`.")
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    make(args.like, args.out)


if __name__ == "__main__":
    main()
