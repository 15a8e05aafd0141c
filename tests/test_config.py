"""Wrong options: one sentence each, naming the key, what was given and what is accepted."""

from __future__ import annotations

import pytest

from vllm_specblock.config import OptionError, SpecBlockConfig, check_num_nodes, parse_options
from vllm_specblock.versions import is_supported, supported_sentence


def test_defaults():
    assert parse_options({"method": "specblock", "model": "x"}) == SpecBlockConfig()


def test_given():
    options = parse_options({"num_blocks": 3, "branching": [1, 2, 3, 0], "num_starts": 4})
    assert (options.num_blocks, options.num_starts, options.branching) == (3, 4, [1, 2, 3, 0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_block": 2}, ["'num_block'", "not known", "num_blocks", "num_starts", "branching"]),
        ({"num_blocks": 0}, ["'num_blocks' is 0", "greater than or equal to 1"]),
        ({"num_blocks": 9}, ["'num_blocks' is 9", "less than or equal to 8"]),
        ({"num_blocks": "2"}, ["'num_blocks' is '2'", "a valid integer"]),
        ({"num_starts": 2.5}, ["'num_starts' is 2.5", "a valid integer"]),
        ({"branching": [2, 4, 6]}, ["'branching' is [2, 4, 6]", "at least 4 items"]),
        ({"branching": [2, 4, 6, -1]}, ["'branching' (entry 3) is -1", "greater than or equal"]),
        ({"branching": "wide"}, ["'branching' is 'wide'", "a valid list"]),
    ],
)
def test_wrong_options(given, says):
    with pytest.raises(OptionError) as error:
        parse_options({"method": "specblock", **given})
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in says:
        assert part in sentence


@pytest.mark.parametrize("value", [0, 257, -3, 2.0, "60", True, None])
def test_wrong_number_of_nodes(value):
    with pytest.raises(OptionError, match=r"'num_speculative_tokens' is .* from 1 to 256"):
        check_num_nodes(value)


@pytest.mark.parametrize("value", [1, 60, 256])
def test_right_number_of_nodes(value):
    assert check_num_nodes(value) == value


def test_versions():
    assert is_supported("0.32.0") and is_supported("0.32.4+cpu")
    assert not is_supported("0.33.0") and not is_supported("unknown")
    assert "0.32.x" in supported_sentence("0.33.0") and "0.33.0" in supported_sentence("0.33.0")
