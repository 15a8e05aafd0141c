"""Accepted path from the target's draw at every node, in one launch.

The torch references are `vllm_specblock.verify.accept_path.accept_path_rows` and, where benchmarks
impose what is accepted, `SyntheticAcceptance.accept_path_rows`. A program has one request: its
matching nodes become bits, and a node is reached when these hold all of its ancestors'.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl


class SyntheticDraws(NamedTuple):
    """What takes nodes in the target's place, by request slot (S) and node (N)."""

    low: torch.Tensor  # [S, N] fp32, a node is taken for a number in [low, high)
    high: torch.Tensor
    draws: torch.Tensor  # [a power of two] fp32, numbers in [0, 1)
    seed: torch.Tensor  # [≥ S] int64, of the request in each slot
    seed_factor: int
    position: torch.Tensor  # [rows] int64, where the token after a row would stand


def accept_path_triton(
    token: torch.Tensor,
    drawn: torch.Tensor,
    first_row: torch.Tensor,
    req_idx: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    synthetic: SyntheticDraws | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel, which writes `path` and `accepted` for the slots of the batch.

    Args:
        token, drawn, first_row, req_idx: as `DrawnRows` has them; all but `req_idx` contiguous.
        parent, depth, ancestors, path, accepted: by slot, contiguous, as `accept_path_rows` has
            them.
        synthetic: None where the target decides.

    Returns:
        [R, D+1] int64, the tokens that come out, 0 beyond; [R] int32, how many count.
    """
    num_requests, num_nodes, places = len(req_idx), parent.shape[1], path.shape[1]
    output = path.new_empty(num_requests, places)
    num_sampled = accepted.new_empty(num_requests)
    low = high = draws = seed = position = None
    num_draws = seed_factor = 0
    if synthetic is not None:
        low, high, draws, seed, seed_factor, position = synthetic
        num_draws = len(draws)
    nodes = next_power_of_2(max(num_nodes, 1))
    _accept_path_kernel[(num_requests,)](
        token,
        drawn,
        first_row,
        req_idx,
        req_idx.stride(0),
        parent,
        depth,
        ancestors,
        path,
        accepted,
        output,
        num_sampled,
        low,
        high,
        draws,
        seed,
        position,
        NUM_DRAWS=num_draws,
        SEED_FACTOR=seed_factor,
        NUM_NODES=num_nodes,
        NODES=nodes,
        W=ancestors.shape[2],
        PLACES=places,
        PADDED=next_power_of_2(places),
        num_warps=1 if nodes <= 64 else 4,
    )
    return output, num_sampled


# A chunk of a batch begins anywhere: the alignment of its tensors is not to be compiled for.
@jit(do_not_specialize=["token", "drawn", "first_row", "req_idx"])
def _accept_path_kernel(
    token,  # [rows] integers, −1: not to be accepted
    drawn,  # [rows] int64
    first_row,  # [R+1] int32
    req_idx,  # [R] integers
    req_idx_stride,
    parent,  # [S, NUM_NODES] int32
    depth,  # [S, NUM_NODES + 1] int64
    ancestors,  # [S, NUM_NODES + 1, W] int64
    path,  # [S, PLACES] int64
    accepted,  # [S] int32
    output,  # [R, PLACES] int64
    num_sampled,  # [R] int32
    low,  # of SyntheticDraws, as the four after it; or None
    high,
    draws,
    seed,
    position,
    NUM_DRAWS: tl.constexpr,
    SEED_FACTOR: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,  # of a tile
    W: tl.constexpr,
    PLACES: tl.constexpr,  # D + 1
    PADDED: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(first_row + request)
    count = tl.load(first_row + request + 1) - first
    at = tl.load(req_idx + request * req_idx_stride).to(tl.int64)
    parent += at * NUM_NODES - 1  # node 1 is entry 0
    depth += at * (NUM_NODES + 1)
    ancestors += at * (NUM_NODES + 1) * W
    path += at * PLACES
    output += request * PLACES
    node = tl.arange(0, NODES) + 1

    live = (node <= NUM_NODES) & (node < count)
    drafted = tl.load(token + first + node, mask=live, other=-1)
    up = tl.load(parent + node, mask=live, other=-1)
    level = tl.load(depth + node, mask=live, other=0).to(tl.int32)
    live = live & (drafted >= 0) & (up >= 0) & (level < PLACES)
    if low is None:
        matches = live & (tl.load(drawn + first + up, mask=live, other=-1) == drafted)
    else:
        key = tl.load(position + first + up, mask=live, other=0)
        key += tl.load(seed + at) * SEED_FACTOR
        draw = tl.load(draws + (key & (NUM_DRAWS - 1)), mask=live, other=0.0)
        entry = at * NUM_NODES + node - 1
        matches = live & (tl.load(low + entry, mask=live, other=0.0) <= draw)
        matches = matches & (draw < tl.load(high + entry, mask=live, other=0.0))

    # Different bits: their sum is their union, and the sign bit wraps into place.
    bit = tl.full([NODES], 1, tl.int64) << (node % 64).to(tl.int64)
    reached = matches
    for w in tl.static_range(W):
        found = tl.sum(tl.where(matches & (node // 64 == w), bit, 0), 0)
        if w == 0:
            found = found | 1  # the root
        needed = tl.load(ancestors + node * W + w, mask=matches, other=0)
        reached = reached & ((needed & ~found) == 0)
    # The deepest, and of equals the first: the root has the least rank, NUM_NODES.
    rank = tl.where(reached, level * (NUM_NODES + 1) + NUM_NODES - node, NUM_NODES)
    best = tl.max(rank, 0)
    length = best // (NUM_NODES + 1)
    end = NUM_NODES - best % (NUM_NODES + 1)

    word = tl.load(ancestors + end * W + node // 64, mask=reached, other=0)
    on_path = reached & ((word & bit) != 0)
    place = tl.arange(0, PADDED)
    behind = (place > length) & (place < PLACES)
    tl.store(path + level, node.to(tl.int64), mask=on_path)
    tl.store(path + place, tl.zeros([PADDED], tl.int64), mask=behind | (place == 0))
    if low is None:
        tokens = tl.load(drawn + first + node, mask=on_path, other=0)
        tl.store(output + level, tokens, mask=on_path)
        tl.store(output, tl.load(drawn + first))
    else:
        # Tokens of the path's nodes, and after the last of them what the target drew.
        tl.store(output + level - 1, drafted.to(tl.int64), mask=on_path)
        tl.store(output + length, tl.load(drawn + first + end))
    tl.store(output + place, tl.zeros([PADDED], tl.int64), mask=behind)
    tl.store(accepted + at, length)
    tl.store(num_sampled + request, length + 1)
