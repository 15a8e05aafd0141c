"""Input and decoder layers of drafters that read the target's features, EAGLE's way.

An entry is a feature of some token, the target's or the drafter's own, fused with the embedding of
the token after it. Who sees whom is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from baselines.groups import draw_weights, seeded
from baselines.positions import PositionsLearner
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.specblock.config import DrafterConfig


class Trunk(nn.Module):
    """Input of entries, and decoder layers over any number of them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.rotary = Rotary(config)  # every entry has a position of its own
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.condition_norm.weight.dtype

    def condition(self, features: Tensor) -> Tensor:
        """The target's features [..., 3·Ht] -> [..., H]."""
        return self.condition_proj(features.to(self.dtype))

    def entry(self, condition: Tensor, embedding: Tensor) -> Tensor:
        """condition [..., H], embedding of the token after it [..., H] -> [..., H]."""
        token = self.token_norm(embedding.to(condition.dtype))
        return self.fuse(torch.cat([self.condition_norm(condition), token], dim=-1))

    def forward(
        self, entries: Tensor, position: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """All layers.

        Args:
            entries: [..., H], flattened to n entries.
            position: [...] int64, where RoPE has them.
            attend: called with the layer's number, query [n, 1, nh, D], key and value
                [n, 1, nkv, D].
            keep: [Q] int64, the only entries whose states are wanted; None: all.

        Returns:
            [..., H] or [Q, H], before the final norm.
        """
        rope = self.rotary(position.flatten(), entries.dtype)
        hidden = entries.reshape(-1, 1, entries.shape[-1])
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, rope, attend, keep if index == last else None)
        return hidden[:, 0] if keep is not None else hidden.view(entries.shape)


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

    @staticmethod
    def shape_like(target_config: Any, draft_vocab_size: int, **sizes: Any) -> DrafterConfig:
        """Sizes of a drafter for a target; `sizes` as `sizes_like` takes them, and its own."""
        raise NotImplementedError

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        budget: int = 60,
        **sizes: Any,
    ) -> Self:
        """A drafter for a target with this transformers config; `seed` of the weights."""
        config = cls.shape_like(target_config, len(d2t), **sizes)
        return seeded(seed, lambda: cls(config, d2t, t2d, head, budget))


def passes_over(rows: int) -> Iterator[slice]:
    """`rows` rows of a text in passes that bound the memory of a long one."""
    for start in range(0, rows, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, rows))
