"""Random candidates of a step, as many as a SpecBlock head lays side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.tree.candidate_keys import DEPTH_ONE, ROOT_HASH

from vllm_specblock.candidates import (
    extend_hash,
    rank_key,
    select,
)
from vllm_specblock.drafters.specblock.tree_shape import TreeShape


def random_candidates(
    shape: TreeShape, batch: int, device: torch.device
) -> tuple[dict[str, Callable[[], object]], int]:
    """Ways to make trees of them, and the bytes that each has to read and write.

    As many candidates as `shape` has cells, evenly over its depths, each below a random one of
    the depth before; tokens of a vocabulary of 64, so that some texts are equal.
    """
    draw = torch.Generator(device).manual_seed(0)
    levels = shape.max_depth
    width = shape.num_rows * shape.block_size * shape.width // levels
    token = torch.randint(64, (batch, levels, width), generator=draw, device=device)
    gain = torch.rand(batch, levels, width, generator=draw, device=device).log()
    chosen = torch.randint(width, (batch, levels, width), generator=draw, device=device)
    score, path_hash = torch.zeros_like(gain), torch.full_like(token, ROOT_HASH)
    parent = torch.zeros_like(token)
    for level in range(levels):
        above = 0, path_hash[:, level]
        if level:
            up = chosen[:, level]
            above = score[:, level - 1].gather(1, up), path_hash[:, level - 1].gather(1, up)
            parent[:, level] = up + 1 + (level - 1) * width
        score[:, level] = above[0] + gain[:, level]
        path_hash[:, level] = extend_hash(above[1], token[:, level])
    place = torch.arange(1, levels * width + 1, device=device)
    depth = torch.arange(1, levels + 1, device=device).repeat_interleave(width)
    key = rank_key(score.flatten(1), (depth * DEPTH_ONE + place).expand(batch, -1))
    fields = (
        pad(token.flatten(1), (1, 0)),
        pad(parent.flatten(1), (1, 0)),
        pad(score.flatten(1), (1, 0)),
        pad(key, (1, 0)),
        pad(path_hash.flatten(1), (1, 0), value=ROOT_HASH),
    )
    ways = {
        "ours": lambda: select(*fields, shape.budget, levels),
        "torch": lambda: select.reference(*fields, shape.budget, levels),
    }
    tree = ways["torch"]().tree
    written = sum(each.nbytes for each in vars(tree).values())
    return ways, sum(field.nbytes for field in fields) + written
