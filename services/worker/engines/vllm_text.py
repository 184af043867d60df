"""Text of a tokenizer that is Python only, as it comes: by vLLM's own way for those, token by token."""

from __future__ import annotations

from typing import Any

from vllm.tokenizers.detokenizer_utils import convert_prompt_ids_to_tokens, detokenize_incrementally


class PythonStream:
    """A TextStream primed with the prompt, whose text does not come again."""

    def __init__(self, tokenizer: Any, prompt: tuple[int, ...], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._tokens, self._prefix, self._read = convert_prompt_ids_to_tokens(
            tokenizer, list(prompt), skip_special_tokens=skip_special
        )

    def step(self, token_id: int) -> str:
        new, text, self._prefix, self._read = detokenize_incrementally(
            tokenizer=self._tokenizer,
            # It looks at the last alone.
            all_input_ids=[token_id],
            prev_tokens=self._tokens,
            prefix_offset=self._prefix,
            read_offset=self._read,
            skip_special_tokens=self._skip,
        )
        # What is before the prefix is never looked at again.
        self._tokens = [*self._tokens, *new][self._prefix :]
        self._read -= self._prefix
        self._prefix = 0
        return str(text)
