"""Checkpoints that cannot be used are refused in one sentence, by the check and by the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_specblock.drafters.common.config import CheckpointError


def refusal(files: Any, directory: Path) -> str:
    """The sentence with which both the cheap check and the loader of `files` refuse."""
    messages = []
    for attempt in (
        lambda: files.check_tensors(directory, files.read_config(directory)),
        lambda: files.load(directory),
    ):
        with pytest.raises(CheckpointError) as error:
            attempt()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].endswith(".") and "\n" not in messages[0]
    return messages[0]
