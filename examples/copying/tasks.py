"""Copy tasks made of source code: a piece edited throughout, and a piece quoted line by line.

A task is a prompt and its only right answer: the piece, with the change that the prompt names.
"""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter
from dataclasses import dataclass

SHORTEST, LONGEST = 260, 640
"""Characters of a piece, about 80 to 200 of the example target's tokens."""


@dataclass(frozen=True)
class Task:
    """A prompt and its answer."""

    form: str
    prompt: str
    answer: str


def piece(text: str, characters: int, rng: random.Random) -> str:
    """Return whole lines of `text` from a random line on, at most `characters` in all.

    Empty if `text` is too short or its lines are too long.
    """
    if len(text) < 2 * characters:
        return ""
    start = text.find("\n", rng.randrange(len(text) - characters)) + 1
    lines = text[start : text.rfind("\n", start, start + characters) + 1]
    return lines.strip("\n") + "\n" if lines.strip() else ""


def edit(lines: str, rng: random.Random) -> Task | None:
    """Rename one name of a piece throughout; None if no name occurs twice."""
    words = Counter(re.findall(r"\b[A-Za-z_]\w{3,}\b", lines))
    names = sorted(w for w, n in words.items() if n > 1 and not keyword.iskeyword(w))
    if not names:
        return None
    old = rng.choice(names)
    # Built from parts of other names, and not in the piece.
    first, second = (rng.choice(sorted(words)).strip("_").split("_")[0] for _ in range(2))
    new = f"{first}_{second}"
    if not new.isidentifier() or new in words:
        return None
    answer = re.sub(rf"\b{old}\b", new, lines)
    # The newline belongs to the answer: it is one token with the indentation after it.
    return Task("edit", f"{lines}\n# edited: {old} -> {new}", f"\n{answer}")


def quote(lines: str, rng: random.Random) -> Task | None:
    """Quote a piece's non-blank lines from a random line on; None if there are none.

    The prompt ends with the first word of the first line, which marks where to begin.
    """
    kept = [line.strip() for line in lines.splitlines() if line.strip()]
    kept = kept[rng.randrange(max(1, len(kept) // 3)) :]
    if not kept:
        return None
    quoted = "".join(f"# > {line}\n" for line in kept)
    begin = re.match(r"# > \W*\w*", quoted).end()
    return Task("quote", f"{lines}\n# quotes:\n{quoted[:begin]}", quoted[begin:])


FORMS = {"edit": edit, "quote": quote}


def draw(
    texts: list[str],
    form: str,
    count: int,
    rng: random.Random,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
) -> list[Task]:
    """Draw `count` tasks of one form, each of a random piece of a random text.

    Texts are drawn by length, so that every line is equally likely.

    Raises:
        ValueError: no text is long enough.
    """
    sizes = [len(text) if len(text) > 2 * longest else 0 for text in texts]
    if not any(sizes):
        raise ValueError(f"No text has {2 * longest} characters: give longer ones.")
    found: list[Task] = []
    while len(found) < count:
        (text,) = rng.choices(texts, sizes)
        lines = piece(text, rng.randint(shortest, longest), rng)
        task = FORMS[form](lines, rng) if len(lines) >= shortest // 2 else None
        found += [task] if task else []
    return found
