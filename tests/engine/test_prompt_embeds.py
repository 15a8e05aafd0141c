"""Prompts given as embeddings get the same tokens as prompts given as ids."""

from __future__ import annotations

from safetensors.torch import load_file
from support.engines import TARGET, Engine, make_engine
from support.matrix import PROMPTS, params


def test_same_tokens_as_the_prompt_in_ids(plain: Engine):
    """Both kinds of prompts share a batch; long ones are chunked."""
    engine = make_engine(
        {
            "num_speculative_tokens": 12,
            "second_drafter": {"kind": "ngram"},
            "draft_policy": "merge",
        },
        enable_prompt_embeds=True,
        max_num_batched_tokens=96,
    )
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    texts = PROMPTS[:6]
    requests = [
        {"prompt_token_ids": text} if index % 3 == 0 else {"prompt_embeds": table[text]}
        for index, text in enumerate(texts)
    ]
    for temperature in (0.0, 1.0):
        asked = params(len(texts), temperature=temperature, max_tokens=24)
        found = engine.llm.generate(requests, asked, use_tqdm=False)
        expected = plain.generate(texts, asked)
        assert [list(answer.outputs[0].token_ids) for answer in found] == [
            one.tokens for (one,) in expected
        ]
