"""What DFlash2 and DSpark (arXiv 2607.05147) add to DFlash: each token depends on the one before.

R blocks of S rows, H channels; K drafted positions of B tokens. Parameters are named as published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.layers import Attend, DecoderLayer
from vllm_specblock.drafters.dflash.config import DFlashShape
from vllm_specblock.triton_kernels.layers.rope import Rope


class BlockConv(nn.Module):
    """Two convolutions along each block, of what a layer reads and of what it gives.

    A row's weights are `base_kernel`'s and a change for each group of channels, by the row.
    """

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        size, taps, group = shape.hidden_size, shape.conv_kernel_size, shape.conv_group_size
        self.form = taps, size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """x [R, S, H] -> the convolution of run(the convolution of x), [R, S, H]."""
        change = self.kernel_projection(x).unflatten(-1, (2, *self.form, 1))
        base = self.base_kernel.unflatten(-1, (self.form[1], -1))  # [2, taps, groups, group]
        before, after = (base + change).flatten(-2).unbind(2)
        return _along(run(_along(x, before)), after)


def _along(x: Tensor, weight: Tensor) -> Tensor:
    """Sum a block's row and those before it: x [R, S, H], weight [R, S, taps, H] -> [R, S, H]."""
    out = weight[:, :, 0] * x
    for tap in range(1, min(weight.shape[2], x.shape[1])):
        out[:, tap:] += weight[:, tap:, tap] * x[:, :-tap]
    return out


class ConvLayer(DecoderLayer):
    """A Qwen3 layer between convolutions; its hidden states are [R, S, H]."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = BlockConv(shape), BlockConv(shape)

    def forward(
        self, index: int, hidden: Tensor, rope: Rope, attend: Attend, *_: Any, **__: Any
    ) -> Tensor:
        def mix(x: Tensor) -> Tensor:
            return self.self_attn(index, x.flatten(0, 1), rope, attend, None).view_as(x)

        def feed(x: Tensor) -> Tensor:
            return self.mlp(x, torch.zeros_like(x))

        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), mix)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), feed)


class MarkovHead(nn.Module):
    """DSpark's: adds scale · ⟨w1[p], w2[c]⟩ to the logit of token c behind token p."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        rank = shape.markov_rank or 0
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Embedding(shape.draft_vocab_size, rank)
        self.scale = shape.logit_scale

    def forward(self, before: Tensor, draft: Tensor, state: Tensor) -> Tensor:
        """Return what is added, [R, K, B, B]: by the target id before, and the draft id.

        before, draft [R, K, B] int64; state [R, K, H].
        """
        return (self.markov_w1(before) @ self.markov_w2(draft).mT).float() * self.scale


class CandidateSelector(nn.Module):
    """DFlash2's: adds ⟨predecessor[p] · projection(state), successor[c]⟩ instead."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        rank = shape.selector_rank or 0
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)

    def forward(self, before: Tensor, draft: Tensor, state: Tensor) -> Tensor:
        """As `MarkovHead`."""
        left = self.predecessor_codebook[before] * self.hidden_projection(state)[:, :, None]
        return left @ self.successor_codebook[draft].mT


def pair_logprobs(logprob: Tensor, added: Tensor, beta: Tensor | None) -> Tensor:
    """Return log-probabilities [R, K, B, B] float32 of tokens behind those one place before.

    logprob [R, K, B] float32, without what is `added` to their logits [R, K, B, B], over the draft
    vocabulary; beta [R] float32. Tokens beyond those B keep their share.
    """
    gain = added.float() if beta is None else added.float() * beta[:, None, None, None]
    others = (-logprob.exp().sum(-1)).log1p()[..., None, None]  # NaN by rounding: none
    pair = logprob[:, :, None] + gain
    return pair - torch.logaddexp(pair.logsumexp(-1, keepdim=True), others.nan_to_num(-1e9))
