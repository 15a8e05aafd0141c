"""The SpecBlock network: one forward pass gives K dependent draft positions (paper, §3.1).

Shapes: T rows (condition, token, RoPE base) of one forward, K positions per row, H hidden size,
D head size, Vd draft vocabulary, C rank buckets. Parameter names are those of the published
checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.specblock.config import TOP_LOGPROBS, DrafterConfig
from vllm_specblock.triton_kernels.layers.layer_shift import layer_shift
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import (
    DraftLogits,
    lm_and_rank_head,
    top_and_features,
)
from vllm_specblock.triton_kernels.layers.norms import add_norm, norm_pair

RANK_FEATURES = TOP_LOGPROBS + 5
_RANK_HIDDEN = 256


class SpecBlockModel(nn.Module):
    """Block forward, LM head and rank head. It holds no embedding: that is the target's."""

    t2d: Tensor
    d2t: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, depth = config.hidden_size, config.num_hidden_layers
        self.input_layer = InputLayer(config)
        self.rotary = Rotary(config, block_size=config.block_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(depth))
        shifts = depth - 1 if config.layer_shift else 0
        self.shift_proj = nn.ModuleList(
            nn.Linear(2 * size, size, bias=False) for _ in range(shifts)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(size + RANK_FEATURES, _RANK_HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(_RANK_HIDDEN, config.rank_classes, bias=False),
        )
        # Until a mapping is loaded, the draft vocabulary is the first Vd target ids.
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def rank_scope(self) -> int | None:
        """Logits over which rank features are taken; None: all."""
        return None if self.config.rank_topk == "full" else self.config.rank_topk

    def condition(self, features: Tensor) -> Tensor:
        """Context feature of block 1 (eq. 1): low, mid and high states [T, 3·Ht] -> [T, H]."""
        return self.input_layer.condition_proj(features)

    def forward(
        self,
        condition: Tensor,  # [T, H]
        embedding: Tensor,  # [T, H], the target's, of each row's token
        base: Tensor,  # [T] int64, RoPE position of each row's first draft position
        attend: Attend,
        keep: Tensor | None = None,  # [Q] int64, rows whose outputs are wanted; default: all
        rows: Tensor | None = None,  # [T] int64, rows of `condition` to take; default: all
    ) -> Tensor:
        """Run all decoder layers over T rows (eqs. 2 and 3).

        `condition` is from the method of that name; in a later block it is this function's output
        at the position where the block starts.

        Returns:
            [T or Q, K, H], the state before the final norm.
        """
        hidden, normed = self.input_layer(
            condition, embedding, self.layers[0].input_layernorm, rows
        )
        rope = self.rotary(base, hidden.dtype)
        last = len(self.layers) - 1
        layer: Any  # ModuleList is untyped
        for index, layer in enumerate(self.layers):
            if index and self.config.layer_shift:
                shift = self.shift_proj[index - 1]
                hidden, normed = layer_shift(hidden, shift, layer.input_layernorm)
            kept = keep if index == last else None
            hidden, normed = layer(index, hidden, rope, attend, kept, normed), None
        return hidden

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return draft and rank logits (§3.2): hidden [..., H] -> ([..., Vd], [..., C]).

        The rank head reads what the LM head reads, as the published weights want; in eq. 4 it reads
        the state before the final norm. No gradient of the rank logits goes further.
        """
        normed, logits = self._read(hidden)
        return logits, self.rank(normed, self.rank_features(logits))

    @torch.no_grad()
    def rank_features(self, logits: Tensor) -> Tensor:
        """Return ψ of eq. 4: logits [..., Vd] -> [..., 15] float32, no gradient."""
        return top_and_features(logits, 0, self.rank_scope)[1]

    def rank(self, normed: Tensor, features: Tensor) -> Tensor:
        """Return rank logits [..., C] of normed [..., H] and features [..., 15]."""
        features = features.to(normed.dtype)
        return self.rank_head(torch.cat([normed.detach(), features], dim=-1))

    @torch.no_grad()
    def candidates(
        self, hidden: Tensor, width: int, beta: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best `width` tokens and the rank bucket of each position; no gradient.

        hidden [R, ..., H], beta [R] float32 (None: 1, see `feedback/calibration.py`) ->
        log-probabilities over the whole draft vocabulary [R, ..., width] float32, descending,
        target ids [R, ..., width] int64, and rank buckets [R, ...] int64.
        """
        normed, logits = self._read(hidden)
        given = normed, logits, self.d2t, self.rank_head, width, self.rank_scope, beta
        return lm_and_rank_head(DraftLogits(*given))

    def _read(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        return normed, self.lm_head(normed)


class InputLayer(nn.Module):
    """Condition, token and position query, normed and fused (eq. 2)."""

    folded: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.query_norm = RMSNorm(size, eps)
        self.position_queries = nn.Embedding(config.block_size, size)
        self.fuse = nn.Linear(3 * size, size, bias=False)
        self.register_buffer("folded", None, persistent=False)  # [K, H], see `fold`
        self.prefix_broadcast = config.prefix_broadcast

    def fold(self) -> None:
        """Compute the queries' part once; `fuse` then takes a row only."""
        self.folded = self._queries()
        size = self.folded.shape[-1]
        of_row = self.fuse.weight[:, : 2 * size].detach().clone()
        self.fuse = nn.Linear(2 * size, size, bias=False, device="meta")
        self.fuse.weight = nn.Parameter(of_row, requires_grad=False)

    def forward(
        self, condition: Tensor, embedding: Tensor, norm: RMSNorm, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """condition [T, H], or `rows` of it, embedding [T, H] -> [T, K, H], and its `norm`."""
        # W_fuse is linear, and only the query varies over the K positions.
        row = norm_pair(condition, embedding, self.condition_norm, self.token_norm, rows)
        if self.folded is not None:
            row, query = self.fuse(row), self.folded
        else:
            row, query = F.linear(row, self.fuse.weight[:, : row.shape[-1]]), self._queries()
        if self.prefix_broadcast:
            return add_norm(row[:, None], query[None], norm)
        first, rest = row[:, None] + query[:1], query[1:].expand(len(row), -1, -1)
        hidden = torch.cat([first, rest], dim=1)
        return hidden, norm(hidden)

    def _queries(self) -> Tensor:  # [K, H]
        query = self.query_norm(self.position_queries.weight)
        return F.linear(query, self.fuse.weight[:, 2 * query.shape[-1] :])
