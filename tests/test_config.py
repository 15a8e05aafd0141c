"""Wrong options: one sentence each, naming the key, what was given and what is accepted."""

from __future__ import annotations

import pytest

from vllm_specblock.config import (
    CombineConfig,
    OptionError,
    parse_combine,
    parse_drafter,
    split_keys,
)
from vllm_specblock.drafters.options import Eagle3Config, NGramConfig, SpecBlockConfig
from vllm_specblock.versions import is_supported, supported_sentence


def refused(call, *parts: str) -> None:
    with pytest.raises(OptionError) as error:
        call()
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in parts:
        assert part in sentence, sentence


def test_defaults():
    assert parse_drafter({}, "specblock") == SpecBlockConfig()
    assert parse_drafter({}, "eagle3") == Eagle3Config()
    assert parse_drafter({}, "ngram") == NGramConfig()
    assert parse_combine({}) == CombineConfig()


def test_given():
    options = parse_drafter(
        {"num_blocks": 3, "branching": [1, 2, 3, 0], "num_starts": 4}, "specblock"
    )
    assert (options.num_blocks, options.num_starts, options.branching) == (3, 4, [1, 2, 3, 0])


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
        (
            "specblock",
            {"num_block": 2},
            ["'num_block'", "not known", "num_blocks", "num_starts", "branching", "second_drafter"],
        ),
        ("specblock", {"num_blocks": 0}, ["'num_blocks' is 0", "greater than or equal to 1"]),
        ("specblock", {"num_blocks": 9}, ["'num_blocks' is 9", "less than or equal to 8"]),
        ("specblock", {"num_blocks": "2"}, ["'num_blocks' is '2'", "a valid integer"]),
        ("specblock", {"num_starts": 2.5}, ["'num_starts' is 2.5", "a valid integer"]),
        ("specblock", {"branching": [2, 4, 6]}, ["'branching' is [2, 4, 6]", "at least 4 items"]),
        (
            "specblock",
            {"branching": [2, 4, 6, -1]},
            ["'branching' (entry 3) is -1", "greater than or equal"],
        ),
        ("specblock", {"branching": "wide"}, ["'branching' is 'wide'", "a valid list"]),
        ("eagle3", {"num_blocks": 2}, ["'num_blocks' is not known", "'eagle3'", "depth", "top_k"]),
        ("eagle3", {"depth": 0}, ["'depth' is 0", "greater than or equal to 1"]),
        ("ngram", {"min_match": 9}, ["min_match is 9", "max_match, 8"]),
        ("ngram", {"top_k": 9}, ["'top_k' is not known", "'ngram'", "branches"]),
    ],
)
def test_wrong_options_of_a_head(kind, given, says):
    refused(lambda: parse_drafter(given, kind), *says)


def test_a_wrong_option_of_the_second_drafter_says_so():
    refused(
        lambda: parse_drafter({"depth": 0}, "eagle3", "second_drafter."),
        "'second_drafter.depth' is 0",
    )


def test_versions():
    assert is_supported("0.32.0") and is_supported("0.32.4+cpu") and is_supported("0.33.1")
    assert not is_supported("0.31.9") and not is_supported("unknown")
    said = supported_sentence("0.34.0")
    assert "0.32.x, 0.33.x" in said and "this is 0.34.0" in said
