"""Tokens that were compared, over all workers of pytest-xdist and without it.

`tests/conftest.py` takes the hooks from here. A worker's count lies in its own process, so that no
test can know the sum: the session fails at its end when tests have asked for more than there were.
"""

from __future__ import annotations

from typing import Protocol

import pytest


class Counter(Protocol):
    """Whatever counts."""

    tokens: int


counters: list[Counter] = []
"""Of this process."""
least = 0
"""Tokens that this process was asked to make sure of."""

_others = {"tokens": 0, "least": 0}  # on the controller, of its workers
_KEY = "compared"


def require(tokens: int) -> None:
    """Let the session fail unless its counters come to so many tokens more than others ask for."""
    global least
    least += tokens


def _counts() -> dict[str, int]:
    tokens = sum(counter.tokens for counter in counters) + _others["tokens"]
    return {"tokens": tokens, "least": least + _others["least"]}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker has ended, on the controller; one that crashed has nothing to say."""
    said = getattr(node, "workeroutput", {}).get(_KEY, {"tokens": 0, "least": 0})
    _others["tokens"] += said["tokens"]
    _others["least"] += said["least"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    counts = _counts()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = counts
    elif counts["tokens"] < counts["least"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    counts = _counts()
    if counts["least"]:
        words = "too few" if counts["tokens"] < counts["least"] else "enough"
        terminalreporter.write_line(
            f"{counts['tokens']:,} tokens compared, {words}: at least {counts['least']:,} wanted"
        )
