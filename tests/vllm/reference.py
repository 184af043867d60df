"""Plain vLLM's own answers, as JSON on stdout: no class, plug-in or setting of ours. Run as a program: `reference.py MODEL`."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_PLUGINS="",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    from tests.vllm.prompts import cases

    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=512)
    answers = {}
    for case in cases():
        params = SamplingParams(temperature=0, max_tokens=case["max_tokens"], stop=case["stop"] or None)
        if "chat" in case:
            (out,) = llm.chat([{"role": "user", "content": case["chat"]}], params, use_tqdm=False)
        else:
            (out,) = llm.generate([case["text"]], params, use_tqdm=False)
        first = out.outputs[0]
        answers[case["id"]] = {
            "prompt": list(out.prompt_token_ids or []),
            "tokens": list(first.token_ids),
            "text": first.text,
            "finish": first.finish_reason,
        }
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
