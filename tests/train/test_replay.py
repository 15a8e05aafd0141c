from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_specblock.draft.expand import Shape
from vllm_specblock.train.answers import continue_prompts
from vllm_specblock.train.features import teach
from vllm_specblock.train.replay import acceptance, replay

CHAIN = Shape(block_size=4, num_blocks=1, num_starts=1, branching=(1, 1, 1, 1), budget=4)
CHAINS = Shape(block_size=4, num_blocks=2, num_starts=1, branching=(1, 1, 1, 1), budget=8)
WIDE = Shape(block_size=4, num_blocks=2, num_starts=4, branching=(3, 3, 3, 3), budget=40)


@pytest.fixture
def target():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def scene(target, lucky):
    drafter, text = lucky(1, 40)
    teaching = teach(target, text, (2, 3, 4), drafter.t2d.nonzero()[:, 0])
    embed = target.get_input_embeddings()

    def run(shape, prompt=5):
        return replay(drafter, embed, teaching.hidden[0], text[0], prompt, shape)

    return drafter, target, text[0], run


def chain_by_rows(drafter, target, text, cut):
    """Accepted chain length at every row, from training's form of the same drafting."""
    from vllm_specblock.train.objective import Unroll

    teaching = teach(target, text[None], (2, 3, 4), drafter.t2d.nonzero()[:, 0])
    unroll = Unroll(drafter, target.get_input_embeddings(), text[None], teaching)
    blocks = unroll.objective([cut] if cut else [], rank=False).blocks
    return blocks


@torch.no_grad()
def test_a_chain_follows_what_training_saw(scene):
    drafter, target, text, run = scene
    right = chain_by_rows(drafter, target, text, None)[0].hit.sum(1).tolist()
    expected, root = [], 5
    while root + 5 < len(text):
        expected.append(right[root - 1])
        root += expected[-1] + 1
    assert run(CHAIN).accepted == expected
    assert len(set(expected)) > 2  # paths of several lengths


@torch.no_grad()
def test_more_blocks_and_wider_trees_accept_no_less(scene):
    *_, run = scene
    chain, chains, wide = run(CHAIN), run(CHAINS), run(WIDE)
    assert chains.accepted[0] >= chain.accepted[0]
    assert wide.tau >= chains.tau > 1
    assert max(chains.accepted) > 4  # a second block was followed


def test_tau_counts_the_bonus(scene):
    *_, run = scene
    result = run(CHAIN)
    assert result.tau == 1 + sum(result.accepted) / len(result.accepted)


def test_three_blocks_are_refused(scene):
    *_, run = scene
    with pytest.raises(ValueError, match="one or two blocks, not 3"):
        run(Shape(4, 3, 1, (1, 1, 1, 1), 12))


@torch.no_grad()
def test_acceptance_counts_rows_after_the_prompt(scene):
    drafter, target, text, _ = scene
    blocks = chain_by_rows(drafter, target, text, 4)
    first = blocks[0]
    expected = [(first.hit[9:, k].sum() / first.on_path[9:, k].sum()).item() for k in range(4)]
    alpha = acceptance(drafter, target, [text], [10], (2, 3, 4))
    assert alpha[0] == pytest.approx(expected)
    assert len(alpha) == 2 and 0 < alpha[1][0] < 1


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
        assert short[5:].tolist() == new[: new.index(end) + 1] if end in new else new


def test_sampled_answers_are_seeded(target):
    prompts = [torch.tensor([3, 4, 5])]
    drawn = [
        continue_prompts(target, prompts, 12, temperature=1.0, seed=seed)[0].tolist()
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
