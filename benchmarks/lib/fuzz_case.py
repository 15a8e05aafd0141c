"""A random case of a kernel, and random trees.

A case is a call without arguments that computes by the form its caller chooses. Its result is
compared with that of the torch references.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_specblock.tree import DraftTree

Tensors = tuple[torch.Tensor, ...]
MOST_REQUESTS, MOST_DEPTH, VOCAB = 6, 16, 4
"""Few tokens: siblings are often equal, and paths are accepted."""


class Case(NamedTuple):
    """trees: how many it handles; atol: how far floats may be apart, all else being equal;
    reference: what is the right result, None: the same call by the references."""

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
