"""Random trees for kernels: in every slot, of all sizes."""

from __future__ import annotations

import torch

from vllm_specblock.tree import DraftTree


def random_trees(
    count: int,
    slots: int,
    vocab: int = 1000,
    close: int = 5,
    fall: float | None = None,
    seed: int | None = None,
) -> DraftTree:
    """Return `count` trees of at most `slots` nodes, the first one full and the second one empty.

    Args:
        close: parents are fewer nodes before their children than this, or the root.
        fall: nats from node to node, at most; None: 0 or 1/8, so that many scores are equal.
    """
    draw = torch.Generator().manual_seed(slots if seed is None else seed)
    size = torch.randint(0, slots + 1, (count,), generator=draw, dtype=torch.int32)
    size[:2] = torch.tensor([slots, 0])[:count]
    node = torch.arange(slots)
    used = node < size[:, None]
    up = node - torch.randint(0, close, (count, slots), generator=draw)
    lost = torch.rand(count, slots, generator=draw)
    lost = lost.round() / 8 if fall is None else lost * fall
    return DraftTree.from_nodes(
        torch.randint(vocab, (count, slots), generator=draw),
        torch.where(used, up.clamp(min=0), -1).int(),
        torch.where(used, -lost.cumsum(1), float("-inf")),
        size,
    )
