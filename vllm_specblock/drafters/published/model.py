"""The LM head of other projects' drafters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


class DraftLM(nn.Module):
    """A network that names draft tokens by an LM head, its own or the target's.

    Attributes:
        norm: what the LM head reads has been through it.
        lm_head: [Vd, H].
        d2t: [Vd] int64, target id − draft id.
        logit_scale: factor on the logits.
        wants_head: whether it still lacks an LM head, see `share_head`.
    """

    norm: Any
    lm_head: nn.Linear
    d2t: Tensor
    logit_scale = 1.0
    wants_head = False

    def share_head(self, weight: Tensor) -> None:
        """Take the target's LM head: weight [V, H], which is read and never written."""
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)
        self.wants_head = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.norm.weight.dtype

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., Vd], before `logit_scale`."""
        return self.lm_head(self.norm(state))

    def best(self, state: Tensor, width: int, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `width` likeliest tokens at each state.

        state [R, ..., H], beta [R] float32 (None: 1, see `feedback/calibration.py`) ->
        log-probabilities over the draft vocabulary [R, ..., width] float32, best first, and
        target ids [R, ..., width] int64.
        """
        return topk_tokens(self.logits(state), self.d2t, width, self.logit_scale, beta)
