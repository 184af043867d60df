"""What a document is made of, as far as it names things: code spans, blocks of code, links, headings. By regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^ *(`{3,}|~{3,})\s*(\w*).*$")
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Code:
    """A code span, or one line of a block (its continuations joined): `block` is then the block's language, "" where it names none."""

    line: int
    text: str
    block: str | None = None


def code(text: str) -> list[Code]:
    """All code of a document, in its order of lines: blocks' first."""
    blocks, prose = _parted(text)
    spans = [
        Code(prose.count("\n", 0, found.start()) + 1, " ".join(found[2].split())) for found in SPAN.finditer(prose)
    ]
    return blocks + spans


def plain(text: str) -> list[Code]:
    """Of a document without any marks, such as a chart's notes: every line that is set in."""
    return [Code(n, line.strip(), "") for n, line in enumerate(text.splitlines(), 1) if line.startswith("  ")]


def links(text: str) -> Iterator[tuple[int, str]]:
    """Where a document points to, as it is written; not in code."""
    _, prose = _parted(text)
    prose = SPAN.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), prose)
    for form in (LINK, REFERENCE):
        for found in form.finditer(prose):
            yield prose.count("\n", 0, found.start()) + 1, found[1]


def anchors(text: str) -> set[str]:
    """What `#…` may name in it: each heading as GitHub makes a name of it, a number after those that come again."""
    _, prose = _parted(text)
    found: dict[str, int] = {}
    for heading in HEADING.findall(prose):
        said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", said.lower()).replace(" ", "-")
        again = found.get(slug)
        found[slug] = 0 if again is None else again + 1
        if again is not None:
            found[f"{slug}-{again + 1}"] = 0
    return set(found)


def _parted(text: str) -> tuple[list[Code], str]:
    """Lines of blocks, and the text with nothing where blocks were, so that lines keep their numbers."""
    blocks: list[Code] = []
    prose: list[str] = []
    fence, language, held, held_at = "", "", "", 0
    for n, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if found and not fence:
            fence, language = found[1], found[2]
        elif found and line.strip() == fence:
            fence = ""
        elif fence:
            held_at = held_at or n
            held += line
            if not held.rstrip().endswith("\\"):
                blocks.append(Code(held_at, held.strip(), language))
                held, held_at = "", 0
            else:
                held = held.rstrip()[:-1]
            prose.append("")
            continue
        else:
            prose.append(line)
            continue
        prose.append("")
    return blocks, "\n".join(prose)
