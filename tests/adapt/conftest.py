"""Log messages can be read, regardless of earlier tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once vLLM was imported in this process, its logger keeps what is said below it to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
