"""Whose key is whose, and wrong options by what is accepted; versions of vLLM."""

from __future__ import annotations

import pytest

from vllm_specblock.config import OptionError, parse_drafter, split_keys
from vllm_specblock.versions import is_supported, supported_sentence


def test_whose_key_is_whose():
    first, second, combine = split_keys(
        {
            "method": "specblock",
            "model": "a",
            "revision": "main",
            "num_speculative_tokens": 60,
            "num_blocks": 3,
            "second_drafter": {"kind": "ngram", "min-match": 3},
            "draft_policy": "merge",
            "merge": "disjoint",
        }
    )
    assert first == {"model": "a", "revision": "main", "num_blocks": 3}
    assert second == {"kind": "ngram", "min_match": 3}
    assert combine == {"draft_policy": "merge", "merge": "disjoint"}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("specblock", {"num_block": 2}, ["'num_block'", "not known", "num_blocks", "branching"]),
        ("specblock", {"num_blocks": 9}, ["'num_blocks' is 9", "less than or equal to 8"]),
        ("specblock", {"num_blocks": "2"}, ["'num_blocks' is '2'", "a valid integer"]),
        ("specblock", {"branching": [2, 4, 6]}, ["'branching' is [2, 4, 6]", "at least 4 items"]),
        ("specblock", {"branching": [2, 4, 6, -1]}, ["'branching' (entry 3) is -1", "greater"]),
        ("eagle3", {"num_blocks": 2}, ["'num_blocks' is not known", "'eagle3'", "depth", "top_k"]),
        ("ngram", {"min_match": 9}, ["min_match is 9", "max_match, 8"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_accepted(kind, given, says):
    with pytest.raises(OptionError) as error:
        parse_drafter(given, kind)
    assert all(part in str(error.value) for part in says), error.value


def test_a_wrong_option_of_the_second_drafter_says_so():
    with pytest.raises(OptionError, match=r"'second_drafter\.depth' is 0"):
        parse_drafter({"depth": 0}, "eagle3", "second_drafter.")


def test_versions():
    assert is_supported("0.32.0") and is_supported("0.32.4+cpu") and is_supported("0.33.1")
    assert not is_supported("0.31.9") and not is_supported("unknown")
    said = supported_sentence("0.34.0")
    assert "0.32.x, 0.33.x" in said and "this is 0.34.0" in said
