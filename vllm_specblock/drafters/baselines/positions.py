"""LM head over several draft positions of a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


class Positions(nn.Module):
    """Draft vocabulary and LM head.

    Args:
        hidden_size: H, what the LM head reads.
        draft_vocab_size: Vd.
    """

    d2t: Tensor

    def __init__(self, hidden_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)
        # What a draft id lacks to its target id. Until it is loaded: the first Vd target ids.
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def logits(self, states: Tensor) -> Tensor:
        """states [..., H] -> [..., Vd]."""
        return self.lm_head(self.normed(states))

    def normed(self, states: Tensor) -> Tensor:
        """What the LM head reads of states [..., H]."""
        return states

    def best(self, states: Tensor, width: int, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best `width` tokens (or all of a smaller vocabulary) at states [R, ..., H].

        Args:
            calibration: [R] float32, see `feedback/calibration.py`; None: 1.

        Returns:
            log-probabilities [R, ..., width] float32, descending, and target ids [R, ..., width]
            int64.
        """
        width = min(width, len(self.d2t))
        return topk_tokens(self.logits(states), self.d2t, width, 1.0, beta)
