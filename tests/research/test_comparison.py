"""The controlled comparison: who takes part, and trees of one width."""

from __future__ import annotations

import drafter_zoo
import pytest
import torch
from comparison import Comparison, uniform_shape
from support.records import HIDDEN, small_drafter
from support.training import write_pair
from support.trees import texts

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.run import prepare


@pytest.fixture(scope="module")
def footing(tmp_path_factory):
    """What a comparison's drafters are made for."""
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    config = parse(
        Comparison,
        target=folder / "target",
        data=folder / "d.safetensors",
        out=folder / "out",
        prompts=folder / "none.jsonl",
        draft_vocab_size=20,
        length=24,
        loss_floor=0.5,
        precision="fp32",
        device="cpu",
    )
    return drafter_zoo.Footing(config, prepare(config, torch.device("cpu"), 6))


@pytest.mark.parametrize("name", drafter_zoo.EVERYONE)
def test_every_drafter_is_made_of_about_one_size(footing, name):
    wanted = drafter_zoo.parameters(drafter_zoo.make("specblock", footing))
    made = drafter_zoo.parameters(drafter_zoo.make(name, footing))
    assert name in drafter_zoo.ABLATIONS or made == pytest.approx(wanted, rel=0.5)


def test_an_unknown_drafter_is_one_sentence(footing):
    with pytest.raises(TrainError, match=r"'unknown'; there are specblock, .*, EAGLE-3, "):
        drafter_zoo.make("unknown", footing)


@pytest.mark.parametrize(("blocks", "nodes"), [(2, 60), (3, 30), (1, 12)])
def test_a_uniform_tree_fills_its_budget_without_the_rank_head(blocks, nodes):
    drafter = small_drafter(0)
    embedding = torch.randn(drafter.config.vocab_size, HIDDEN)
    tokens, hidden = torch.randint(20, (40,)), torch.randn(40, 3 * HIDDEN)
    sequence = EvalSequence(tokens, 6, hidden, hidden[:, :HIDDEN], lambda ids: embedding[ids])
    shape = uniform_shape(serving_shape(drafter, SpecBlockConfig(num_blocks=blocks), nodes))
    assert len(set(shape.branching)) == 1 and shape.budget == nodes
    trees = []
    for favourite in range(4):
        with torch.no_grad():  # the rank head says the same bucket everywhere
            drafter.rank_head[2].weight.zero_()
            drafter.rank_head[2].weight[favourite] = 1.0
        trees.append(texts(draft_trees(drafter, sequence, shape)(12), 0))
    assert trees.count(trees[0]) == 4
    assert len(trees[0]) == nodes
