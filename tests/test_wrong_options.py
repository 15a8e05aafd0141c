"""Wrong options are refused in one sentence each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from vllm_specblock.adapt.options import parse_adapt
from vllm_specblock.config import (
    OptionError,
    check_num_nodes,
    parse_combine,
    parse_drafter,
    split_keys,
)

WHOLE = ["1", 1.5, True, [1], {}]
"""What is given for a whole number."""

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "specblock": {
        "num_blocks": [0, -1, 9, *WHOLE],
        "num_starts": [0, -1, 33, *WHOLE],
        "branching": [[4, 8, 16], [4] * 5, [4, 8, 16, -1], [4, 8, 16, "16"], "4,8,16,16", 4],
        "calibrate_drafts": ["yes", 1, [], 0.5],
        "quantization": ["fp4", 8, True, ["fp8"]],
        "num_block": [2],
        "depth": [4],
    },
    "eagle3": {"depth": [0, 33, *WHOLE], "top_k": [0, 33, *WHOLE], "num_blocks": [1]},
    "ngram": {
        "min_match": [0, 33, 9, *WHOLE],
        "max_match": [0, 33, *WHOLE],
        "depth": [0, 65, *WHOLE],
        "branches": [0, 33, *WHOLE],
        "quantization": ["fp8"],
    },
}
COMBINE: dict[str, list[Any]] = {
    "draft_policy": ["vote", 1, ["route"], None],
    "confidence": ["max", 0, None],
    "merge": ["both", True, None],
    "budget": ["all", 60, None],
    "skip_drafter": ["no", 1, 0.5],
}
ADAPT: dict[str, list[Any]] = {
    "policy": ["never", 1, None],
    "rule": ["ours", 1, None],
    "trainer": ["", "cuda", "cuda:x", 3, None],
    "actions": ["heads,all", 1, True],
    "lr": [0, -1e-3, "fast", math.inf, math.nan],
    "every": [0, -8, 1.5, "8"],
    "requests": ["some", 1, None],
    "memory": [0, -1, "512", math.nan],
    "out": [3, True, ["versions"]],
    "folder": ["versions"],
}
STRUCTURE: list[dict[str, Any]] = [
    {"second_drafter": "ngram"},
    {"second_drafter": ["ngram"]},
    {"second_drafter": 2},
    {"second_drafter": {"kind": "hydra"}},
    {"second_drafter": {"kind": 3}},
    {"kind": "hydra"},
    {"kind": ["specblock"]},
    {"draft_policy": "merge"},
    {"confidence": "sum"},
]


Call = Callable[[Any], Any]


def parsed() -> dict[str, tuple[str, Call, list[Any]]]:
    """Case → a word that its sentences must have, what is called, and with what."""
    cases: dict[str, tuple[str, Call, list[Any]]] = {
        "adapt": (
            "adapt",
            lambda given: parse_adapt(given, "specblock"),
            ["yes", 1, None, [], 0.5],
        ),
        "nodes": ("num_speculative_tokens", check_num_nodes, [0, -1, 257, "12", 2.5, True, None]),
    }
    for kind, keys in OPTIONS.items():
        for key, values in keys.items():
            given = [{key: value} for value in values]
            cases[f"{kind}, {key}"] = key, partial(parse_drafter, kind=kind), given
    for key, values in COMBINE.items():
        cases[f"two drafters, {key}"] = key, parse_combine, [{key: value} for value in values]
    for key, values in ADAPT.items():
        given = [{key: value} for value in values]
        cases[f"adapt, {key}"] = key, partial(parse_adapt, kind="specblock"), given
    for kind in ("eagle3", "ngram", "dflash"):
        cases[f"adapt of {kind}"] = kind, partial(parse_adapt, kind=kind), [True]
    for given in STRUCTURE:
        cases[f"{given}"] = next(iter(given)), split_keys, [given]
    return cases


@pytest.mark.parametrize(("word", "call", "wrong"), parsed().values(), ids=parsed())
def test_a_wrong_option_is_one_sentence(word, call, wrong):
    for given in wrong:
        with pytest.raises(OptionError) as error:
            call(given)
        message = str(error.value)
        assert message.endswith(".") and "\n" not in message and len(message) < 700, message
        assert word in message, given
