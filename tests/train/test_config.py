"""Options and recipes of the trainer: what is taken, and one sentence for what is not."""

from __future__ import annotations

import pytest

from vllm_specblock.train.config import RunConfig, TrainConfig, TrainError, parse, read_recipe

NEEDED = {"target": "T", "data": "D", "out": "O"}


def sentence(error: pytest.ExceptionInfo) -> str:
    """The message, if it is one sentence on one line."""
    text = str(error.value)
    assert "\n" not in text and text.endswith((".", "?")), text
    return text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quux": 4}, "There is no option quux."),
        ({"target": None}, "Option target: "),
        ({"steps": "many"}, "Option steps: "),
        ({"precision": "fp16"}, "Option precision: "),
        ({"layer_ids": [2, 4]}, "layer_ids"),
        ({"rank_topk": "most"}, "Option rank_topk"),
        ({"batch": 8, "micro_batch": 3}, "batch 8 is no multiple of micro_batch 3."),
        ({"length": 9, "block_size": 8}, "length 9 holds no whole block of 8 positions."),
    ],
)
def test_wrong_options_are_one_sentence(changes, says):
    with pytest.raises(TrainError) as error:
        parse(TrainConfig, **NEEDED | changes)
    assert says in sentence(error)


def test_missing_and_foreign_options_are_named():
    with pytest.raises(TrainError, match=r"^The option data is missing\.$"):
        parse(TrainConfig, target="T", out="O")
    with pytest.raises(TrainError, match="There is no option rank_from"):  # of SpecBlock alone
        parse(RunConfig, **NEEDED, rank_from=3)


def test_recipe_values_have_their_types(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "target: T\ndata: D\nout: O\n"
        "lr: 5e-4\n"  # no number in YAML 1.1, which wants 5.0e-4: a string that is one
        "layer_ids: [2, 5, 8]\nrank_topk: full\npack: no\nmicro_batch: 6\nhold_out: 3\n"
    )
    config = parse(TrainConfig, **read_recipe(path))
    assert config.lr == 5e-4
    assert (config.layer_ids, config.rank_topk) == ((2, 5, 8), "full")
    assert (config.pack, config.micro_batch, config.hold_out) == (False, 6, 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"lr: \xff\xfe\n", "is not YAML"),
        (b"- lr\n- 3\n", "must map options to values"),
        (b"", "must map options to values"),
        (None, "There is no recipe"),
    ],
)
def test_what_is_no_recipe_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainError, match=says) as error:
        read_recipe(path)
    assert "recipe.yaml" in sentence(error)


def test_a_resumed_run_shares_what_changes_the_numbers():
    one = parse(TrainConfig, **NEEDED)
    other = parse(TrainConfig, target="T2", data="D2", out="O2", minutes=3, save_every=7)
    assert one.must_match() == other.must_match()
    numbers = {"steps": 3, "batch": 8, "length": 64, "pack": False, "lr": 1.0, "warmup": 0.5}
    numbers |= {"clip": 1.0, "seed": 1, "precision": "fp32", "hold_out": 3, "num_blocks": 3}
    numbers |= {"rank_from": 1, "loss_floor": 0.0, "valid_prefix": False, "mask_restart": True}
    numbers |= {"weight_decay": 0.0, "block_size": 5, "rank_topk": 5, "optimizer": "muon"}
    for name, value in numbers.items():
        assert parse(TrainConfig, **NEEDED | {name: value}).must_match() != one.must_match(), name
