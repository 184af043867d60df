"""Text out of tokens: whole characters, stop strings across deltas, and the same text however it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engines.tokenizers import ByteTokenizer
from services.worker.text import TextAssembler

TOKENIZER = ByteTokenizer()


def an_assembler(*stop, include_stop=False, min_tokens=0):
    stream = TOKENIZER.text_stream((), skip_special=True)
    return TextAssembler(stream, stop, include_stop=include_stop, min_tokens=min_tokens)


def feed(assembler, text):
    """Byte by byte: the text that left, and the stop string."""
    out = ""
    for token in TOKENIZER.encode(text):
        piece = assembler.push((token,))
        assert piece.text.isascii() or "�" not in piece.text
        out += piece.text
        if piece.stop:
            return out, piece.stop
    return out + assembler.flush(), None


@pytest.mark.parametrize("text", ["plain", "小さな舵", "🚢⚓️👩‍🚀", "é" * 5, "a小b🚢c"])
def test_multi_byte_characters_never_break_across_deltas(text):
    assert feed(an_assembler(), text) == (text, None)


def test_a_stop_string_across_deltas_is_cut_and_named():
    assert feed(an_assembler("舵 END", "zzz"), "turn the 舵 END and more") == ("turn the ", "舵 END")


def test_a_stop_string_can_be_kept():
    assert feed(an_assembler("END", include_stop=True), "the END.") == ("the END", "END")


def test_what_only_looked_like_a_stop_string_is_not_lost():
    assert feed(an_assembler("ENDING"), "the ENDER, the END") == ("the ENDER, the END", None)


def test_the_stop_string_that_ends_first_wins():
    assert feed(an_assembler("bcd", "bc"), "abcd") == ("a", "bc")


def test_a_stop_string_before_min_tokens_does_not_end_the_stream():
    assert feed(an_assembler("b", min_tokens=3), "abcabc") == ("abca", "b")


def test_tokens_after_the_stop_string_are_dropped():
    piece = an_assembler("b").push(TOKENIZER.encode("abcd"))
    assert (piece.text, piece.kept, piece.stop) == ("a", 2, "b")


def test_a_stop_token_gives_no_text():
    assert an_assembler().push(TOKENIZER.encode("ab"), silent_last=True).text == "a"
    assert an_assembler("x").push(TOKENIZER.encode("ab"), silent_last=True).text == "a"


@given(st.text(alphabet="ab小🚢", max_size=30), st.lists(st.text(alphabet="ab小", min_size=1, max_size=3), max_size=3))
@settings(max_examples=150)
def test_the_text_is_that_before_the_first_stop_string_wherever_it_is_cut(text, stops):
    ends = [(text.find(stop) + len(stop), text.find(stop), i) for i, stop in enumerate(stops) if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    first_end = min((e[0] for e in ends), default=None)
    candidates = {text[: e[1]] for e in ends if e[0] == first_end} or {expected}
    got, stop = feed(an_assembler(*stops), text)
    assert got in candidates
    assert (stop is not None) == bool(ends)
