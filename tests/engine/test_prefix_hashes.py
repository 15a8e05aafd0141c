"""The prefix cache knows blocks by the hashes of committed texts, never of what was rejected."""

from __future__ import annotations

import pytest
from support.engines import Engine
from support.matrix import PROMPTS, params
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_block_hash, hash_block_tokens


def cached(engine: Engine) -> set[bytes]:
    """Hashes of the blocks that a request could find now."""
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return {get_block_hash(key) for key in pool.cached_block_hash_to_block._cache}


def hashes(engine: Engine, text: list[int]) -> list[bytes]:
    """Of the whole blocks of a text, first ones first."""
    config, found = engine.core.vllm_config.cache_config, []
    of_block = get_hash_fn_by_name(config.prefix_caching_hash_algo)
    for end in range(config.block_size, len(text) + 1, config.block_size):
        before = found[-1] if found else None
        found.append(hash_block_tokens(of_block, before, text[end - config.block_size : end]))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hashes_are_those_of_what_was_committed(tree: Engine, temperature: float):
    assert tree.llm.reset_prefix_cache()
    answers = tree.generate(PROMPTS, params(temperature=temperature, max_tokens=90))
    texts = [[*prompt, *answer.tokens] for prompt, (answer,) in zip(PROMPTS, answers)]
    found = cached(tree)
    assert found <= {each for text in texts for each in hashes(tree, text)}
    for prompt, text in zip(PROMPTS, texts):
        # What the last step committed, at most eight drafts and one, is not noted any more.
        there = hashes(tree, text[:-9])
        assert found >= set(there) and len(there) > len(hashes(tree, prompt))
    # One token that is another one shows.
    other = [[*text[:-40], text[-40] + 1, *text[-39:]] for text in texts]
    assert not found <= {each for text in other for each in hashes(tree, text)}
