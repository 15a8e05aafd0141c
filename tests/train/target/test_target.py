"""The target's continuations and features, online and on disk; no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.targets import tiny_target

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.batch import Batch, Segment
from vllm_specblock.train.target import feature_store, target_rows
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.feature_store import Features, FeatureStore, Origin
from vllm_specblock.train.target.features import StoredTeacher

model = pytest.fixture(tiny_target)


@torch.no_grad()
def test_answers_are_the_targets_greedy_text(model):
    prompts = [torch.randint(20, (length,)) for length in (3, 7, 4)]
    for prompt, text in zip(prompts, continue_prompts(model, prompts, 6, batch=2)):
        expected = prompt
        for _ in range(6):
            choice = model(input_ids=expected[None]).logits[0, -1].argmax()
            expected = torch.cat([expected, choice[None]])
        assert text.tolist() == expected.tolist()


@torch.no_grad()
def test_an_answer_ends_with_its_end_of_sequence(model):
    prompts = [torch.randint(20, (5,)) for _ in range(8)]
    endless = continue_prompts(model, prompts, 6)
    end = endless[0][7].item()
    model.generation_config.eos_token_id = end
    for long, short in zip(endless, continue_prompts(model, prompts, 6)):
        new = long[5:].tolist()
        expected = new[: new.index(end) + 1] if end in new else new
        assert short[5:].tolist() == expected


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_answers_follow_the_targets_law(model, temperature):
    prompt, count, before = torch.tensor([3, 4, 5]), 2000, torch.get_rng_state()
    texts = continue_prompts(model, [prompt] * count, 1, temperature=temperature, batch=count)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.stack(texts)[:, -1].bincount(minlength=20)
    expected = count * (model(prompt[None]).logits[0, -1] / temperature).softmax(-1)
    assert ((drawn - expected).square() / (expected + 1)).sum() < 45  # χ² of 19: 0.1 %


HIDDEN, VOCAB, LENGTH = 6, 30, 8
SIZES = [19, 3, 8, 1, 30, 5, 11]
DRAFT_IDS = torch.tensor([2, 3, 11, 29])


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def sequences() -> list[torch.Tensor]:
    ids = torch.randint(VOCAB, (sum(SIZES),), generator=torch.Generator().manual_seed(1))
    return list(ids.int().split(SIZES))


@pytest.fixture
def target(tmp_path) -> Path:
    """A target of two files, with an LM head of its own."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    names = {}
    for number, name in enumerate(["model.embed_tokens.weight", "lm_head.weight"]):
        file = names[name] = f"model-{number}.safetensors"
        safetensors.torch.save_file({name: draw(VOCAB, HIDDEN, seed=number)}, folder / file)
    index = {"weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def origin(sequences, target) -> Origin:
    return Origin(
        target=target_rows.fingerprint(target),
        data=feature_store.fingerprint(sequences),
        layer_ids=(1, 2, 3),
        dtype="float32",
        length=LENGTH,
        shard_tokens=10,
    )


def features_of(tokens: torch.Tensor) -> Features:
    """Made from a piece's own tokens and places alone, so that a mix-up shows."""
    place = torch.arange(len(tokens))
    hidden = torch.stack([tokens * 1000 + place * 10 + c for c in range(3 * HIDDEN)], dim=-1)
    last = torch.stack([torch.sin(tokens * 3.0 + place + c) for c in range(HIDDEN)], dim=-1)
    return Features(hidden.float(), last)


def extract(texts):
    return map(features_of, texts)


@pytest.fixture
def folder(tmp_path, sequences, origin) -> Path:
    folder = tmp_path / "features"
    feature_store.fill(folder, origin, sequences, extract)
    return folder


def test_the_beginning_of_a_piece_can_be_read(folder, sequences):
    features, tokens = FeatureStore(folder).read(Segment(4, 8, 5))
    whole = features_of(sequences[4][8:16].long())
    assert torch.equal(features.last, whole.last[:5])
    assert torch.equal(features.hidden, whole.hidden[:5])
    assert torch.equal(tokens, sequences[4][8:13])


@pytest.mark.parametrize(
    ("config", "has_head", "row_of"),
    [
        ({"tie_word_embeddings": True}, True, 0),  # a head is there, but the model ignores it
        ({}, True, 1),
        ({}, False, 0),
        ({"text_config": {"tie_word_embeddings": True}}, True, 0),
    ],
)
def test_head_of_tied_targets(tmp_path, config, has_head, row_of):
    weights = {"a.embed_tokens.weight": draw(VOCAB, HIDDEN, seed=0)}
    if has_head:
        weights["lm_head.weight"] = draw(VOCAB, HIDDEN, seed=1)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = target_rows.head_rows(tmp_path, DRAFT_IDS)
    assert torch.equal(found, draw(VOCAB, HIDDEN, seed=row_of)[DRAFT_IDS])


def test_after_a_stop_it_goes_on_at_the_first_missing_shard(tmp_path, origin, sequences):
    stopped, unbroken = tmp_path / "stopped", tmp_path / "unbroken"
    calls: list[int] = []

    def counted(texts):
        calls.append(len(texts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return extract(texts)

    with pytest.raises(KeyboardInterrupt):
        feature_store.fill(stopped, origin, sequences, counted)
    with pytest.raises(TrainError, match="with the same options, it resumes"):
        FeatureStore(stopped)
    assert len(list(stopped.glob("features-*.safetensors"))) == 3
    on_disk: list[int] = []
    feature_store.fill(stopped, origin, sequences, counted, on_disk.append)
    again = len(calls) - 1
    feature_store.fill(unbroken, origin, sequences, counted)
    assert len(calls) - 1 == 2 * again and sum(on_disk) == sum(SIZES)
    files = {path.name: path.read_bytes() for path in unbroken.iterdir()}
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == files
    assert feature_store.UNFINISHED not in files


def test_features_of_something_else_are_refused(folder, target, origin):
    expected = {"layer_ids": origin.layer_ids, "length": LENGTH, "data": origin.data}
    StoredTeacher(folder, target, DRAFT_IDS, "cpu", torch.float32, **expected)
    for changes, said in (
        ({"layer_ids": (1, 2, 4)}, r"layer_ids = \[1, 2, 3\], not \[1, 2, 4\]"),
        ({"length": 16}, "length = 8, not 16"),
        ({"data": "else"}, "different data"),
    ):
        with pytest.raises(TrainError, match=said):
            StoredTeacher(folder, target, DRAFT_IDS, "cpu", torch.float32, **changes)
    (target / "config.json").write_text("{}")
    with pytest.raises(TrainError, match="different target"):
        StoredTeacher(folder, target, DRAFT_IDS, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (Segment(0, 4, 4), "lack tokens 4 to .* 0:"),
        (Segment(7, 0, 3), "lack tokens 0 to .* 7:"),
        (Segment(1, 0, 4), "lack tokens 0 to .* 1:"),
        (Segment(2, 0, LENGTH), "other data"),
    ],
)
def test_a_piece_that_is_not_there_or_has_other_tokens(folder, target, segment, said):
    batch = replace(Batch.of(torch.ones(1, LENGTH, dtype=torch.int64)), segments=((segment,),))
    teacher = StoredTeacher(folder, target, DRAFT_IDS, "cpu", torch.float32)
    with pytest.raises(TrainError, match=said):
        teacher.teach(batch)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("features-00002.safetensors", "is not a readable safetensors"),
        ("features.json", "is damaged, but must be a JSON object with shards, sequences"),
    ],
)
def test_a_damaged_file(folder, name, said):
    (folder / name).write_bytes(b"{")
    with pytest.raises(TrainError, match=f"{name} {said}"):
        FeatureStore(folder)


def test_a_target_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors file"):
        target_rows.embedding_rows(tmp_path)
    with pytest.raises(TrainError, match="cannot be read"):
        target_rows.fingerprint(tmp_path / "nowhere")
