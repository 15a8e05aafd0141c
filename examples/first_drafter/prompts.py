"""Raw prompts as JSON lines, from the sources of the running Python's standard library.

    python examples/first_drafter/prompts.py OUT

OUT/prompts.jsonl is to be answered and learned from; OUT/held_out.jsonl comes from files that
neither the example target nor a drafter ever saw.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny_pair"))
import corpus

CHARACTERS = 250  # of a prompt, about 80 tokens
EVERY = 3000  # characters from one prompt of a file to the next


def pieces(texts: list[str], every: int = EVERY) -> list[str]:
    """The beginnings of parts of `texts`, one every so many characters, cut at a line's end."""
    found = []
    for text in texts:
        for start in range(0, len(text) - 2 * CHARACTERS, every):
            first = text.find("\n", start) + 1 if start else 0
            found.append(text[first : text.rfind("\n", first, first + CHARACTERS) + 1])
    return [piece for piece in found if piece.strip()]


def main(out: Path) -> None:
    """Write both files."""
    texts = corpus.load()
    out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (
        ("prompts", pieces(texts.train)),
        ("held_out", corpus.prompts(texts.held_out, 24)),
    ):
        corpus.write(out / f"{name}.jsonl", prompts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the files")
    main(parser.parse_args().out)
