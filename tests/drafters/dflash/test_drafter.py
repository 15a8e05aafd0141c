"""The DFlash drafter over a paged cache drafts the best paths through a plainly computed block."""

from __future__ import annotations

import pytest
import torch
from support.committed import rows_of
from support.dflash import PUBLISHED, make_model, plain_logits
from support.host_reads import NoHostReads
from support.trees import texts

from vllm_specblock.config import DFlashConfig
from vllm_specblock.drafters.common import chunked_advance
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.dflash.drafter import DFlashDrafter

H, V, PAGE, MAX_LEN, NODES = 32, 64, 8, 64, 20
MASK = PUBLISHED["dflash_config"]["mask_token_id"]
TABLES = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])


def tables_of_target() -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and LM head [V, H] each."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(V, H, generator=draw), torch.randn(V, H, generator=draw)


def make_drafter(nodes: int = NODES, lookahead: int | None = None, model=None, **options):
    """On a noisy cache: nothing of the noise may be seen."""
    embedding, head = tables_of_target()
    model = model or make_model()
    model.share_head(head)
    process_after_loading(model, options.get("quantization"))
    drafter = DFlashDrafter(
        model, lambda ids: embedding[ids], DFlashConfig(**options), nodes, MAX_LEN, lookahead
    )
    drafter.bind([torch.randn(20, PAGE, 2, 16).transpose(1, 2) for _ in drafter.cache_layers()])
    return drafter


def made_up(requests: int):
    """States [3, R, n, H] of three layers, and texts [R, n + 1]."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, requests, MAX_LEN, H, generator=draw)
    return states, torch.randint(0, V, (requests, MAX_LEN + 1), generator=draw)


def plain_tree(states, text, end: int, masks: int, beta: float, nodes: int = NODES):
    """Path -> score, of the request whose root is text[end]."""
    embedding, head = tables_of_target()
    weights = {name: weight.detach() for name, weight in make_model().state_dict().items()}
    features = states.transpose(0, 1).flatten(1)[:end]
    block = embedding[torch.tensor([int(text[end]), *[MASK] * masks])]
    logits = beta * plain_logits(weights, PUBLISHED, head, features, block)
    found, level = {}, {(): 0.0}
    for scores in logits[1:].log_softmax(-1):
        level = {
            (*path, token): score + float(each)
            for path, score in level.items()
            for token, each in enumerate(scores)
        }
        level = dict(sorted(level.items(), key=lambda node: -node[1])[:nodes])
        found |= level
    return dict(sorted(found.items(), key=lambda node: -node[1])[:nodes])


def assert_same(tree, request: int, wanted: dict[tuple, float]) -> None:
    found = texts(tree, request)
    common = found.keys() & wanted.keys()
    assert len(found) == len(wanted)
    assert len(common) >= len(wanted) - 2, "more than a tie at the budget's cut differs"
    assert {p: found[p] for p in common} == pytest.approx({p: wanted[p] for p in common}, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"calibrate_drafts": False}])
@torch.no_grad()
def test_paged_equals_plain(options):
    """Two requests, prompts in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = make_drafter(**options)
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
            masks = options.get("depth", 4)
            assert_same(
                tree, request, plain_tree(states[:, request], text[request], end, masks, beta)
            )
    some = drafter.draft(torch.tensor([1]))
    assert texts(some, 0) == pytest.approx(texts(tree, 1), abs=1e-4)


@torch.no_grad()
def test_long_prompts_are_taken_in_parts(monkeypatch):
    states, text = made_up(2)
    rows = rows_of([(0, 33), (0, 6)], TABLES, states, text, PAGE)
    whole = make_drafter()
    whole.advance(rows)
    monkeypatch.setattr(chunked_advance, "MAX_ROWS", 7)
    parts = make_drafter()
    parts.advance(rows)
    for request in range(2):
        wanted = texts(whole.draft(), request)
        assert texts(parts.draft(), request) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
@torch.no_grad()
def test_near_the_length_limit_masks_without_a_slot_draft_nothing(room):
    """A root at MAX_LEN − room has room − 1 positions behind it."""
    drafter = make_drafter()
    states, text = made_up(1)
    before = [cache.clone() for cache in drafter.block_rows.caches]
    end = MAX_LEN - room
    drafter.advance(rows_of([(0, end)], TABLES[:1], states, text, PAGE))
    tree = drafter.draft()
    depth = max((len(path) for path in texts(tree, 0)), default=0)
    assert depth == min(4, max(0, room - 1))
    if room > 4:
        wanted = plain_tree(states[:, 0], text[0], end, 4, float(drafter.beta[0]))
        assert_same(tree, 0, wanted)
    for cache, was in zip(drafter.block_rows.caches, before):
        changed = (cache != was).any(-1).any(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {0, *TABLES[0].tolist()}, "a stranger's block was written"


@pytest.mark.parametrize(
    ("nodes", "lookahead", "depth", "found"), [(3, None, None, 3), (20, 2, None, 2), (20, 9, 1, 1)]
)
def test_no_path_is_deeper_than_slots_nodes_and_options_allow(nodes, lookahead, depth, found):
    assert make_drafter(nodes, lookahead, depth=depth).max_depth == found


@torch.no_grad()
def test_eight_bits_draft_nearly_the_same():
    states, text = made_up(2)
    rows = rows_of([(0, 19), (0, 6)], TABLES, states, text, PAGE)
    trees = []
    for quantization in (None, "fp8"):
        drafter = make_drafter(quantization=quantization)
        drafter.advance(rows)
        trees.append(drafter.draft())
    exact, short = (set(texts(tree, 0)) for tree in trees)
    assert len(exact & short) > len(exact) / 2


@torch.no_grad()
def test_nothing_is_read_on_the_host():
    drafter = make_drafter()
    states, text = made_up(2)
    rows, wanted = rows_of([(0, 19), (0, 6)], TABLES, states, text, PAGE), torch.tensor([1])
    with NoHostReads():
        drafter.advance(rows)
        drafter.draft()
        drafter.draft(wanted)
