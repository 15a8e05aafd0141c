"""Log messages can be read, regardless of earlier tests."""

from __future__ import annotations

import logging

import pytest
from support.adapting import Pair


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let records of our loggers reach pytest: vLLM's logger does not propagate them."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)
