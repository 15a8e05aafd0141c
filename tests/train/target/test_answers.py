"""The target's own continuations, against its plain forward."""

from __future__ import annotations

import pytest
import torch
from support.targets import tiny_target

from vllm_specblock.train.target.answers import continue_prompts

target = pytest.fixture(tiny_target)


@torch.no_grad()
def test_answers_are_the_targets_greedy_text(target):
    prompts = [torch.randint(20, (length,)) for length in (3, 7, 4)]
    for prompt, text in zip(prompts, continue_prompts(target, prompts, 6, batch=2)):
        expected = prompt
        for _ in range(6):
            choice = target(input_ids=expected[None]).logits[0, -1].argmax()
            expected = torch.cat([expected, choice[None]])
        assert text.tolist() == expected.tolist()


@torch.no_grad()
def test_an_answer_ends_with_its_end_of_sequence(target):
    prompts = [torch.randint(20, (5,)) for _ in range(8)]
    endless = continue_prompts(target, prompts, 6)
    end = endless[0][7].item()
    target.generation_config.eos_token_id = end
    for long, short in zip(endless, continue_prompts(target, prompts, 6)):
        new = long[5:].tolist()
        expected = new[: new.index(end) + 1] if end in new else new
        assert short[5:].tolist() == expected


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_answers_follow_the_targets_law(target, temperature):
    prompt, count, before = torch.tensor([3, 4, 5]), 2000, torch.get_rng_state()
    texts = continue_prompts(target, [prompt] * count, 1, temperature=temperature, batch=count)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.stack(texts)[:, -1].bincount(minlength=20)
    expected = count * (target(prompt[None]).logits[0, -1] / temperature).softmax(-1)
    assert ((drawn - expected).square() / (expected + 1)).sum() < 45  # χ² of 19: 0.1 %
