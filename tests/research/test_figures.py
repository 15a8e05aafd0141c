"""The paper's figures on the example pair, α_k by hand, and who takes part in the comparison."""

from __future__ import annotations

import json

import drafter_zoo
import pytest
import torch
from comparison import Comparison, uniform_shape
from figures import figures
from paper_measure import MainPathFigures, main_path
from support.records import HIDDEN, small_drafter
from support.scripts import EAGLE3, SPECBLOCK, TARGET, command
from support.training import short_run, write_pair
from support.trees import texts

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.eval.steps import Step
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.run import prepare


def step(parent: list[int], accepted: list[int]) -> Step:
    """A tree of nodes 1, 2, … in descending order of score; tokens do not matter."""
    count = len(parent) + 1
    score = [-0.1 * node for node in range(count)]
    return Step(0, list(range(count)), [-1, *parent], score, [0] * count, [0, *accepted], 99)


def test_the_main_path_is_the_best_child_of_every_node():
    tree = step([0, 0, 2, 1, 3, 4, 4, 6], [])
    assert main_path(tree) == [1, 4, 6, 8]
    assert main_path(step([], [])) == []


def test_alpha_k_counts_the_main_path_alone():
    parent = [0, 0, 1, 3, 2, 4]  # main path 1, 3, 4, 6
    whole = step(parent, [1, 3, 4, 6])
    short = step(parent, [1, 3])  # 4 is wrong
    aside = step(parent, [2, 5])  # 1 is wrong, though two tokens are accepted
    early = step([0, 1], [1, 2])  # right to its end, a chain of two
    found = MainPathFigures.of([whole, short, aside, early], depth=5)
    assert found.reached == [4, 3, 2, 1, 0]
    assert found.hits == [3, 3, 1, 1, 0]
    assert found.alpha == [3 / 4, 1, 1 / 2, 1, None]


def test_every_figure_is_drawn_and_its_numbers_are_kept(tmp_path):
    pytest.importorskip("matplotlib")
    for name, prompts in {"a": ["class Reader:\n"], "b": ["import os\n", "import sys\n"]}.items():
        # As benchmarks have them: questions without answers.
        lines = [json.dumps({"turns": [prompt, "And then?"]}) + "\n" for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    out = tmp_path / "new" / "figures"
    drafters = "--drafter", f"blocks={SPECBLOCK}", "--drafter", f"levels={EAGLE3}"
    questions = "--set", f"a={tmp_path}/a.jsonl", "--set", f"b={tmp_path}/b.jsonl", "--raw"
    sizes = "--nodes", 16, "--new-tokens", 40, "--tokens", 12
    case = "--case", "class Codec(codecs.Codec):\n"
    given = (*drafters, *questions, *sizes, *case)
    result = command(figures, "--target", TARGET, *given, "--out", out)
    assert result.exit_code == 0, result.output
    for name in ("fig5a_alpha", "fig5b_alpha_blocks"):
        assert (out / f"{name}.png").read_bytes()[1:4] == b"PNG"
    for name in ("fig6_text", "fig7_trees"):
        assert (out / f"{name}.svg").read_text().startswith("<svg")
    whole = json.loads((out / "figures.json").read_text())
    assert whole["sets"]["b"]["prompts"] == 2 and "torch" in whole["versions"]
    blocks, levels = whole["drafters"]["blocks"], whole["drafters"]["levels"]
    assert (blocks["kind"], levels["kind"]) == ("specblock", "eagle3")
    # Two blocks of four; a tree of 16 nodes grows four levels.
    assert (len(blocks["alpha"]), len(levels["alpha"])) == (8, 4) and levels["alpha_mj"] is None
    for found in blocks["sets"].values():
        # Both chains begin with block 1's first choice, at the roots of the same steps.
        path, chain = found["main_path"], found["chain"]
        assert path["alpha"][0] == chain["alpha_mj"][0][0]
        assert path["reached"][0] == chain["positions"][0] == found["steps"]
    mean = sum(blocks["sets"][name]["tau"] for name in "ab") / 2
    assert blocks["tau"] == pytest.approx(mean)
    case = whole["case"]["drafters"]
    shaded = {name: [token["text"] for token in each["tokens"]] for name, each in case.items()}
    assert shaded["blocks"] == shaded["levels"] and len(shaded["blocks"]) == 12
    assert case["blocks"]["tokens"][0]["origin"] == "prefill"
    for each in case.values():
        tree = each["tree"]
        assert len(tree["text"]) == len(tree["parent"]) == len(tree["forward"]) == 17
        accepted = [tree["text"][node] for node in tree["accepted"]]
        shown = [token["text"] for token in each["tokens"]]
        assert [*accepted, tree["bonus"]] == shown[: len(accepted) + 1]


@pytest.fixture(scope="module")
def footing(tmp_path_factory):
    """What a comparison's drafters are made for."""
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    given = {"out": folder / "out", "prompts": folder / "none.jsonl", "loss_floor": 0.5}
    config = short_run(folder, Comparison, **given)
    return drafter_zoo.Footing(config, prepare(config, torch.device("cpu"), 6))


@pytest.mark.parametrize("name", drafter_zoo.EVERYONE)
def test_every_drafter_is_made_of_about_one_size(footing, name):
    wanted = drafter_zoo.parameters(drafter_zoo.make("specblock", footing))
    made = drafter_zoo.parameters(drafter_zoo.make(name, footing))
    assert name in drafter_zoo.ABLATIONS or made == pytest.approx(wanted, rel=0.5)


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
