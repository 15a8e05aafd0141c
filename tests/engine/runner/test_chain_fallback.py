"""Which requests verify a chain."""

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_specblock.engine.request_drafts import looks_back

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


@pytest.mark.parametrize("given", [*CHAINS, *TREES])
def test_requests_whose_sampling_looks_back_verify_a_chain(given):
    assert looks_back(SamplingParams(**given)) == (given in CHAINS)
