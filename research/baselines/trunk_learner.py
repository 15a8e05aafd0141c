"""Drafters whose K positions come out of a `Trunk` over the target's features."""

from __future__ import annotations

from collections.abc import Iterator

from baselines.positions import PositionsLearner
from torch import Tensor, nn

from vllm_specblock.drafters.baselines.trunk import Trunk
from vllm_specblock.drafters.specblock.config import DrafterConfig

_ROWS_AT_ONCE = 256


class TrunkLearner(PositionsLearner):
    """First weights; goes before the network among the base classes.

    Args:
        config: sizes. What it says of the rank head and the shift is not read.
        d2t, t2d: draft vocabulary.
        head: [Vd, H], first weights of the LM head, the target's final norm folded in.
        budget: N, nodes of a drafted tree.
    """

    trunk: Trunk

    def __init__(
        self,
        config: DrafterConfig,
        d2t: Tensor,
        t2d: Tensor,
        head: Tensor | None = None,
        budget: int = 60,
    ):
        super().__init__(config)
        draw_weights(self.trunk)
        self.begin(d2t, t2d, head)
        self.budget = budget


def draw_weights(trunk: Trunk) -> None:
    """First weights, from the global generator: inputs are normed, and outputs of unit size."""
    for weight in trunk.parameters():
        if weight.dim() == 2:  # the others are norms
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def passes_over(rows: int) -> Iterator[slice]:
    """`rows` rows of a text in passes that bound the memory of a long one."""
    for start in range(0, rows, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, rows))
