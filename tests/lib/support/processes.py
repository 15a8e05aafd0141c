"""Whether processes run."""

from __future__ import annotations

from pathlib import Path


def state(pid: int) -> str:
    """As Linux has it: T is stopped, Z has ended but was not waited for; "" is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")
