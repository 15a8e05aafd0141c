"""Options: defaults, and one sentence for each wrong one. `adapt`: tests/adapt/test_options.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from vllm_specblock.config import (
    OptionError,
    check_num_nodes,
    parse_combine,
    parse_drafter,
    split_keys,
)

WHOLE = ["1", 1.5, True, [1], {}]
"""Wrong values of a whole number."""
DRAFTERS: dict[str, dict[str, list[Any]]] = {
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
        "min_match": [0, 33, 17, *WHOLE],
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
STRUCTURE: list[dict[str, Any]] = [
    *({"second_drafter": second} for second in ("ngram", ["ngram"], 2)),
    *({"second_drafter": {"kind": kind}} for kind in ("hydra", 3)),
    *({"kind": kind} for kind in ("hydra", ["specblock"])),
    {"draft_policy": "merge"},
    {"confidence": "sum"},
]
CASES = [
    *(
        (partial(parse_drafter, kind=kind), key, {key: value})
        for kind, keys in DRAFTERS.items()
        for key, values in keys.items()
        for value in values
    ),
    *((parse_combine, key, {key: value}) for key, values in COMBINE.items() for value in values),
    *((split_keys, next(iter(given)), given) for given in STRUCTURE),
    *(
        (check_num_nodes, "num_speculative_tokens", value)
        for value in (0, -1, 257, "12", 2.5, True, None)
    ),
]


@pytest.mark.parametrize(("parse", "key", "given"), CASES)
def test_a_wrong_option_is_one_sentence_that_names_it(parse, key, given):
    with pytest.raises(OptionError) as error:
        parse(given)
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 700, message
    assert key in message


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("specblock", {"num_block": 2}, ["'num_block'", "not known", "num_blocks", "branching"]),
        ("specblock", {"num_blocks": 9}, ["'num_blocks' is 9", "less than or equal to 8"]),
        ("specblock", {"num_blocks": "2"}, ["'num_blocks' is '2'", "a valid integer"]),
        ("specblock", {"branching": [2, 4, 6]}, ["'branching' is [2, 4, 6]", "at least 4 items"]),
        ("specblock", {"branching": [2, 4, 6, -1]}, ["'branching' (entry 3) is -1", "greater"]),
        ("eagle3", {"num_blocks": 2}, ["'num_blocks' is not known", "'eagle3'", "depth", "top_k"]),
        ("ngram", {"min_match": 17}, ["min_match is 17", "max_match, 16"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_accepted(kind, given, says):
    with pytest.raises(OptionError) as error:
        parse_drafter(given, kind)
    assert all(part in str(error.value) for part in says), error.value


def test_a_wrong_option_of_the_second_drafter_says_so():
    with pytest.raises(OptionError, match=r"'second_drafter\.depth' is 0"):
        parse_drafter({"depth": 0}, "eagle3", "second_drafter.")
