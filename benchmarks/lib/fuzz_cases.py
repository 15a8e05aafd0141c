"""Random cases of the kernels that handle trees: any shapes, sizes, depths and batches.

A case is a call without arguments that computes by the form its caller chooses. Its result is
compared with that of the torch references.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.attention.cpu_packing import packing_of, store_packed
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.drafting.expand import TreeShape
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows, KVCacheSet
from vllm_specblock.triton_kernels.ngram.occurrences import Texts
from vllm_specblock.triton_kernels.tree.candidate_keys import rank_key
from vllm_specblock.triton_kernels.tree.node_bits import climb
from vllm_specblock.triton_kernels.tree.select_tree import Candidates

from vllm_specblock.candidates import select
from vllm_specblock.combine import merge, route
from vllm_specblock.commit import move_path
from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.drafters.options import NGramConfig
from vllm_specblock.drafters.specblock.growth import expansion
from vllm_specblock.engine.runner.tree_states import TreeStates, store_trees
from vllm_specblock.tree import MAX_NODES, DraftTree
from vllm_specblock.verify.accept_path import DrawnRows, accept_path_rows
from vllm_specblock.verify.tree_mask import BatchRows, TreeMask

Tensors = tuple[torch.Tensor, ...]
MOST_REQUESTS, MOST_DEPTH, VOCAB = 6, 16, 4
"""Few tokens: siblings are often equal, and paths are accepted."""


class Case(NamedTuple):
    """trees: how many it handles; atol: how far floats may be apart, all else being equal;
    reference: computes the right result, None: the same call by the references."""

    trees: int
    call: Callable[[], Tensors]
    atol: float = 0.0
    reference: Callable[[], Tensors] | None = None


def draw_trees(rng: random.Random, requests: int, slots: int, deepest: int) -> DraftTree:
    """R random trees of at most `slots` nodes each, no path longer than `deepest`; some are empty,
    some one chain."""
    token = torch.zeros(requests, slots, dtype=torch.int64)
    parent = torch.full((requests, slots), -1, dtype=torch.int32)
    logprob = torch.full((requests, slots), float("-inf"))
    sizes = []
    for request in range(requests):
        shape, depth = rng.choice(["any", "chain", "wide"]), [0]
        size = rng.choice([0, slots, rng.randrange(slots + 1)])
        for node in range(size):
            open_nodes = [up for up in range(node + 1) if depth[up] < deepest]
            up = {"any": rng.choice(open_nodes), "chain": open_nodes[-1], "wide": open_nodes[0]}
            parent[request, node] = up[shape]
            token[request, node] = rng.randrange(VOCAB)
            logprob[request, node] = -0.1 * (node + 1)
            depth.append(depth[up[shape]] + 1)
        sizes.append(size)
    size = torch.tensor(sizes, dtype=torch.int32)
    return DraftTree.from_nodes(token, parent, logprob, size)


def tensors_of(tree: DraftTree) -> Tensors:
    return tuple(getattr(tree, name) for name in DraftTree.TENSORS)


def verification(rng: random.Random, draw: torch.Generator) -> Case:
    """A step: trees are stored, their mask is built, the accepted paths are walked."""
    requests, nodes = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(1, MAX_NODES + 1)
    deepest = rng.randrange(1, MOST_DEPTH + 1)
    tree = draw_trees(rng, requests, nodes, deepest)
    num_slots = requests + rng.randrange(4)
    slot = torch.randperm(num_slots, generator=draw)[:requests]
    run = torch.tensor([rng.choice([0, nodes, rng.randrange(nodes + 1)]) for _ in range(requests)])
    chunk = torch.tensor([rng.choice([0, 0, rng.randrange(5)]) for _ in range(requests)])
    before = torch.tensor([rng.randrange(1, 300) for _ in range(requests)])
    first_row = pad((run + 1).cumsum(0), (1, 0)).int()
    query_start = pad((run + 1 + chunk).cumsum(0), (1, 0)).int()
    lengths = query_start.diff()
    node = torch.cat([torch.arange(n + 1) for n in run.tolist()])
    ends = query_start[1:].tolist()
    row = torch.cat([torch.arange(end - n - 1, end) for n, end in zip(run.tolist(), ends)])
    position = torch.cat(
        [torch.arange(at, at + n) for at, n in zip(before.tolist(), lengths.tolist())]
    )
    token = torch.cat([torch.tensor([0, *t[:n].tolist()]) for t, n in zip(tree.token, run)])
    token[torch.rand(len(token), generator=draw) < 0.1] = -1
    drawn = torch.randint(0, VOCAB, (len(token),), generator=draw)
    origin = torch.randint(0, 4, (requests, nodes), generator=draw).to(torch.uint8)

    def call() -> Tensors:
        states = TreeStates(num_slots, nodes, deepest, "cpu")
        mask = TreeMask(len(position) + 3, requests + 1, nodes, "cpu")
        store_trees(slot, replace(tree, origin=origin), states.trees, None, None, None)
        slots, ends = slot.repeat_interleave(run + 1), before + lengths
        rows = BatchRows(position, query_start, ends, slot, first_row, row, slots, node.int())
        mask.fill(rows, states.depth, states.ancestors)
        drawn_rows = DrawnRows(token.int(), drawn, first_row, slot)
        output, sampled = accept_path_rows(drawn_rows, states.trees)
        seen = mask.prefix_len, mask.mask_words, mask.tree_start, mask.position
        return output, sampled, *states.trees, *seen, mask.node_position

    return Case(requests, call)


def commit(rng: random.Random, draw: torch.Generator) -> Case:
    """Accepted paths move behind the roots, in caches of any shape and dtype."""
    requests, nodes = rng.randrange(MOST_REQUESTS + 1), rng.randrange(1, 65)
    longest, block = rng.randrange(1, 1 + min(nodes, MOST_DEPTH)), rng.choice([1, 4, 16])
    path = torch.zeros(requests, longest + 1, dtype=torch.int64)
    accepted = torch.tensor([rng.randrange(longest + 1) for _ in range(requests)]).int()
    for request, count in enumerate(accepted.tolist()):
        path[request, 1 : count + 1] = torch.tensor(sorted(rng.sample(range(1, nodes + 1), count)))
    base = torch.tensor([rng.randrange(4) for _ in range(requests)]).long()
    lengths = base + nodes + 1
    query_start = pad(lengths.cumsum(0), (1, 0))
    rows = int(query_start[-1])
    blocks = -(-(rows + 1) // block) + 1
    slot = torch.randperm(blocks * block, generator=draw)[:rows]
    slot[torch.rand(rows, generator=draw) < 0.03] = -1
    heads, size, layers = rng.choice([1, 2, 3]), rng.choice([2, 10, 64]), rng.randrange(1, 4)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.uint8])
    entries_first = rng.random() < 0.5
    shape = (blocks, block, heads, size) if entries_first else (blocks, heads, block, size)
    memory = torch.randint(0, 255, (layers, *shape), generator=draw).to(dtype)

    def call() -> Tensors:
        kept = memory.clone()
        caches = kept.transpose(2, 3) if entries_first else kept
        paths = AcceptedRows(query_start[:-1], base, path, accepted)
        move_path(KVCacheSet(list(caches)), slot, paths, rows)
        return (kept,)

    return Case(requests, call)


def selection(rng: random.Random, draw: torch.Generator) -> Case:
    """The best N candidates become a tree, with and without equal texts."""
    requests, count = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(2, 300)
    budget, joins = rng.randrange(1, MAX_NODES + 1), rng.random() < 0.5
    shape = requests, count
    parent, depth = torch.zeros(shape).long(), torch.zeros(shape).long()
    score, text = torch.zeros(shape), torch.ones(shape).long()
    token = torch.randint(0, VOCAB, shape, generator=draw)
    for at in range(1, count):
        up = torch.randint(0, at, (requests, 1), generator=draw)
        parent[:, at], depth[:, at] = up[:, 0], depth.gather(1, up)[:, 0] + 1
        text[:, at] = text.gather(1, up)[:, 0] * 7919 + token[:, at] + 1
        lost = torch.randint(0, 3, (requests,), generator=draw).float()
        score[:, at] = score.gather(1, up)[:, 0] - torch.where(lost > 1.5, float("inf"), lost)
    key = rank_key(score, (depth << 24) + torch.arange(count))
    key[:, 0] = 0

    def call() -> Tensors:
        texts = text if joins else None
        return tensors_of(select(Candidates(token, parent, score, key, texts), budget, 255)[0])

    return Case(requests, call)


def growth(rng: random.Random, draw: torch.Generator) -> Case:
    """SpecBlock's trees grow block by block, of any shape."""
    requests = rng.randrange(1, MOST_REQUESTS + 1)
    positions, blocks = rng.randrange(1, 6), rng.randrange(1, 5)
    one, two, three, four = (rng.randrange(9) for _ in range(4))
    starts, nodes = rng.randrange(1, 33), rng.randrange(1, MAX_NODES + 1)
    shape = TreeShape(positions, blocks, starts, (one, two, three, four), nodes)
    said = []
    for block in range(blocks):
        size = requests, 1 if block == 0 else starts, positions, shape.width
        logprob = -torch.randint(0, 5, size, generator=draw).float()
        token = torch.randint(0, VOCAB, size, generator=draw)
        bucket = torch.randint(0, 4, size[:3], generator=draw)
        said.append((logprob.sort(-1, descending=True).values, token, bucket))

    def call() -> Tensors:
        grown = expansion(shape, torch.tensor(shape.branching), requests)
        found = grown.attach(None, *said[0])
        seen: list[torch.Tensor] = []
        for block in said[1:]:
            seen += [torch.where(found.valid, each, 0) for each in found]
            found = grown.attach(found, *block)
        return *tensors_of(found), *seen

    return Case(requests, call)


def lookup(rng: random.Random, draw: torch.Generator) -> Case:
    """N-gram trees of texts of few tokens.

    Their scores count 1,024ths of a nat: a logarithm that lies between two goes to either.
    """
    requests, width = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(2, 400)
    least = rng.randrange(1, 5)
    options = NGramConfig(
        min_match=least,
        max_match=rng.randrange(least, 12),
        depth=rng.randrange(1, 20),
        branches=rng.randrange(1, 12),
    )
    drafter = NGramDrafter(options, rng.randrange(1, MAX_NODES + 1), width)
    slots = requests + 2
    table = torch.randint(VOCAB, (slots, width), generator=draw, dtype=torch.int32)
    position = torch.tensor([rng.randrange(-1, width - 1) for _ in range(requests)])
    index = torch.randperm(slots, generator=draw)[:requests]
    earlier = torch.randint(-1, VOCAB, (rng.randrange(400),), generator=draw, dtype=torch.int32)
    drafter.texts = Texts(table, index, position, torch.arange(requests), earlier)
    return Case(requests, lambda: tensors_of(drafter.draft()), atol=1 / 1024)


def merging(rng: random.Random, draw: torch.Generator) -> Case:
    """Two drafters' trees become one, joined at equal texts or at the root alone."""
    requests, deepest = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(1, MOST_DEPTH + 1)
    first, second = (
        draw_trees(rng, requests, rng.randrange(1, MAX_NODES + 1), deepest) for _ in range(2)
    )
    how, budget = rng.choice(["trie", "disjoint"]), rng.randrange(1, MAX_NODES + 1)

    def call() -> Tensors:
        tree, agreed = merge(first, second, how, budget, deepest)
        return *tensors_of(tree), tree.origins(), agreed

    return Case(requests, call)


def routing(rng: random.Random, draw: torch.Generator) -> Case:
    """The surer drafter's tree, of some requests its best path alone."""
    requests, nodes = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(1, MAX_NODES + 1)
    deepest = rng.randrange(1, MOST_DEPTH + 1)
    first, second = (draw_trees(rng, requests, nodes, deepest) for _ in range(2))
    # Rounding must not decide which tree is the surer one.
    second = replace(second, logprob=second.logprob - 0.01)
    how = rng.choice(["mean", "sum"])
    chain = torch.rand(requests, generator=draw) < 0.3

    def call() -> Tensors:
        tree, agreed = route(first, second, how)
        kept = TreeStates(requests, nodes, deepest, "cpu")
        tokens = store_trees(torch.arange(requests), tree, kept.trees, chain, None, None)
        found = kept.parent, kept.depth, kept.ancestors, kept.origin, kept.score
        return tokens, *found, agreed

    return Case(requests, call)


Attend = Callable[..., Tensors]
"""(cache, further arguments of `TreeAttentionBatch.attend`) -> the result."""


def draw_attention(
    rng: random.Random, draw: torch.Generator
) -> tuple[int, torch.Tensor, Attend, float]:
    """Draw queries of random trees behind prefixes of any length.

    Returns:
        requests, the cache [blocks, kv heads, block size, 2D], the call, and the dtype's tolerance.
    """
    requests, nodes = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(1, 80)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 3, 4])
    size, block = rng.choice([32, 64, 96]), rng.choice([32, 64])
    dtype, atol = rng.choice([(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
    window, soft_cap = rng.choice([None, None, rng.randrange(1, 90)]), rng.choice([0.0, 0.0, 20.0])
    rows = nodes + 1
    before = torch.tensor([rng.choice([0, rng.randrange(200)]) for _ in range(requests)]).int()
    length = before + rows
    per = -(-int(length.max()) // block)
    tables = (torch.randperm(requests * per, generator=draw) + 1).view(requests, per).int()
    shape = requests * per + 1, block, kv_heads, 2 * size
    cache = torch.randn(shape, generator=draw).to(dtype)
    query = torch.randn(requests * rows, kv_heads * group, size, generator=draw).to(dtype)
    parent = (torch.rand(requests, nodes, generator=draw) * torch.arange(1, rows)).int()
    start = torch.arange(requests + 1, dtype=torch.int32) * rows

    def attend(cache: torch.Tensor, **packing: Any) -> Tensors:
        # A new batch: it keeps values that only one of the forms can use.
        batch = TreeAttentionBatch(
            tables,
            start,
            start.tolist(),
            length,
            int(length.max()),
            before.repeat_interleave(rows),
            climb(parent)[0].flatten(0, 1),
            before,
        )
        given = {"window": window, "soft_cap": soft_cap, **packing}
        return (batch.attend(query, cache, size**-0.5, **given).float(),)

    return requests, cache.transpose(1, 2), attend, atol


def packed_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In caches packed for a CPU, against plain ones in torch."""
    requests, cache, attend, atol = draw_attention(rng, draw)
    packed = torch.zeros_like(cache)
    packing = packing_of(packed, False)
    key, value = cache.transpose(1, 2).flatten(0, 1).chunk(2, dim=-1)
    store_packed(packed, packing, torch.arange(len(key)), key, value)
    return Case(requests, lambda: attend(packed, packing=packing), atol, lambda: attend(cache))


def paged_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In paged caches.

    Triton's interpreter truncates to bfloat16 instead of rounding: the weights, and the result.
    Each costs up to one step, 2⁻⁷ of a value.
    """
    requests, cache, attend, atol = draw_attention(rng, draw)
    if cache.dtype == torch.bfloat16:
        atol = 2**-6 * float(cache.abs().max())
    return Case(requests, lambda: attend(cache), atol)


Maker = Callable[[random.Random, torch.Generator], Case]
_BOTH: dict[str, Maker] = {
    "verification: store, mask, walk": verification,
    "commit: keys and values move": commit,
    "selection of nodes": selection,
    "growth of SpecBlock trees": growth,
}
LOOPS = _BOTH | {"attention over packed caches": packed_attention}
"""Compiled for CPUs."""
TRITON = _BOTH | {
    "n-gram trees": lookup,
    "merging of two trees": merging,
    "routing, best paths": routing,
    "attention over paged caches": paged_attention,
}
