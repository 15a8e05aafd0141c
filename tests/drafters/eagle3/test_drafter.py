"""The EAGLE-3 head over a paged cache drafts what a search over whole paths drafts."""

from __future__ import annotations

import pytest
import torch
from support.committed import advance, rows_of
from support.eagle3 import PlainEagle3, small_eagle3
from support.trees import assert_same_tree, texts

from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.options import Eagle3Config

H, V, PAGE, MAX_LEN = 32, 64, 8, 64
VARIANTS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "qk_norm": True,
    "qkv_bias": True,
    "mlp_bias": True,
    "logit_scale": 0.5,
}


def embedding_table() -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(1))


def make_head(drafter, nodes: int = 40, lookahead: int | None = None, **options) -> Eagle3Drafter:
    table = embedding_table()
    head = Eagle3Drafter(
        drafter, lambda ids: table[ids], Eagle3Config(**options), nodes, MAX_LEN, lookahead
    )
    # Noise in the cache: nothing of it may be seen.
    head.bind([torch.randn(20, PAGE, 2, 16).transpose(1, 2) for _ in head.cache_layers()])
    return head


def world(requests: int):
    """States of three layers, features, texts."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, requests, MAX_LEN, H, generator=draw)
    features = states.permute(1, 2, 0, 3).flatten(2)  # [R, n, 3H], low, mid, high
    return states, features, torch.randint(0, V, (requests, MAX_LEN + 1), generator=draw)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"depth": 1}, {}),
        ({"depth": 4, "top_k": 3}, {}),
        ({"depth": 5, "top_k": 1}, {}),
        ({"depth": 4, "top_k": 3, "calibrate_drafts": False}, {}),
        ({"depth": 3, "top_k": 3}, VARIANTS),
        ({"depth": 3, "top_k": 3}, {"num_hidden_layers": 3}),
        ({"depth": 3, "top_k": 2}, {"layer_ids": (1, 3)}),
    ],
)
@torch.no_grad()
def test_paged_equals_plain(options, changes):
    """Two requests, prompt in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = small_eagle3(**changes)
    head = make_head(drafter, **options)
    head.beta = None if head.calibration is None else torch.tensor([1.3, 0.7])
    states, features, text = world(2)
    if drafter.config.num_features == 2:
        head.layers, features = (0, 2), torch.cat([features[..., :H], features[..., 2 * H :]], -1)
    tables = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])
    for requests, padding in (
        ([(0, 9), (0, 6)], 0),
        ([(9, 13), (6, 7)], 0),
        ([(13, 16), (7, 8)], 4),
        ([(16, 17), (8, 12)], 8),
    ):
        advance(head, rows_of(requests, tables, states, text, PAGE, padding))
        tree = head.draft()
        assert tree.token.shape == (2, 40)
        for request, (_, end) in enumerate(requests):
            plain = PlainEagle3(
                drafter, embedding_table().__getitem__, features[request], text[request], end
            )
            beta = 1.0 if head.beta is None else float(head.beta[request])
            assert_same_tree(tree, request, plain.tree(head.shape, MAX_LEN - end, beta))


@pytest.mark.parametrize("room", [0, 1, 2, 5, 9])
@torch.no_grad()
def test_near_the_length_limit_nodes_without_a_slot_do_not_grow(room):
    drafter = small_eagle3()
    head = make_head(drafter, depth=4, top_k=3)
    head.beta = torch.tensor([1.3])
    states, features, text = world(1)
    tables, end = torch.arange(1, 9)[None], MAX_LEN - room
    (cache,) = head.attention_builder.caches
    before = cache.clone()
    advance(head, rows_of([(0, end)], tables, states, text, PAGE))
    tree = head.draft()
    plain = PlainEagle3(drafter, embedding_table().__getitem__, features[0], text[0], end)
    assert_same_tree(tree, 0, plain.tree(head.shape, room, float(head.beta[0])))
    changed = (cache != before).any(-1).any(1).any(-1).nonzero().flatten().tolist()
    assert set(changed) <= {0, *tables[0].tolist()}, "a stranger's block was written"


@torch.no_grad()
def test_no_more_slots_are_borrowed_than_are_spared():
    """Slots behind them keep their noise."""
    head = make_head(small_eagle3(), nodes=40, lookahead=7, depth=4, top_k=5)
    assert head.shape.num_starts == 2
    states, _, text = world(1)
    (cache,) = head.attention_builder.caches
    before = cache.clone()
    advance(head, rows_of([(0, 10)], torch.arange(1, 9)[None], states, text, PAGE))
    head.draft()
    flat = (cache != before).transpose(1, 2).flatten(0, 1).any(-1).any(-1)[PAGE:]
    assert flat.nonzero().flatten().tolist() == list(range(10 + 3 * 2))


@torch.no_grad()
def test_more_children_than_it_can_name_there_are_not():
    head = make_head(small_eagle3(draft_vocab_size=4), depth=2, top_k=10)
    states, _, text = world(1)
    advance(head, rows_of([(0, 9)], torch.arange(1, 9)[None], states, text, PAGE))
    assert int(head.draft().size[0]) == 4 + 4 * 4


@torch.no_grad()
def test_a_checkpoints_own_embedding_is_used():
    states, _, text = world(1)
    rows = rows_of([(0, 9)], torch.arange(1, 9)[None], states, text, PAGE)
    drafter = small_eagle3(own_embedding=True)
    trees = []
    for table in (embedding_table(), embedding_table() + 1):
        head = Eagle3Drafter(
            drafter, lambda ids, t=table: t[ids], Eagle3Config(depth=3), 20, MAX_LEN
        )
        head.bind([torch.zeros(20, PAGE, 2, 16).transpose(1, 2)])
        advance(head, rows)
        trees.append(texts(head.draft(), 0))
    assert trees[0] == trees[1]


def test_an_embedding_that_is_the_targets_is_not_kept_twice():
    drafter = small_eagle3(own_embedding=True)
    table = drafter.embed_tokens.weight.detach().clone()
    table[-1, -1] += 1

    def embed(ids):
        return table[ids]

    head = Eagle3Drafter(drafter, embed, Eagle3Config(), 20, MAX_LEN)
    assert head.embed is drafter.embed_tokens is not None
    table.copy_(drafter.embed_tokens.weight.detach())
    head = Eagle3Drafter(drafter, embed, Eagle3Config(), 20, MAX_LEN)
    assert head.embed is embed and drafter.embed_tokens is None
