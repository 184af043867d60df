"""GGUF to bf16 safetensors that vLLM loads, with tokenizer, chat template and end-of-turn token.

`services.worker.model` runs this as a process of its own, `python -m services.worker.conversion`, so that only
this process ever imports torch and transformers. It writes into a directory that nobody reads yet and exits
non-zero unless the result is sane; what it found wrong is its last line on stderr.
"""

import argparse
import os
import signal
from pathlib import Path

from trimtab.kit.process import die_with_parent


def convert(gguf: Path, out: Path, window: int) -> None:
    """Dequantise in float32, round once to bfloat16, save; `window` is the model's context in tokens."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = window  # a GGUF file carries no such field, and "unlimited" is wrong
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    if tokenizer.eos_token_id != end or not turn.endswith("<|im_start|>assistant\n"):
        raise SystemExit("the tokenizer came out without ChatML: its end of turn or its chat template is missing")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).to(torch.bfloat16)
    if model.config.max_position_embeddings != window:
        raise SystemExit(f"the model's window is {model.config.max_position_embeddings} tokens, not {window}")
    if not all(bool(torch.isfinite(weight).all()) for weight in model.parameters()):
        raise SystemExit("a weight is not finite")
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file to bf16 safetensors.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, required=True, help="context in tokens")
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process ends")
    args = parser.parse_args()
    die_with_parent(args.parent_pid, signal.SIGTERM)
    convert(args.gguf, args.out, args.window)


if __name__ == "__main__":
    main()
