"""Tokenizers behind the `Tokenizer` interface: the model's own, and one byte a token for the simulated engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.worker.engines import ChatRefused, TextStream
from trimtab.messages import ChatMessage


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character (GPT-2's alphabet); this is the way back."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _rust(tokenizer: Any) -> Any:
    """The `tokenizers` library's own behind it; None behind one that is Python only."""
    from tokenizers import Tokenizer

    inner = getattr(tokenizer, "_tokenizer", None)
    return inner if isinstance(inner, Tokenizer) else None


class HfTokenizer:
    """A Hugging Face tokenizer (any that vLLM uses). `vocab_size` is the model's, in tokens; `chat_args` are arguments of its chat template."""

    def __init__(self, tokenizer: Any, vocab_size: int, chat_args: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_args = dict(chat_args or {})
        self._fast = _rust(tokenizer)
        self.vocab_size = vocab_size
        self._byte_level = self._fast is not None and "ByteLevel" in repr(self._fast.decoder)
        self._special = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The model's chat template over `messages`, with the answer's opening. What a template makes of a name is its own affair."""
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(
                [{"role": x.role, "content": x.content, **({"name": x.name} if x.name else {})} for x in messages],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **self._chat_args,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as e:
            raise ChatRefused(str(e)) from e
        return tuple(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, also where they are a part of a character."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if (hexed := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(hexed[1], 16)])
        if self._byte_level and token_id not in self._special:
            try:
                return bytes(_BYTE_OF[c] for c in token)
            except KeyError:
                pass  # an added token, spelled in plain characters
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def text_stream(self, prompt: tuple[int, ...], *, skip_special: bool) -> TextStream:
        if self._fast is None:
            from services.worker.engines.vllm_text import PythonStream

            return PythonStream(self._tokenizer, prompt, skip_special)
        return _HfStream(self._fast, prompt, skip_special)


class _HfStream:
    """The `tokenizers` library's own incremental decoder, primed with the prompt, as vLLM does it: the same bytes come out."""

    def __init__(self, tokenizer: Any, prompt: tuple[int, ...], skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._kind = DecodeStream
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=skip_special)

    def step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as e:
            # Some byte-fallback tokenizers give text that is no extension of what came before (vllm issue 17448): begin anew here.
            if not str(e).startswith("Invalid prefix encountered"):
                raise
            self._stream = self._kind(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id) or ""


class ByteTokenizer:
    """Token id = byte; EOS is 256. Needs no model file, and breaks multi-byte characters across tokens as real ones do."""

    EOS = 256
    vocab_size = 257

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self.encode("".join(f"{x.name or x.role}: {x.content}\n" for x in messages) + "assistant: ")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def text_stream(self, prompt: tuple[int, ...], *, skip_special: bool) -> TextStream:
        return _ByteStream(skip_special)


class _ByteStream:
    def __init__(self, skip_special: bool) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = skip_special

    def step(self, token_id: int) -> str:
        if token_id >= 256:
            return "" if self._skip else "<|end|>"
        return self._decoder.decode(bytes([token_id]))
