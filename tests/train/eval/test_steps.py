"""Recorded steps say what replay says, and loaded drafters draft what their heads would."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.trees import texts, to_tree

from vllm_specblock.config import OptionError
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import load_drafter, pair
from vllm_specblock.train.eval.steps import replay, steps_along
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target, load_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
TARGET = EXAMPLES / "tiny_pair" / "target"
DRAFTERS = {
    "specblock": EXAMPLES / "tiny_pair" / "drafter",
    "eagle3": EXAMPLES / "two_heads" / "eagle3",
}


@pytest.fixture(scope="module")
def text():
    target, tokenizer = load_target(TARGET, "fp32", torch.device("cpu")), load_tokenizer(TARGET)
    prompt = torch.tensor(tokenizer("class Codec(codecs.Codec):\n")["input_ids"])
    return target, continue_prompts(target, [prompt], 40), [len(prompt)]


@pytest.mark.parametrize(("kind", "forwards"), [("specblock", 3), ("eagle3", 5)])
def test_steps_are_those_of_replay(text, kind, forwards):
    target, texts, prompts = text
    pairing = pair(DRAFTERS[kind], TARGET)
    assert pairing.kind == kind
    drafter, again = (
        load_drafter(pairing, torch.float32, torch.device("cpu"), 20, forwards) for _ in range(2)
    )
    assert drafter.depth == {"specblock": 12, "eagle3": 5}[kind]
    (sequence,) = sequences_for(target, pairing.layer_ids, texts, prompts)
    steps = list(steps_along(drafter.along(sequence), sequence, drafter.depth))
    found = replay(again.along, [sequence], drafter.depth)
    assert [step.accepted_length for step in steps] == found.accepted
    assert [step.nodes for step in steps] == found.nodes
    tokens = sequence.tokens.tolist()
    for step, after in pairwise(steps):
        path = [step.token[node] for node in step.accepted]
        assert [*path, step.bonus] == tokens[step.root : after.root + 1]
        assert len(step.parent) == len(step.score) == len(step.forward) == len(step.token) == 21
        assert set(step.forward[1:]) <= set(range(1, forwards + 1)) and step.forward[0] == 0
        assert all(0 < step.probability(node) <= 1 for node in range(21))
    assert {number for step in steps for number in step.forward[1:]} == set(range(1, forwards + 1))


def test_what_does_not_belong_together_is_refused_before_weights_are_read(tmp_path):
    eagle3 = DRAFTERS["eagle3"]
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 192, "vocab_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 6}'
    )
    with pytest.raises(CheckpointError, match=r"\[2, 3, 4\], but .* has only layers 0 to 2"):
        pair(eagle3, tmp_path)
    with pytest.raises(TrainError, match="kind 'eagle3', but must be specblock here"):
        pair(eagle3, TARGET, ["specblock"])
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    with pytest.raises(TrainError, match="kind 'dflash', but must be specblock or eagle3 here"):
        pair(tmp_path, TARGET)
    with pytest.raises(OptionError, match="num_blocks"):
        pairing = pair(DRAFTERS["specblock"], TARGET)
        load_drafter(pairing, torch.float32, torch.device("cpu"), forwards=9)


DEPTH = 3


def script_of(tokens: list[int], prompt: int) -> EvalSequence:
    nothing = torch.empty(len(tokens), 0)
    return EvalSequence(torch.tensor(tokens), prompt, nothing, nothing, lambda ids: ids)


def drawn_tree(root: int):
    """A tree of up to DEPTH tokens of 0 and 1, another one at every root."""
    draw = torch.Generator().manual_seed(root)
    made: list[tuple[int, int]] = []
    depth = [0]
    for _ in range(6):
        parent = int(torch.randint(len(depth), (), generator=draw))
        if depth[parent] < DEPTH:
            made.append((parent, int(torch.randint(2, (), generator=draw))))
            depth.append(depth[parent] + 1)
    return to_tree([made], 8)


@pytest.mark.parametrize("prompt", [1, 5])
def test_replay_walks_as_a_naive_loop(prompt):
    tokens = torch.randint(2, (60,), generator=torch.Generator().manual_seed(9)).tolist()
    accepted, sizes, root = [], [], prompt
    while len(tokens[root + 1 :]) >= DEPTH + 1:
        tree = drawn_tree(root)
        paths = texts(tree, 0)
        count = 0
        while tuple(tokens[root + 1 : root + 2 + count]) in paths:
            count += 1
        accepted.append(count)
        sizes.append(int(tree.size[0]))
        root += 1 + count
    found = replay(lambda sequence: drawn_tree, [script_of(tokens, prompt)], DEPTH)
    assert (found.accepted, found.nodes) == (accepted, sizes)
    assert {0, 1, 2} <= set(accepted)
    assert found.tau == pytest.approx(1 + sum(accepted) / len(accepted))


def test_texts_without_a_step_are_an_error():
    with pytest.raises(TrainError, match="needs 5 tokens after the prompt"):
        replay(lambda sequence: drawn_tree, [script_of([0] * 6, 2)], DEPTH)
    assert len(replay(lambda sequence: drawn_tree, [script_of([0] * 7, 2)], DEPTH).accepted) == 1
