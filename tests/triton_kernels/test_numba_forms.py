"""The compiled loops that stand in for kernels on a CPU do what the torch references do."""

from __future__ import annotations

import random

import pytest
import torch
from support.trees import to_tree
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_reference import (
    lm_and_rank_head_reference,
)
from vllm_specblock.triton_kernels.ngram.occurrences import Texts

from vllm_specblock.candidates import rank_key, select
from vllm_specblock.combine.combined import Combined
from vllm_specblock.commit.committed_tokens import committed_tokens
from vllm_specblock.commit.move import move_path
from vllm_specblock.config import NGramConfig
from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.drafters.specblock.fused_growth import expansion
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.engine.metrics.counters import DrafterCounters
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.verify.accept_path import DrawnRows, accept_path_rows
from vllm_specblock.verify.tree_mask import BatchRows, TreeMask

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
SLOTS, DEPTH = 7, 6


@pytest.fixture
def same(monkeypatch):
    """Holds what a call returns against what it returns in torch."""

    def check(call):
        compiled = call()
        with monkeypatch.context() as patch:
            patch.setattr(optional_numba, "AVAILABLE", False)
            for one, other in zip(compiled, call(), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)
        return compiled

    return check


def grown(seed: int, requests: int = 4, nodes: int = 70):
    """Trees of few tokens, no path longer than DEPTH."""
    rng, batch = random.Random(seed), []
    for _ in range(requests):
        tree, depth = [], [0]
        for node in range(rng.randrange(nodes + 1)):
            parent = rng.choice([n for n in range(node + 1) if depth[n] < DEPTH])
            tree.append((parent, rng.randrange(3)))
            depth.append(depth[parent] + 1)
        batch.append(tree)
    return to_tree(batch, nodes)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_verification(same, seed):
    """Store, see, walk, count: everything that slots and totals hold afterwards, too."""
    draw = torch.Generator().manual_seed(seed)
    tree = grown(seed)
    slot = torch.randperm(SLOTS, generator=draw)[:4]
    run = torch.randint(0, 71, (4,), generator=draw)
    chunk = torch.tensor([3, 0, 0, 1])
    first_row = torch.nn.functional.pad((run + 1).cumsum(0), (1, 0)).int()
    node = torch.cat([torch.arange(n + 1) for n in run.tolist()])
    row_req_idx = slot.repeat_interleave(run + 1)
    query_start = torch.nn.functional.pad((run + 1 + chunk).cumsum(0), (1, 0)).int()
    row = torch.cat(
        [torch.arange(end - n - 1, end) for n, end in zip(run, query_start[1:].tolist())]
    )
    position = torch.cat([torch.arange(40, 40 + n) for n in query_start.diff().tolist()])
    seq_len = 40 + query_start.diff()
    token = torch.cat(
        [torch.cat([torch.zeros(1).long(), t[:n]]) for t, n in zip(tree.token, run.tolist())]
    )
    token[torch.rand(len(token), generator=draw) < 0.1] = -1
    drawn = torch.randint(0, 3, (len(token),), generator=draw)
    origin = torch.randint(0, 4, (4, 70), generator=draw).to(torch.uint8)

    def call():
        slots, metadata = TreeStates(SLOTS, 70, DEPTH, "cpu"), TreeMask(400, 9, 70, "cpu")
        slots.accepted.fill_(5)
        slots.store(slot, Combined(tree, origin))
        rows = BatchRows(
            position, query_start, seq_len, slot, first_row, row, row_req_idx, node.int()
        )
        metadata.fill(rows, slots.depth, slots.ancestors)
        drawn_rows = DrawnRows(token.int(), drawn, first_row, slot)
        output, num_sampled = accept_path_rows(
            drawn_rows, slots.parent, slots.depth, slots.ancestors, slots.path, slots.accepted
        )
        counters = DrafterCounters(2, 70, DEPTH, "cpu")
        accepted, path = slots.accepted[slot], slots.path[slot]
        counters.verified(
            VerifiedTrees(slot, run, accepted, path, slots.score, slots.origin, torch.zeros(SLOTS))
        )
        live = torch.tensor([True, False, True, True])
        beta = 0.25 + tree.logprob[:, 0].exp()
        counters.drafted((tree.size, run.int()), live, origin[:, 0] > 1, live, (beta, None))
        one = DrafterCounters(1, 70, DEPTH, "cpu")
        one.drafted((tree.size,), None, None, live, (None,))
        of_slots = slots.parent, slots.depth, slots.ancestors, slots.path, slots.score
        seen = metadata.prefix_len, metadata.mask_words, metadata.tree_start, metadata.position
        return (
            output,
            num_sampled,
            slots.accepted,
            slots.origin,
            counters.total,
            one.total,
            *of_slots,
            *seen,
            metadata.node_position,
        )

    compiled = same(call)
    assert compiled[1].max() > 1, "nothing was accepted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("entries_first", [False, True])
def test_a_path_moves_in_every_layer(same, dtype, entries_first):
    draw = torch.Generator().manual_seed(1)
    shape = (3, 9, 4, 2, 10) if entries_first else (3, 9, 2, 4, 10)
    memory = torch.randint(0, 255, shape, generator=draw).to(dtype)
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 4, 0], [0, 5, 6, 7], [0, 0, 0, 0]])
    accepted = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    query_start, base = torch.tensor([0, 8, 18, 26]), torch.tensor([1, 3, 1, 2])
    slot = torch.randperm(36, generator=draw)[:30]
    slot[3] = -1

    def call():
        layers = memory.clone()
        caches = layers.transpose(2, 3) if entries_first else layers
        move_path(KVCacheSet(list(caches)), slot, query_start, base, path, accepted, 29)
        return (layers,)

    assert not torch.equal(same(call)[0], memory)


@pytest.mark.parametrize("amx", [False, True])
def test_a_path_moves_in_packed_caches(same, amx):
    draw = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 255, (2, 3, 2, 32, 64), generator=draw).to(torch.bfloat16)
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 4, 9], [0, 5, 6, 7], [0, 0, 0, 0]])
    accepted = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    query_start, base = torch.tensor([0, 8, 18, 26]), torch.tensor([1, 3, 1, 2])
    slot = torch.randperm(96, generator=draw)[:30]
    slot[2] = -1  # read by the first request

    def call():
        layers = memory.clone()
        module = pytest.importorskip("vllm_specblock.triton_kernels.attention.cpu_packing")
        caches = KVCacheSet(list(layers), module.packing_of(layers[0], amx))
        assert caches.packing is not None
        move_path(caches, slot, query_start, base, path, accepted, 29)
        return (layers,)

    assert not torch.equal(same(call)[0], memory)


def test_committed_rows(same):
    draw = torch.Generator().manual_seed(2)
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 4, 99], [0, 0, 0, 0]])
    counts = torch.tensor([4, 5, 6])
    local = torch.cat([torch.arange(count) for count in counts.tolist()])
    text = torch.randint(0, 99, (SLOTS, 50), generator=draw, dtype=torch.int32)
    same(
        lambda: committed_tokens(
            torch.arange(3).repeat_interleave(counts),
            local,
            torch.tensor([0, 4, 9, 15], dtype=torch.int32),
            torch.tensor([0, 8, 18]),
            torch.tensor([1, 2, 6]),
            path,
            torch.tensor([2, 3, 0], dtype=torch.int32),
            24,
            torch.arange(24) + 25,
            torch.randperm(30, generator=draw.manual_seed(3)),
            torch.tensor([4, 0, 6]),
            text,
            torch.rand(SLOTS, generator=draw.manual_seed(4)),
            torch.tensor([0, 16, 0]),
            torch.tensor([0, 0, 46]),
        )
    )


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_selection(same, seed, joins):
    draw = torch.Generator().manual_seed(seed)
    count, budget = 2 + 25 * seed, [1, 90, 12, 5, 64, 63][seed]
    parent, depth = torch.zeros(3, count).long(), torch.zeros(3, count).long()
    score, text = torch.zeros(3, count), torch.ones(3, count).long()
    token = torch.randint(0, 3, (3, count), generator=draw)
    for c in range(1, count):
        up = torch.randint(0, c, (3, 1), generator=draw)
        parent[:, c], depth[:, c] = up[:, 0], depth.gather(1, up)[:, 0] + 1
        text[:, c] = text.gather(1, up)[:, 0] * 7919 + token[:, c] + 1
        lost = torch.randint(0, 3, (3,), generator=draw).float()
        score[:, c] = score.gather(1, up)[:, 0] - torch.where(lost > 1.5, float("inf"), lost)
    key = rank_key(score, (depth << 24) + torch.arange(count))
    key[:, 0] = 0

    def call():
        made = select(token, parent, score, key, text if joins else None, budget, 255)
        node = made.node.clamp(max=budget + 1)
        return *vars(made.tree).values(), torch.where(score > float("-inf"), node, 0)

    same(call)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("starts", [1, 5, 32])
def test_expansion(same, blocks, starts):
    """Few tokens and few probabilities, so that texts and scores are often equal."""
    shape = TreeShape(3, blocks, starts, (2, 4, 0, 6), 40)
    draw = torch.Generator().manual_seed(blocks)
    said = []
    for block in range(blocks):
        rows = 1 if block == 0 else starts
        logprob = -torch.randint(0, 5, (3, rows, 3, 6), generator=draw).float()
        token = torch.randint(0, 3, (3, rows, 3, 6), generator=draw)
        bucket = torch.randint(0, 4, (3, rows, 3), generator=draw)
        said.append((logprob.sort(-1, descending=True).values, token, bucket))

    def call():
        growth = expansion(shape, torch.tensor(shape.branching), 3)
        growth.first_block(*(x[:, 0] for x in said[0]))
        seen = []
        for block in range(2, blocks + 1):
            found = growth.starts(block)
            seen += [torch.where(found.valid, x, 0) for x in vars(found).values()]
            growth.next_block(found, block, *said[block - 1])
        return *vars(growth.finish()).values(), *seen

    same(call)


@pytest.mark.parametrize(
    "options", [NGramConfig(), NGramConfig(min_match=2, max_match=5, depth=7, branches=3)]
)
def test_ngram_head(same, options):
    draw = torch.Generator().manual_seed(5)
    head = NGramDrafter(options, 24, 200)
    table = torch.randint(4, (SLOTS, 200), generator=draw, dtype=torch.int32)
    position = torch.tensor([150, 0, 60, -1, 198])
    head.texts = Texts(table, torch.tensor([3, 1, 6, 0, 2]), position, torch.arange(5))
    head.longest = 200
    compiled = same(lambda: tuple(vars(head.draft()).values()))
    assert compiled[4].max() > 9


@pytest.mark.parametrize(
    ("vocab", "width", "scope"), [(2050, 16, None), (300, 4, 50), (10, 10, 10)]
)
@pytest.mark.parametrize("beta", [None, torch.tensor([0.7, 2.3])])
def test_read_heads(vocab, width, scope, beta):
    """Up to the last digits: log-probabilities and, through the rank head, all of the features."""
    draw = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(2, 3, 4, vocab, generator=draw)
    normed = torch.randn(2, 3, 4, 8, generator=draw)
    offset = torch.randint(0, 9, (vocab,), generator=draw)
    last = torch.nn.Linear(23, 4, bias=False)
    torch.nn.init.normal_(last.weight, generator=draw)
    with torch.no_grad():
        given = normed, logits, offset, torch.nn.Sequential(last), width, scope, beta
        (logprob, token, bucket), wanted = (
            lm_and_rank_head(*given),
            lm_and_rank_head_reference(*given),
        )
    torch.testing.assert_close(logprob, wanted[0], atol=3e-5, rtol=0)
    assert torch.equal(token, wanted[1]) and torch.equal(bucket, wanted[2])
