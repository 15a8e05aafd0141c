"""Which requests verify a chain."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_specblock.engine.runner.speculator import TreeSpeculator

CHAINS = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"bad_words": ["def"]},
    {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")},
    {"thinking_token_budget": 8},
)
TREES = (
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7},
    {"logit_bias": {3: 1.5}, "allowed_token_ids": [3, 4], "min_tokens": 5, "logprobs": 2},
)


@pytest.mark.parametrize("all_chains", [False, True], ids=["", "a processor of the user"])
def test_requests_whose_sampling_looks_back_verify_a_chain(all_chains):
    state = SimpleNamespace(
        temperature=torch.zeros(1),
        chains=np.zeros(1, dtype=bool),
        undrafted=np.zeros(1, dtype=bool),
        all_chains=all_chains,
        adaptive=None,
        draft_policy=SimpleNamespace(begin=lambda slot: None),
        skipped=SimpleNamespace(backlog=None),
    )
    expected = [True] * len(CHAINS) + [all_chains] * (len(TREES) + 1)
    for params, chain in zip([*(SamplingParams(**x) for x in (*CHAINS, *TREES)), None], expected):
        TreeSpeculator.note_request(state, 0, params)
        assert state.chains[0] == chain, params
