"""Text as it comes, of tokenizers that are Python only."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.engines.tokenizers import HfTokenizer
from services.worker.text import TextAssembler


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    """One byte a token, and no Rust."""
    from transformers import ByT5Tokenizer

    python: Any = ByT5Tokenizer()
    assert not python.is_fast
    return HfTokenizer(python, len(python))


def ids_of(tokenizer: HfTokenizer, text: str) -> tuple[int, ...]:
    """Without the end that this tokenizer puts there."""
    return tokenizer.encode(text)[:-1]


@pytest.mark.parametrize("text", ["plain text", "舵🚢 is a helm", "a  b\n\tc ", "naïve café", "🚢" * 40])
@pytest.mark.parametrize("prompt", ["", "Say:", "so far 舵"])
def test_the_pieces_are_whole_characters_and_joined_the_text(tokenizer: HfTokenizer, text: str, prompt: str) -> None:
    stream = tokenizer.text_stream(ids_of(tokenizer, prompt), skip_special=True)
    pieces = [stream.step(token) for token in ids_of(tokenizer, text)]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_it_is_vllms_own_text_token_by_token(tokenizer: HfTokenizer) -> None:
    from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

    prompt, output = ids_of(tokenizer, "so far"), ids_of(tokenizer, " 舵🚢 and on, and on " * 3)
    stream = tokenizer.text_stream(prompt, skip_special=True)
    ids, tokens, prefix, read = list(prompt), None, 0, 0
    for token in output:
        ids.append(token)
        new, text, prefix, read = detokenize_incrementally(
            tokenizer._tokenizer, ids, tokens, prefix, read, skip_special_tokens=True
        )
        tokens = new if tokens is None else tokens + new
        assert stream.step(token) == text


def test_a_stop_string_ends_it_and_a_stream_goes_on_at_any_token(tokenizer: HfTokenizer) -> None:
    prompt, output = ids_of(tokenizer, "Say:"), ids_of(tokenizer, "舵 one 🚢 STOP two")

    def assembler() -> TextAssembler:
        return TextAssembler(tokenizer.text_stream(prompt, skip_special=True), ("STOP",))

    whole = assembler().push(output)
    assert (whole.text, whole.stop) == ("舵 one 🚢 ", "STOP")
    for cut in range(whole.kept):
        other = assembler()
        first, rest = other.push(output[:cut]), other.push(output[cut:])
        assert first.text + rest.text == whole.text
