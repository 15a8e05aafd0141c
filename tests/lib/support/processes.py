"""Python processes as a user has them, and whether processes run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SWITCHES = {
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "TRITON_INTERPRET",
    "VLLM_PLUGINS",
}
"""Of the tests' own processes."""


def run_python(*words: object, **environment: str) -> list[str]:
    """Run Python with none of the tests' switches; return the lines that it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def state(pid: int) -> str:
    """As Linux has it: T is stopped, Z has ended but was not waited for; "" is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")
