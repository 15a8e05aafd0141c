"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858), level by level, for R texts at once.

Every level's forward runs the best nodes of the level before, and each gives its best tokens. Of
all candidates the best N are the tree. Shapes are fixed by `TreeShape`; no value is read on the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vllm_specblock.candidates import tree_of
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import Growing, NextStarts, TreeShape

_DEPTH, _NODES_PER_LEVEL = 8, 4  # defaults, see `Eagle3Config.depth`


class LevelRows(NamedTuple):
    """What the rows of a level continue."""

    valid: Tensor  # [R, width] bool, rows that have a slot in the cache
    source: Tensor  # [R · width] int64, the row of the level before
    base: Tensor  # [R · width] int64, RoPE position: d − 1 after the newest committed row's


def level_shape(
    options: Eagle3Config, num_nodes: int, lookahead: int, draft_vocab_size: int
) -> TreeShape:
    """The growth that `options` ask for, as far as the slots and the draft vocabulary go."""
    wanted = options.depth or min(_DEPTH, max(2, num_nodes // _NODES_PER_LEVEL))
    # Every row of level 2 and later borrows one reserved slot.
    depth = min(wanted, num_nodes, lookahead + 1)
    top_k = min(options.top_k, draft_vocab_size)
    width = max(1, min(top_k, lookahead // max(1, depth - 1)))
    return TreeShape.levels(depth, top_k, width, num_nodes)


def grow(
    drafter: Eagle3Model,
    embed: Callable[[Tensor], Tensor],
    levels: Expansion | Growing,
    state: Tensor,
    attention: Callable[[int, NextStarts], tuple[Attend, LevelRows]],
    beta: Tensor | None = None,
) -> DraftTree:
    """Return the trees under the newest committed rows' tokens.

    Args:
        embed: [n] target ids -> [n, H].
        levels: without a level so far.
        state: [R, H], what the drafter left at those rows.
        attention: (level, its rows) -> their attention, and what they continue.
        beta: [R] fp32, see `feedback/calibration.py`; None: 1.
    """
    top_k, level = levels.shape.width, 1
    grown = levels.attach(None, *drafter.best(state[:, None, None], top_k, beta))
    while isinstance(grown, NextStarts):
        level += 1
        attend, rows = attention(level, grown)
        feature = drafter.carry(state[rows.source])
        state = drafter.run(embed(grown.token.flatten()), feature, rows.base, attend)
        of_rows = state.view(*grown.token.shape, 1, -1)
        best = drafter.best(of_rows, top_k, beta)
        grown = levels.attach(grown._replace(valid=rows.valid), *best)
    return grown if isinstance(grown, DraftTree) else tree_of(grown)
