"""The text of the example pair: the running interpreter's own standard library.

It is there on every machine, needs no download, and is under the PSF licence. Tests and
third-party packages are left out, because distributions disagree on whether they ship them.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Sources split by file: `train` is learned from, `held_out` never is."""

    train: list[str]
    held_out: list[str]

    def add(self, name: str, text: str) -> None:
        """Add the file `name` (its path below the library's root) to its side."""
        (self.held_out if is_held_out(name) else self.train).append(text)


def is_held_out(name: str) -> bool:
    """Decided by a hash of the name, so that a file keeps its side when other files change."""
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def sources() -> Iterator[tuple[str, str]]:
    """Path below the interpreter's stdlib and text of each file of the corpus, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(name.parts[:-1]):
            continue
        try:
            yield name.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of files declare another encoding


def load() -> Corpus:
    """Read the corpus.

    Raises:
        FileNotFoundError: this Python comes without the sources of its library.
    """
    found = Corpus([], [])
    for name, text in sources():
        found.add(name, text)
    if not found.train:
        raise FileNotFoundError("There are no Python sources; is this a full Python install?")
    return found


def prompts(held_out: list[str], count: int, characters: int = 400) -> list[str]:
    """`count` prompts: the first `characters` characters of evenly spaced held-out files.

    Each is cut at a line's end, so that the model continues with a fresh line.
    """
    long_enough = [text for text in held_out if len(text) > 2 * characters]
    step = max(1, len(long_enough) // count)
    cut = [text[: text.rfind("\n", 0, characters) + 1] for text in long_enough[::step]]
    return [text for text in cut if text][:count]


def write(path: Path, prompts: list[str]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{len(prompts):,} prompts in {path}")
