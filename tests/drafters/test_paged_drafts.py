"""Drafters over a paged cache draft what their networks say along whole texts, read plainly."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from support.committed import rows_of
from support.dense_cache import DenseCache
from support.eagle3 import PlainEagle3, small_eagle3
from support.host_reads import no_host_reads
from support.mask_blocks import (
    MAX_LEN,
    PAGE,
    TABLES,
    V,
    made_up,
    masks_of,
    plain_logprobs,
    tables_of_target,
)
from support.mask_blocks import make_drafter as of_masks
from support.records import small_drafter
from support.trees import assert_same_tree, best_paths, texts

from vllm_specblock import committed
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter, ParallelDrafter
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.options import DFlashConfig, Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.growth import Expansion

BLOCKS = ["dflash", "jetspec", "dflash2", "dspark"]
KINDS = ["specblock", "eagle3", "peagle", *BLOCKS]
NODES = 40
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def embed(ids: torch.Tensor) -> torch.Tensor:
    return tables_of_target()[0][ids]


def make(kind: str, lookahead: int | None = None, changes: dict | None = None, **options):
    """A small drafter with random weights; `changes` of its shape.

    Its cache holds noise, of which nothing may be seen.
    """
    changes = changes or {}
    if kind == "specblock":
        model = small_drafter(0, vocab=V, **changes).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.25)
        drafter = SpecBlockDrafter(
            model, embed, SpecBlockConfig(**options), NODES, MAX_LEN, lookahead
        )
    elif kind in ("eagle3", "peagle"):
        if kind == "eagle3":
            made, options = Eagle3Drafter, Eagle3Config(**{"depth": 4, "top_k": 3} | options)
        else:
            changes = {"mask_token_id": 60} | changes
            made, options = ParallelDrafter, DFlashConfig(**{"depth": 4} | options)
        model = small_eagle3(**changes)
        drafter = made(model, embed, options, NODES, MAX_LEN, lookahead)
        if model.config.num_features == 2:
            drafter.layers = (0, 2)
    else:
        drafter = of_masks(kind, NODES, lookahead, **options)
    entries = PAGE * drafter.entries_per_token
    drafter.bind([torch.randn(20, entries, 2, 16).transpose(1, 2) for _ in drafter.cache_layers()])
    return drafter


def plain(
    drafter: Drafter, states: torch.Tensor, text: torch.Tensor, end: int, beta: float = 1.0
) -> dict[tuple, float]:
    """Path -> score of the tree behind the root text[end]; states [3, n, H]."""
    features = torch.cat([states[layer] for layer in drafter.layers], -1)
    room = MAX_LEN - end  # slots behind the text
    if drafter.kind == "specblock":
        return dense_tree(drafter, features, text, end, room, beta)
    if drafter.kind == "eagle3":
        return PlainEagle3(drafter.model, embed, features, text, end).tree(
            drafter.shape, room, beta
        )
    if drafter.kind == "peagle":
        return PlainEagle3(drafter.model, embed, features, text, end).block(
            min(drafter.max_depth, room + 1), NODES, beta
        )
    config, depth = drafter.model.config, drafter.max_depth
    # Rows that see no later one may be fewer.
    size = min(depth, room - 1 + config.from_root) if all(config.layer_causal) else depth
    choices = plain_logprobs(drafter, states, text, end, size, beta)
    tail = [int(text[end])]
    return best_paths(lambda path: choices(len(path), [*tail, *path][-1]), size, NODES)


def dense_tree(drafter: SpecBlockDrafter, features, text, end: int, room: int, beta: float):
    """The tree from the dense description of the cache in `dense_cache.py`."""
    model, shape = drafter.model, drafter.shape
    cache, row, newest = DenseCache(model.config), torch.arange(end), torch.tensor([end - 1])
    factor = torch.tensor([beta])
    hidden = model(
        model.condition(features[row]), embed(text[row + 1]), row + 1, cache.append(newest), newest
    )
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    grown = expansion.attach(None, *model.candidates(hidden[None], shape.width, factor))
    growth, drafted = cache.grow(), hidden
    depth = torch.zeros(1, dtype=torch.int64)
    for block in range(shape.num_blocks - 1):
        slot = torch.arange(shape.num_starts) + block * shape.num_starts
        grown = grown._replace(valid=grown.valid & (slot < room))
        position, row = grown.position[0], grown.row[0]
        base = torch.full_like(position, end)
        if model.config.block_rope == "path":
            base = base + depth[row] + position + 1
        depth = torch.cat([depth, depth[row] + position + 1])
        attend = growth.starts(row, position)
        later = model(drafted[row, position], embed(grown.token[0]), base, attend)
        grown = expansion.attach(grown, *model.candidates(later[None], shape.width, factor))
        drafted = torch.cat([drafted, later])
    return texts(grown, 0)


EAGLE3_VARIANTS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "qk_norm": True,
    "qkv_bias": True,
    "mlp_bias": True,
    "logit_scale": 0.5,
}


@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [
        *((kind, {}, {}) for kind in KINDS),
        *((kind, {"calibrate_drafts": False}, {}) for kind in KINDS),
        ("specblock", {"num_blocks": 1}, {}),
        ("specblock", {"num_starts": 3, "branching": [2, 4, 10, 0]}, {}),
        ("specblock", {}, {"block_rope": "path"}),
        ("specblock", {}, {"qk_norm": True}),
        # Each block starts from the end of the one before: three rows on one path.
        ("specblock", {"num_blocks": 3, "num_starts": 1}, {}),
        # Starts of the third block lie in rows of both blocks before it.
        ("specblock", {"num_blocks": 3}, {}),
        ("specblock", {"num_blocks": 4, "num_starts": 5}, {"block_rope": "path"}),
        ("eagle3", {"depth": 1}, {}),
        ("eagle3", {"depth": 5, "top_k": 1}, {}),
        ("eagle3", {"depth": 3}, EAGLE3_VARIANTS),
        ("eagle3", {"depth": 3}, {"num_hidden_layers": 3}),
        ("eagle3", {"depth": 3, "top_k": 2}, {"layer_ids": (1, 3)}),
        ("eagle3", {"depth": 3}, {"num_hidden_layers": 2, "windows": (5, None)}),
        ("eagle3", {"depth": 5, "top_k": 2}, {"windows": (2,)}),
        ("peagle", {}, EAGLE3_VARIANTS | {"windows": (5,)}),
        ("peagle", {"depth": 1}, {}),
        *((kind, {"depth": 2}, {}) for kind in BLOCKS),
        *((kind, {}, {}) for kind in ("windows", "windows, speculators", "both ways")),
    ],
)
@torch.no_grad()
def test_paged_equals_plain(kind, options, changes):
    """Two requests, prompts in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = make(kind, changes=changes, **options)
    drafter.beta = None if drafter.calibration is None else torch.tensor([1.3, 0.7])
    states, text = made_up(2)
    for requests, padding in (
        ([(0, 9), (0, 6)], 0),
        ([(9, 13), (6, 7)], 0),
        ([(13, 16), (7, 8)], 4),
        ([(16, 17), (8, 12)], 8),
    ):
        drafter.advance(rows_of(requests, TABLES, states, text, PAGE, padding))
        tree = drafter.draft()
        assert tree.token.shape == (2, NODES)
        for request, (_, end) in enumerate(requests):
            beta = 1.0 if drafter.beta is None else float(drafter.beta[request])
            wanted = plain(drafter, states[:, request], text[request], end, beta)
            assert_same_tree(tree, request, wanted)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 9])
@EVERY_KIND
@torch.no_grad()
def test_near_the_length_limit_what_has_no_slot_drafts_nothing(kind, room):
    """A root at MAX_LEN − room has room − 1 positions behind it; no other block is written."""
    drafter = make(kind)
    drafter.beta = torch.tensor([1.3])
    states, text = made_up(1)
    before = [cache.clone() for cache in drafter.attention_builder.caches]
    end = MAX_LEN - room
    drafter.advance(rows_of([(0, end)], TABLES[:1], states, text, PAGE))
    tree = drafter.draft()
    depth = max((len(path) for path in texts(tree, 0)), default=0)
    if kind in BLOCKS:
        config = drafter.model.config
        most = min(masks_of(kind) + config.from_root, max(0, room - 1 + config.from_root))
        # The best paths by pairs may be shorter ones.
        assert depth == most or (kind in ("dflash2", "dspark") and 0 < depth < most)
    elif room == 0:
        assert depth == (drafter.shape.block_size if kind == "specblock" else 1)
    # DFlash's masks read all of their block, of which some have no slot.
    if depth and (kind not in BLOCKS or kind == "jetspec" or room > masks_of(kind)):
        wanted = plain(drafter, states[:, 0], text[0], end, 1.3)
        assert_same_tree(tree, 0, wanted)
    for cache, was in zip(drafter.attention_builder.caches, before):
        changed = (cache != was).any(-1).any(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {0, *TABLES[0].tolist()}


@EVERY_KIND
@torch.no_grad()
def test_a_masked_first_block_is_as_a_text_that_begins_later(kind):
    drafter = make(kind)
    drafter.beta = torch.tensor([1.3, 0.7])
    states, text = made_up(2)
    for requests in ([(PAGE, PAGE + 9), (PAGE, PAGE + 6)], [(PAGE + 9, PAGE + 13), (PAGE + 6, 23)]):
        rows = rows_of(requests, TABLES, states, text, PAGE)
        kept = torch.cat([TABLES[:, 1:], torch.zeros_like(TABLES[:, :1])], 1).int()
        drafter.advance(replace(rows, index=rows.position - PAGE, block_table=kept))
        tree = drafter.draft()
        for request, (_, end) in enumerate(requests):
            of = states[:, request, PAGE:], text[request, PAGE:]
            wanted = plain(drafter, *of, end - PAGE, float(drafter.beta[request]))
            assert_same_tree(tree, request, wanted)


# A prompt of several parts beside a request that decodes, with rejected nodes as padding.
@pytest.mark.parametrize(
    ("lengths", "padding"), [([9, 50], 0), ([50, 5], 0), ([3, 2], 8), ([60], 0), ([20, 20], 0)]
)
@EVERY_KIND
@torch.no_grad()
def test_rows_in_parts_draft_what_all_at_once_would(monkeypatch, kind, lengths, padding):
    count = len(lengths)
    states, text = made_up(count)
    found, sizes, part_of = [], [], committed.part_of

    def counted(rows, start, end):
        sizes.append(end - start)
        return part_of(rows, start, end)

    monkeypatch.setattr(committed, "part_of", counted)
    for most in (10_000, 16):
        monkeypatch.setattr(committed, "MAX_ROWS", most)
        drafter, trees = make(kind), []
        # The second step reads what the first has left in the cache.
        for requests in ([(0, n) for n in lengths], [(n, n + 2) for n in lengths]):
            drafter.advance(rows_of(requests, TABLES[:count], states, text, PAGE, padding))
            tree = drafter.draft()
            trees += [(tree, request, texts(tree, request)) for request in range(count)]
        found.append(trees)
    assert len(sizes) >= 2 and max(sizes) <= 16
    for (tree, request, _), (*_, wanted) in zip(*found):
        assert wanted
        assert_same_tree(tree, request, wanted)


@EVERY_KIND
@torch.no_grad()
def test_nothing_is_read_on_the_host(kind):
    drafter = make(kind)
    states, text = made_up(2)
    rows = rows_of([(0, 19), (0, 6)], TABLES, states, text, PAGE)
    with no_host_reads():
        drafter.advance(rows)
        drafter.draft()


@EVERY_KIND
@torch.no_grad()
def test_the_targets_states_are_not_kept(kind):
    """Of a long prompt that is hundreds of megabytes, until a step that is not a graph's."""
    drafter = make(kind)
    states, text = made_up(1)
    rows = rows_of([(0, 20)], TABLES[:1], states, text, PAGE)
    left = [weakref.ref(state) for state in rows.states]
    drafter.advance(rows)
    drafter.draft()
    del rows, states
    assert all(state() is None for state in left)


@torch.no_grad()
def test_no_more_slots_are_borrowed_than_are_spared():
    """Slots behind them keep their noise."""
    drafter = make("eagle3", lookahead=7, top_k=5)
    assert drafter.shape.num_starts == 2
    states, text = made_up(1)
    (cache,) = drafter.attention_builder.caches
    before = cache.clone()
    drafter.advance(rows_of([(0, 10)], torch.arange(1, 9)[None], states, text, PAGE))
    drafter.draft()
    flat = (cache != before).transpose(1, 2).flatten(0, 1).any(-1).any(-1)[PAGE:]
    assert flat.nonzero().flatten().tolist() == list(range(10 + 3 * 2))


@pytest.mark.parametrize("same", [False, True])
def test_a_checkpoints_own_embedding_is_kept_unless_it_is_the_targets(same):
    model = small_eagle3(own_embedding=True)
    own = model.embed_tokens
    table = own.weight.detach().clone()
    if not same:
        table[-1, -1] += 1
    drafter = Eagle3Drafter(model, table.__getitem__, Eagle3Config(), NODES, MAX_LEN)
    assert model.embed_tokens is (None if same else own)
    assert (drafter.embed is own) is not same


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
@pytest.mark.parametrize(
    ("nodes", "lookahead", "depth", "found"), [(3, None, None, 3), (20, 2, None, 2), (20, 9, 1, 1)]
)
def test_no_path_is_deeper_than_slots_nodes_and_options_allow(kind, nodes, lookahead, depth, found):
    assert of_masks(kind, nodes, lookahead, depth=depth).max_depth == found
