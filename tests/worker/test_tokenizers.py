"""Token bytes, and templates that refuse."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.worker.engines import ChatRefused
from services.worker.engines.tokenizers import ByteTokenizer, HfTokenizer
from trimtab.messages import ChatMessage


def a_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}"):
    """A byte-level BPE without merges: each byte is a token, spelled in GPT-2's alphabet, as in most models of today."""
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=template)
    return HfTokenizer(outer, len(outer))


@pytest.mark.parametrize("text", ["plain", "舵🚢", "a b\n"])
def test_the_tokens_bytes_joined_are_the_texts_bytes(text):
    tokenizer = a_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    plain = ByteTokenizer()
    assert b"".join(map(plain.token_bytes, plain.encode(text))) == text.encode()


def test_a_special_token_is_spelled_out():
    tokenizer = a_tokenizer()
    (end,) = tokenizer.encode("<end>")
    assert tokenizer.token_bytes(end) == b"<end>"


def test_a_template_that_refuses_the_messages_says_why():
    tokenizer = a_tokenizer("{{ raise_exception('no system messages here') }}")
    with pytest.raises(ChatRefused, match="no system messages here"):
        tokenizer.encode_chat([ChatMessage("system", "x")])
