"""Which requests verify a chain."""

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_specblock.engine.runner.chain_fallback import ChainFallback, looks_back

LOOK_BACK = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"bad_words": ["def"]},
    {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")},
    {"thinking_token_budget": 8},
)
DO_NOT = (
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7},
    {"logit_bias": {3: 1.5}, "allowed_token_ids": [3, 4], "min_tokens": 5, "logprobs": 2},
)


@pytest.mark.parametrize("given", LOOK_BACK, ids=lambda given: next(iter(given)))
def test_samplings_that_look_back(given):
    assert looks_back(SamplingParams(**given))


@pytest.mark.parametrize("given", DO_NOT, ids=lambda given: ",".join(given) or "default")
def test_samplings_of_one_position(given):
    assert not looks_back(SamplingParams(**given))


def test_a_slot_is_its_last_requests():
    chains = ChainFallback(3)
    chains.note(0, SamplingParams(repetition_penalty=1.1))
    chains.note(2, SamplingParams(repetition_penalty=1.1))
    chains.note(2, SamplingParams())
    chains.note(1, None)  # nothing is sampled for it
    assert chains.among(np.array([2, 0, 1, 0])).tolist() == [False, True, False, True]


def test_processors_of_the_users_make_chains_of_all():
    chains = ChainFallback(2)
    chains.everyone = True
    chains.note(0, SamplingParams())
    assert chains.among(np.array([0, 1])).tolist() == [True, False]
