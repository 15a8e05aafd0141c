"""Folders of drafters and targets, by path or hub id."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vllm_specblock.drafters.common.config import CheckpointError

DRAFTER_FILES = ["config.json", "*.safetensors*", "vocab_mapping.pt", "pytorch_model*.bin*"]
DRAFTER_FILES += ["mask_embedding.pt"]
TARGET_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def snapshot(model: str, files: list[str], **hub: Any) -> Path:
    """Download a repository's `files` unless they are cached; returns their folder.

    Raises:
        CheckpointError: no hub id, no such repository, no network. The end of a sentence.
    """
    from huggingface_hub import snapshot_download  # takes half a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=files, **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"neither a folder here nor a hub id that could be downloaded ({type(error).__name__})."
        ) from None


def drafter_folder(model: str | Path) -> Path:
    """Return a drafter's folder; a hub id is downloaded, or CheckpointError is raised."""
    return _folder(model, "drafter", DRAFTER_FILES)


def target_folder(model: str | Path) -> Path:
    """As `drafter_folder`, for a target's config, tokenizer and one copy of its weights."""
    return _folder(model, "target", TARGET_FILES, ignore_patterns=["original/*", "consolidated*"])


def _folder(model: str | Path, what: str, files: list[str], **hub: Any) -> Path:
    # For a local folder, the loader reports missing files.
    if Path(model).exists() or not _HUB_ID.fullmatch(str(model)):
        return Path(model)
    try:
        return snapshot(str(model), files, **hub)
    except CheckpointError as error:
        raise CheckpointError(f"The {what} {str(model)!r} is {error}") from None
