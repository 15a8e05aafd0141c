"""The prefix cache knows blocks by the hashes of committed texts, never of what was rejected, and
gives none whose drafters' rows are of another text."""

from __future__ import annotations

import random

import pytest
from support import dflash
from support.engines import DRAFTER, ROOT, Engine, record_drafts, shared_engine
from support.matrix import PROMPTS, half_sampled
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request

BLOCK, NEW_TOKENS = 32, 40


def cached(engine: Engine) -> set[bytes]:
    """Hashes of the blocks that a request could find now."""
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return {get_block_hash(key) for key in pool.cached_block_hash_to_block._cache}


def hashes(engine: Engine, text: list[int]) -> list[bytes]:
    """Of a text's blocks as a request of it has them, first ones first."""
    hasher = engine.core.request_block_hasher
    return list(
        Request("no request", text, SamplingParams(), None, block_hasher=hasher).block_hashes
    )


def test_hashes_are_those_of_what_was_committed(tree: Engine):
    assert tree.llm.reset_prefix_cache()
    answers = tree.generate(PROMPTS, half_sampled(max_tokens=90))
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


SPECBLOCK = {"model": str(DRAFTER), "calibrate_drafts": False}
KINDS = {
    "specblock": SPECBLOCK,
    "eagle3": SPECBLOCK | {"model": str(ROOT / "examples/two_heads/eagle3")},
    "ngram and specblock": {
        "kind": "ngram",
        "model": None,
        "earlier_tokens": 0,
        "second_drafter": SPECBLOCK,
        "draft_policy": "merge",
        "skip_drafter": False,
    },
    "dflash": {"calibrate_drafts": False},
}
WITHOUT_DROP = {"dflash"}
"""Kinds with cache rows that do not depend on the next token."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind, tmp_path_factory) -> Engine:
    """An engine with reproducible drafts: it learns nothing from earlier texts."""
    given = KINDS[kind]
    if kind in dflash.FOR_TINY_PAIR:
        raw = dflash.FOR_TINY_PAIR[kind]
        folder = dflash.write(tmp_path_factory.mktemp(kind), dflash.make_model(raw), raw)
        given = given | {"model": str(folder)}
    return shared_engine({"num_speculative_tokens": 24, **given})


@pytest.fixture
def served(engine, monkeypatch):
    """Serve one text; return its cached tokens, the drafts and the output."""
    drafts = record_drafts(engine, monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def serve(text: list[int]) -> tuple[int, list[list[int]], list[int]]:
        drafts.clear()
        (answer,) = engine.llm.generate([{"prompt_token_ids": text}], greedy, use_tqdm=False)
        return answer.num_cached_tokens, list(drafts), list(answer.outputs[0].token_ids)

    return serve


def two_texts() -> tuple[list[int], list[int]]:
    """Two texts with a common prefix of two blocks, different from the next token on."""
    draw = random.Random(3)
    prefix, *ends = ([draw.randrange(3, 2048) for _ in range(n)] for n in (2 * BLOCK, 9, 9))
    assert ends[0][0] != ends[1][0]
    return [*prefix, *ends[0]], [*prefix, *ends[1]]


def test_a_repeated_prompt(kind, served):
    """Plain vLLM recomputes the tokens after the last full block."""
    text = (two_texts()[0] + two_texts()[1])[:101]
    first, again = served(text), served(text)
    assert again == (96 if kind in WITHOUT_DROP else 64, *first[1:])


@pytest.mark.parametrize("same", [False, True], ids=["another token", "the same token"])
def test_the_block_before_a_token(kind, engine, served, same):
    """Where a drafter's row holds the token after its own, that block is not taken. Up to 0.32
    vLLM gives a request all blocks that are there but the last; from 0.33 on a block's hash covers
    the token after it."""
    first, second = two_texts()
    if same:
        second = [*first[: 2 * BLOCK + 1], *second[2 * BLOCK + 1 :]]
    engine.llm.reset_prefix_cache()
    alone = served(second)
    engine.llm.reset_prefix_cache()
    served(first)
    after = served(second)
    ahead = same and getattr(engine.core.vllm_config, "num_hash_lookahead_tokens", 0)
    taken = 2 * BLOCK if ahead or kind in WITHOUT_DROP else BLOCK
    assert (alone[0], after[0]) == (0, taken)
    assert after[1:] == alone[1:], "drafted with rows of another text"
