"""Sets of a tree's nodes as bits of int64 words: packing, and every node's ancestors."""

from __future__ import annotations

import torch

_WORD = 64


def words_for(num_nodes: int) -> int:
    """Return W, the int64 words for one bit per node, root included."""
    return -(-(num_nodes + 1) // _WORD)


def unpack_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """[..., W] int64 → the first `count` bits, [..., count] bool."""
    bits = (words[..., None] >> torch.arange(_WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., :count].bool()


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """[..., count] bool → [..., ceil(count / 64)] int64."""
    count = flags.shape[-1]
    num_words = -(-count // _WORD)
    flags = torch.nn.functional.pad(flags, (0, num_words * _WORD - count))
    shift = torch.arange(_WORD, device=flags.device)
    # Different bits: their sum is their union, and the sign bit wraps into place.
    return (flags.unflatten(-1, (num_words, _WORD)).long() << shift).sum(-1)


def climb(parent: torch.Tensor, max_depth: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ancestors of every node as bits, and their depths.

    Args:
        parent: [R, N] int32, node index of each node's parent; −1: slot not in use.
        max_depth: longest path, if known; saves steps.

    Returns:
        ancestors: [R, N+1, W] int64; bit j of node i is set when j lies on the path from the root
            to i, both included. A slot not in use has the root's bit and its own.
        depth: [R, N] int32, 1 for a child of the root, and for a slot not in use.
    """
    num_requests, num_nodes = parent.shape
    # Unused slots (−1) become children of the root: they need an ancestor to attend to.
    jump = torch.nn.functional.pad(parent.clamp(min=0).long(), (1, 0))
    path = torch.eye(num_nodes + 1, dtype=torch.bool, device=parent.device)
    path[:, 0].fill_(True)
    path = path.expand(num_requests, -1, -1)
    longest = num_nodes if max_depth is None else min(max_depth, num_nodes)
    # Pointer doubling: after step s every node knows 2^s nodes of its path.
    for step in range(max(0, longest - 1).bit_length()):
        if step:
            jump = jump.gather(1, jump)
        path = path | path.gather(1, jump[..., None].expand_as(path))
    return pack_bits(path), path[:, 1:, 1:].sum(-1, dtype=torch.int32)
