"""What DFlash2 and DSpark (arXiv 2607.05147) add to DFlash: each token depends on the one before.

R blocks of S rows, H channels. Parameter names are DFlash2's.
"""

from __future__ import annotations

from collections.abc import Callable

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
        assert shape.conv_taps is not None and shape.conv_group is not None
        size, taps, group = shape.hidden_size, shape.conv_taps, shape.conv_group
        self.form = taps, size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """x [R·S, H], S = `size` -> the convolution of run(the convolution of x), [R·S, H]."""
        change = self.kernel_projection(x).unflatten(-1, (2, *self.form, 1))
        base = self.base_kernel.unflatten(-1, (self.form[1], -1))  # [2, taps, groups, group]
        before, after = (base + change).flatten(-2).unflatten(0, (-1, size)).unbind(2)
        return _along(run(_along(x, before)), after)


def _along(x: Tensor, weight: Tensor) -> Tensor:
    """Sum a block's row and those before it: x [R·S, H], weight [R, S, taps, H] -> [R·S, H]."""
    rows = x.unflatten(0, weight.shape[:2])
    out = weight[:, :, 0] * rows
    for tap in range(1, min(weight.shape[2], rows.shape[1])):
        out[:, tap:] += weight[:, tap:, tap] * rows[:, :-tap]
    return out.flatten(0, 1)


class ConvLayer(DecoderLayer):
    """A Qwen3 layer between convolutions, for blocks of `size` rows."""

    size = 1

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = BlockConv(shape), BlockConv(shape)

    def forward(
        self,
        index: int,
        hidden: Tensor,
        rope: Rope,
        attend: Attend,
        keep: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor:
        def mix(x: Tensor) -> Tensor:
            return self.self_attn(index, x, rope, attend, None)

        def feed(x: Tensor) -> Tensor:
            return self.mlp(x, torch.zeros_like(x))

        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), mix, self.size)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), feed, self.size)


class PairHead(nn.Module):
    """Adds ⟨before[p] · f(state), after[c]⟩ to the logit of token c behind token p.

    DFlash2's candidate selector, whose f is a projection; DSpark's Markov head, without f but with
    the scale of its logits.
    """

    def __init__(self, shape: DFlashShape, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(shape.vocab_size, rank)
        self.after = nn.Embedding(shape.draft_vocab_size, rank)
        projects = shape.conv_taps is not None
        self.scale = 1.0 if projects else shape.logit_scale
        self.of_state = nn.Linear(shape.hidden_size, rank, bias=False) if projects else None

    def forward(
        self,
        logprob: Tensor,
        draft: Tensor,
        token: Tensor,
        state: Tensor,
        root: Tensor,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Return log-probabilities [R, K, B, B] float32 of tokens behind those one place before.

        logprob [R, K, B] float32, without the head, over the draft vocabulary; draft, token
        [R, K, B] int64, draft and target ids; state [R, K, H]; root [R] int64. Tokens beyond those
        B keep their share.
        """
        first = root[:, None, None].expand(-1, 1, token.shape[2])
        left = self.before(torch.cat([first, token[:, :-1]], 1))
        if self.of_state is not None:
            left = left * self.of_state(state)[:, :, None]
        gain = (left @ self.after(draft).transpose(-1, -2)).float() * self.scale
        if beta is not None:
            gain = gain * beta[:, None, None, None]
        others = (-logprob.exp().sum(-1)).log1p()[..., None, None]  # NaN by rounding: none
        pair = logprob[:, :, None] + gain
        return pair - torch.logaddexp(pair.logsumexp(-1, keepdim=True), others.nan_to_num(-1e9))
