"""Which requests verify a chain."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_specblock.engine.runner.chain_fallback import looks_back
from vllm_specblock.engine.runner.speculator import TreeSpeculator

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


def test_nothing_is_sampled():
    assert not looks_back(None)


def chains(all_chains: bool, *requests: tuple[int, SamplingParams | None]) -> list[bool]:
    """Which of three slots verify a chain after these requests."""
    state = SimpleNamespace(
        temperature=torch.zeros(3),
        chains=np.zeros(3, dtype=bool),
        undrafted=np.zeros(3, dtype=bool),
        all_chains=all_chains,
        adaptive=None,
        draft_policy=SimpleNamespace(begin=lambda slot: None),
        skipped=SimpleNamespace(begin_request=lambda slot: None),
    )
    for slot, params in requests:
        TreeSpeculator.note_request(state, slot, params)
    return state.chains.tolist()


def test_a_slot_is_its_last_requests():
    back = SamplingParams(repetition_penalty=1.1)
    requests = [(0, back), (2, back), (2, SamplingParams()), (1, None)]
    assert chains(False, *requests) == [True, False, False]


def test_processors_of_the_users_make_chains_of_all():
    assert chains(True, (0, SamplingParams())) == [True, False, False]
