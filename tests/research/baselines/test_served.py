"""Baselines: what is saved, and that heads over paged caches draft as their learners do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from baselines.checkpoint import FILES
from baselines.eagle3 import Eagle3
from baselines.falcon import Falcon, FalconDrafter
from baselines.medusa import Medusa, MedusaDrafter
from baselines.parallelspec import ParallelSpec, ParallelSpecDrafter
from safetensors.torch import load_file
from support.baseline_batches import DRAFT_VOCAB, HIDDEN, TARGET_CONFIG, VOCAB, embed, vocabulary
from support.committed import advance, rows_of
from support.scripts import specblock
from support.trees import assert_same_tree, texts

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.model import FILES as EAGLE3
from vllm_specblock.drafters.registry import DRAFTERS
from vllm_specblock.train.learner import EvalSequence


def test_eagle3_is_saved_as_vllm_reads_it(tmp_path):
    d2t, t2d, named = vocabulary()
    learner, folder = Eagle3.for_target(TARGET_CONFIG, d2t, t2d, 0), tmp_path / "out"
    learner.save(folder)
    learner.save(folder)  # what is there is replaced
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    stored = load_file(folder / "model.safetensors")
    assert (torch.arange(DRAFT_VOCAB) + stored["d2t"]).tolist() == named
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["rope_theta"] == 10000.0
    loaded = EAGLE3.load(folder)
    assert loaded.config == learner.config
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, learner.state_dict()[name].bfloat16().to(weight.dtype)), name


def test_eagle3_that_names_every_token_is_saved_without_a_mapping(tmp_path):
    everything = torch.ones(VOCAB, dtype=torch.bool)
    d2t = torch.zeros(VOCAB, dtype=torch.int64)
    Eagle3.for_target(TARGET_CONFIG, d2t, everything, 0).save(tmp_path)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert EAGLE3.load(tmp_path).d2t.tolist() == [0] * VOCAB


PAGE, MAX_LEN, NODES, LAST = 16, 64, 20, 3
CASES = {
    "medusa": (Medusa, MedusaDrafter, {"num_heads": 3, "num_layers": 2, "budget": NODES}),
    "parallelspec": (ParallelSpec, ParallelSpecDrafter, {"block_size": 4, "budget": NODES}),
    "falcon, 2": (Falcon, FalconDrafter, {"block_size": 2, "lstm_layers": 2, "budget": NODES}),
    "falcon, 4": (Falcon, FalconDrafter, {"block_size": 4, "forwards": 2, "budget": NODES}),
}
READS = {"medusa": (LAST,)}
"""Which of the states a kind reads where it is not the first three."""


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """A learner, and the head that serves what it saved; the learner reads it back, too."""
    make, kind, sizes = CASES[request.param]
    d2t, t2d, _ = vocabulary()
    learner = make.for_target(TARGET_CONFIG, d2t, t2d, 0, **sizes).eval()
    with torch.no_grad():
        for weight in learner.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    learner.save(tmp_path)
    assert kind_of(tmp_path) == kind.kind
    assert FILES.read_config(tmp_path) == learner.config
    drafter = FILES.load(tmp_path).eval()
    for name, weight in learner.named_parameters():
        assert torch.equal(drafter.get_parameter(name), weight.bfloat16().float()), name
    assert torch.equal(drafter.d2t, learner.d2t)
    shown = specblock("inspect", tmp_path)
    assert f"draft vocabulary: {DRAFT_VOCAB} of {VOCAB} target tokens" in shown.output
    learner.load_state_dict(drafter.state_dict(), strict=False)
    process_after_loading(drafter, None)
    options, reads = DRAFTERS[kind.kind].options(calibrate_drafts=False), READS.get(kind.kind)
    head = kind(drafter, embed, options, NODES, MAX_LEN, None, reads or (0, 1, 2))
    caches = [  # noise: nothing of it may be seen
        torch.randn(
            12, PAGE * layer.entries_per_token, layer.num_kv_heads, 2 * layer.head_dim
        ).transpose(1, 2)
        for layer in head.cache_layers()
    ]
    head.bind(caches)
    return learner, head


def script_of(states, text, request: int) -> EvalSequence:
    hidden = states[:3, request].transpose(0, 1).flatten(1)
    return EvalSequence(text[request, :MAX_LEN], 1, hidden, states[LAST, request], embed)


@pytest.mark.parametrize(
    ("ends", "paddings"),
    [
        ([(0, 0), (19, 6), (20, 9), (23, 10), (24, 33)], [0, 0, 4, 8]),
        ([(PAGE, PAGE), (35, 22), (36, 25)], [0, 0]),  # the first block is masked
    ],
    ids=["whole texts", "a masked block"],
)
@torch.no_grad()
def test_served_as_learned(pair, ends, paddings):
    """Two requests, prompts in two chunks, then decode steps with rejected nodes as padding.

    A masked first block is as a text that begins later: RoPE is relative. Positions may begin
    anywhere, and places in the table follow them.
    """
    (learner, head), begin = pair, ends[0][0]
    # [L, R, n, Ht], of three layers and of what the LM head reads; texts [R, n + 1]
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(4, 2, MAX_LEN, HIDDEN, generator=draw)
    text = torch.randint(0, VOCAB, (2, MAX_LEN + 1), generator=draw)
    later = states[:, :, begin:], text[:, begin:]
    drafts = [learner.draft_along(script_of(*later, request)) for request in range(2)]
    tables = torch.tensor([[3, 7, 1, 5], [4, 2, 8, 11]])
    kept = torch.nn.functional.pad(tables[:, begin // PAGE :], (0, begin // PAGE)).int()
    for before, after, padding in zip(ends, ends[1:], paddings):
        rows = rows_of([*zip(before, after)], tables, states, text, PAGE, padding)
        advance(head, replace(rows, index=rows.position - begin, block_table=kept))
        tree = head.draft()
        assert tree.token.shape == (2, NODES)
        for request, end in enumerate(after):
            assert_same_tree(tree, request, texts(drafts[request](end - begin), 0), ties=1)
