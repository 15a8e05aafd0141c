"""Raw prompts of two kinds of text, as JSON lines: Python code, and tables of characters.

    python examples/two_heads/prompts.py OUT

Both are slices of the running Python's standard library: `encodings` is tables for the most part,
the rest is code. Of each slice OUT/SLICE.jsonl is to be answered and learned from, and
OUT/SLICE_held_out.jsonl comes from files that no model saw.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny_pair"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "first_drafter"))
import corpus
from prompts import EVERY, pieces

TABLES = "encodings/"
SLICES = {"code": EVERY, "tables": 1000}
"""Characters from one prompt of a file to the next: there are fewer tables than code."""
LEARNED, HELD_OUT = 1536, 24
"""Prompts of a slice, at most."""


def load() -> dict[str, corpus.Corpus]:
    """The corpus by slice.

    A file's side goes by its path in the library, not in the slice's folder: it is the side that
    the example target and its drafter were trained by.
    """
    texts = {name: corpus.Corpus([], []) for name in SLICES}
    for name, text in corpus.sources():
        texts["tables" if name.startswith(TABLES) else "code"].add(name, text)
    return texts


def drawn(texts: list[str], every: int, count: int) -> list[str]:
    """`count` prompts of `texts` in random order, the same in every call."""
    found = pieces(texts, every)
    random.Random(0).shuffle(found)
    return found[:count]


def main(out: Path) -> None:
    """Write all four files."""
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in load().items():
        corpus.write(out / f"{name}.jsonl", drawn(texts.train, SLICES[name], LEARNED))
        corpus.write(out / f"{name}_held_out.jsonl", drawn(texts.held_out, SLICES[name], HELD_OUT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the files")
    main(parser.parse_args().out)
