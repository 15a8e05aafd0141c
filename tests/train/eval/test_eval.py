"""Evaluation: trees as served, chains, steps of replay."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from support import committed
from support.eagle3 import small_eagle3
from support.records import small_drafter
from support.scripts import EAGLE3, SPECBLOCK, TARGET
from support.trees import texts, to_tree
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.config import OptionError
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.options import Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.chain import ChainFigures, bucket_figures, chain_along
from vllm_specblock.train.eval.drafting import chain_shape, draft_trees, serving_shape
from vllm_specblock.train.eval.evaluate import evaluate, sequences_for, shapes_of
from vllm_specblock.train.eval.loaded import load_drafter, pair
from vllm_specblock.train.eval.steps import replay, steps_along
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target, load_tokenizer

LENGTH, PAGE, PAGES, VOCAB, HIDDEN = 40, 8, 12, 20, 32
ROOTS = (6, 7, 11, 20)
WIDE = {"num_blocks": 3, "num_starts": 3, "branching": [8, 8, 8, 8]}


def with_sequence(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
    embedding = torch.randn(VOCAB, HIDDEN)
    return drafter.eval(), EvalSequence(
        torch.randint(VOCAB, (LENGTH,)),
        6,
        torch.randn(LENGTH, 3 * HIDDEN),
        torch.randn(LENGTH, HIDDEN),
        lambda tokens: embedding[tokens],
    )


def eagle3(own_embedding: bool = False):
    return small_eagle3(own_embedding, vocab_size=VOCAB, draft_vocab_size=14)


@pytest.mark.parametrize(
    ("model", "options", "nodes"),
    [
        (small_drafter, SpecBlockConfig(), 60),
        (small_drafter, SpecBlockConfig(calibrate_drafts=False), 60),
        (partial(small_drafter, block_rope="path"), SpecBlockConfig(**WIDE), 60),
        (small_drafter, SpecBlockConfig(num_blocks=3), 5),  # fewer slots than starts
        (partial(eagle3, True), Eagle3Config(), 60),
        (eagle3, Eagle3Config(depth=4, top_k=3), 20),
        (eagle3, Eagle3Config(), 5),  # fewer slots than levels times rows
    ],
)
@torch.no_grad()
def test_it_drafts_what_serving_drafts(model, options, nodes):
    """Serving: a greedy request of the head, which is committed up to each of ROOTS in turn."""
    drafter, sequence = with_sequence(model())
    calibration = DraftCalibration("cpu") if options.calibrate_drafts else None
    draft = draft_trees(drafter, sequence, serving_shape(drafter, options, nodes), calibration)
    levels = isinstance(options, Eagle3Config)
    kind, layers, entries = (Eagle3Drafter, 1, 1) if levels else (SpecBlockDrafter, 2, 4)
    head = kind(drafter, sequence.embed, options, nodes, max_model_len=96)
    caches = [torch.randn(PAGES + 1, PAGE * entries, 2, 16).transpose(1, 2) for _ in range(layers)]
    head.bind(caches)  # noise in the caches: nothing of it may be seen
    served = committed.served_trees(head, sequence, ROOTS, PAGES, PAGE)
    for root, wanted in zip(ROOTS, (texts(tree, 0) for tree in served)):
        tree = draft(root)
        found = texts(tree, 0)
        assert list(found) == list(wanted)
        assert list(found.values()) == pytest.approx(list(wanted.values()), abs=1e-4)
        if levels:  # a level is a forward
            size = int(tree.size[0])
            assert draft.forwards().tolist()[:size] == [len(text) for text in found]
            assert not draft.forwards()[size:].any()
    if calibration is not None:
        assert calibration.trees.tolist() == [len(ROOTS) - 1, 0]


def test_a_chain_is_the_best_token_of_every_position():
    drafter, sequence = with_sequence(small_drafter())
    tree = draft_trees(drafter, sequence, chain_shape(drafter, 3))(9)
    assert tree.parent[0].tolist() == list(range(12))
    wide = draft_trees(drafter, sequence, TreeShape(4, 3, 1, (5, 5, 5, 5), 200))(9)
    assert tuple(tree.token[0].tolist()) in texts(wide, 0)


DRAFTERS = {"specblock": SPECBLOCK, "eagle3": EAGLE3}


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
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 192, "vocab_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 6}'
    )
    with pytest.raises(CheckpointError, match=r"\[2, 3, 4\], but .* has only layers 0 to 2"):
        pair(EAGLE3, tmp_path)
    with pytest.raises(TrainError, match="kind 'eagle3', but must be specblock here"):
        pair(EAGLE3, TARGET, ["specblock"])
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    with pytest.raises(TrainError, match="kind 'dflash', but must be specblock or eagle3 here"):
        pair(tmp_path, TARGET)
    with pytest.raises(OptionError, match="num_blocks"):
        pairing = pair(SPECBLOCK, TARGET)
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


K, PROMPT, LONG = 4, 5, 90


@pytest.fixture
def scene(lucky):
    """A drafter and two texts; the rank head's guesses vary."""

    def make(**changes):
        drafter, tokens = lucky(2, LONG, **changes)
        with torch.no_grad():
            drafter.rank_head[2].weight.normal_(std=3.0)
            for weight in drafter.layers.parameters():
                if weight.dim() > 1:  # so that attention matters to the first choice
                    weight.normal_(std=0.3)
        embedding = torch.randn(20, 32)
        hidden = torch.randn(2, LONG, 96)
        sequences = [
            EvalSequence(text, PROMPT, states, torch.empty(LONG, 0), lambda ids: embedding[ids])
            for text, states in zip(tokens, hidden)
        ]
        return drafter.eval(), sequences

    return make


def flat(rows: list[list]) -> list:
    return [value for row in rows for value in row]


def judge(drafter, hidden, token: int):
    logits, rank_logits = drafter.heads(hidden)
    best = logits.argsort(descending=True)
    ranked = (best + drafter.d2t[best]).tolist()
    bucket = None
    if token in ranked:
        rank = ranked.index(token) + 1
        bucket = 0 if rank == 1 else 1 if rank <= 4 else 2 if rank <= 10 else 3
    return ranked[0] == token, bucket, int(rank_logits.argmax())


@pytest.mark.parametrize("changes", [{}, {"block_rope": "path"}])
@torch.no_grad()
def test_chain_figures_are_those_of_a_naive_loop(scene, inference, changes):
    drafter, sequences = scene(**changes)
    blocks = 3
    # A short one, and one of more roots than are drafted together.
    sequences = [sequences[0], dataclasses.replace(sequences[1], tokens=sequences[1].tokens[:60])]
    counts = [[0, 0] for _ in range(blocks * K)]
    confusion = [[0] * 4 for _ in range(4)]
    for sequence in sequences:
        tokens = sequence.tokens
        rows = inference(drafter, sequence.embed, tokens, sequence.hidden)
        for row, states in list(rows.blocks([K] * (blocks - 1)))[PROMPT - 1 : -1]:
            places = zip(torch.cat(states), tokens[row + 2 :].tolist())
            judged = [judge(drafter, state, token) for state, token in places]
            hits = [hit for hit, *_ in judged]
            for k, (hit, bucket, guess) in enumerate(judged):
                if all(hits[:k]):
                    counts[k][0] += hit
                    counts[k][1] += 1
                    if bucket is not None:
                        confusion[bucket][guess] += 1
    figures = ChainFigures.of([chain_along(drafter, s, blocks) for s in sequences], K)
    assert figures.alpha == [a / b if b else None for a, b in counts]
    assert figures.positions == [b for _, b in counts]
    assert flat(figures.alpha_mj) == figures.alpha and len(figures.alpha_mj) == blocks
    assert figures.rank == bucket_figures(torch.tensor(confusion))
    assert figures.rank_positions == sum(map(sum, confusion))
    assert figures.positions[K] > 2
    assert sum(map(bool, flat(confusion))) > 6  # many kinds of right and wrong


def test_bucket_figures_count_as_precision_and_recall_do():
    truth, guess = [0, 0, 0, 1, 1, 3, 3, 3], [0, 0, 1, 1, 0, 3, 1, 0]
    confusion = [[0] * 4 for _ in range(4)]
    for true, guessed in zip(truth, guess):
        confusion[true][guessed] += 1
    first, second, third, last = (
        tuple(bucket.values()) for bucket in bucket_figures(torch.tensor(confusion))
    )
    assert first == pytest.approx((3 / 8, 2 / 4, 2 / 3, 4 / 7))
    assert second == pytest.approx((2 / 8, 1 / 3, 1 / 2, 2 / 5))
    assert third == (0.0, None, None, None)
    assert last == pytest.approx((3 / 8, 1.0, 1 / 3, 1 / 2))


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_figures_of_several_trees_in_one_pass(scene, temperature):
    """Every shape learns its own sharpness from text to text, where there is a temperature."""
    drafter, sequences = scene()
    shapes = shapes_of(drafter, SpecBlockConfig(num_starts=3), (12, 30))
    chains = ["chain of 1 block", "chain of 2 blocks"]
    assert list(shapes) == [*chains, "tree of 12", "tree of 30"]
    figures = evaluate(drafter, iter(sequences), shapes, 2, temperature)
    assert (figures.texts, figures.new_tokens) == (2, 2 * (LONG - PROMPT))
    for name, shape in shapes.items():
        beta = None if temperature is None else DraftCalibration("cpu", num_slots=1)
        how = shape, beta, temperature or 0.0
        whole = replay(lambda s, how=how: draft_trees(drafter, s, *how), sequences, 8)
        found, steps = figures.trees[name], len(whole.accepted)
        assert (found.tau, found.steps) == (whole.tau, steps)
        if beta is not None:
            assert found.sharpness == float(beta.of(torch.tensor([temperature])))
            # The outcome of a text's last step is not known.
            assert int(beta.trees.sum()) == steps - len(sequences)
    trees = figures.trees
    assert trees["tree of 30"].tau > trees["chain of 2 blocks"].tau > 1.3
    assert (trees["chain of 2 blocks"].nodes, trees["tree of 12"].nodes) == (8, 12)
    if temperature is not None:
        assert trees["tree of 12"].sharpness != trees["tree of 30"].sharpness
    text = json.dumps(figures.as_json(), allow_nan=False)
    assert json.loads(text)["chain"]["rank"][0].keys() == {"frequency", "precision", "recall", "f1"}
