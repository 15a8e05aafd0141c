"""Detection of engines that use SpecBlock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_specblock.config import METHOD

WHEN_ASKED: list[Callable[[Any], None]] = []
"""Called with the ParallelConfig of an engine that uses SpecBlock, before its other configs."""


def asks_for_us(speculative_config: Mapping[str, Any] | None) -> bool:
    """Return whether a user's `speculative_config` names our method."""
    return speculative_config is not None and speculative_config.get("method") == METHOD


def is_ours(config: Any) -> bool:
    """Return whether a vLLM SpeculativeConfig, or None, has a `ResolvedConfig`."""
    return hasattr(config, METHOD)


def extracts_features(config: Any) -> bool:
    """Return whether a vLLM SpeculativeConfig, or None, belongs to `specblock features`."""
    draft = getattr(config, "draft_model_config", None)
    return draft is not None and getattr(draft.hf_config, "specblock_features", False) is True
