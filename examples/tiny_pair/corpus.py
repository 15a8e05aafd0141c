"""The text of the example pair: the running interpreter's own standard library.

It is there on every machine, needs no download, and is under the PSF licence. Tests and
third-party packages are left out, because distributions disagree on whether they ship them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Sources split by file: `train` is learned from, `held_out` never is."""

    train: list[str]
    held_out: list[str]


def is_held_out(name: str) -> bool:
    """Whether the file `name` (path relative to the library's root) is kept from training.

    Decided by a hash of the name, so that a file keeps its side when other files change.
    """
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def source_files(root: Path | None = None) -> list[Path]:
    """Paths of the corpus below `root` (default: the interpreter's stdlib), sorted."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])
    )


def load(root: Path | None = None) -> Corpus:
    """Read the corpus.

    Raises:
        FileNotFoundError: there is no Python source below `root`.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    sides: dict[bool, list[str]] = {True: [], False: []}
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of files declare another encoding
        sides[is_held_out(path.relative_to(root).as_posix())].append(text)
    if not sides[False]:
        raise FileNotFoundError(f"No Python sources below {root}; is this a full Python install?")
    return Corpus(train=sides[False], held_out=sides[True])


def prompts(held_out: list[str], count: int, characters: int = 400) -> list[str]:
    """`count` prompts: the first `characters` characters of evenly spaced held-out files.

    Each is cut at a line's end, so that the model continues with a fresh line.
    """
    long_enough = [text for text in held_out if len(text) > 2 * characters]
    step = max(1, len(long_enough) // count)
    cut = [text[: text.rfind("\n", 0, characters) + 1] for text in long_enough[::step]]
    return [text for text in cut if text][:count]
