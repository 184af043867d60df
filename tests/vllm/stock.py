"""Plain vLLM's own tokens for prompts of token ids, as JSON on stdout: no class, plug-in or setting of ours.

Run as a program: `stock.py MODEL DTYPE FILE`, where FILE holds [{"prompt": [ids], "max_tokens": n}, …]. Greedy, ends ignored.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_PLUGINS="",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    model, dtype, file = sys.argv[1:]
    jobs = json.loads(Path(file).read_text())
    llm = LLM(model=model, dtype=dtype, enforce_eager=True, max_num_seqs=32, max_num_batched_tokens=512)
    outputs = llm.generate(
        [{"prompt_token_ids": job["prompt"]} for job in jobs],
        [SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True) for job in jobs],
        use_tqdm=False,
    )
    print("TOKENS " + json.dumps([list(out.outputs[0].token_ids) for out in outputs]))


if __name__ == "__main__":
    main()
