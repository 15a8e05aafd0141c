"""`speculative_config`s of one drafter and of two, for scripts that run many of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NGRAM = {"kind": "ngram"}
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Of vLLM's n-gram lookup."""

POLICIES: dict[str, dict[str, str]] = {
    "route": {"draft_policy": "route"},
    "merge disjoint": {"draft_policy": "merge", "merge": "disjoint", "budget": "joint"},
    "merge disjoint, split": {"draft_policy": "merge", "merge": "disjoint", "budget": "split"},
    "merge trie, joint": {"draft_policy": "merge", "merge": "trie", "budget": "joint"},
    "merge trie, split": {"draft_policy": "merge", "merge": "trie", "budget": "split"},
}
"""Ways of two heads to go together; the merged-tree paper's own is "merge disjoint, split"."""


def specblock(folder: Path | str, **options: Any) -> dict[str, Any]:
    return {"kind": "specblock", "model": str(folder), **options}


def eagle3(folder: Path | str, **options: Any) -> dict[str, Any]:
    return {"kind": "eagle3", "model": str(folder), **options}


def alone(head: dict[str, Any], nodes: int) -> dict[str, Any]:
    """One head with trees of `nodes` nodes, all of which are verified."""
    fixed = {"num_speculative_tokens": nodes, "enable_adaptive_verification": False}
    return {"method": "specblock", **fixed, **head}


def together(
    first: dict[str, Any], second: dict[str, Any], nodes: int, policy: str, **how: str
) -> dict[str, Any]:
    """Two heads by one of `POLICIES`; `how` adds to its keys."""
    return alone(first, nodes) | {"second_drafter": second} | POLICIES[policy] | how


def vllms(method: str, tokens: int, **keys: Any) -> dict[str, Any]:
    """A method of vLLM's own: one path of `tokens` tokens per step."""
    return {"method": method, "num_speculative_tokens": tokens, **keys}
