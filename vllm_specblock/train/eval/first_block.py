"""Block 1 over a whole text: in it no row depends on what was drafted or accepted before."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.drafters.specblock.dense_cache import DenseCache
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.learner import EvalSequence

TOGETHER = 128
"""Rows of one forward: bounds its mask."""


def first_block_along(drafter: SpecBlockModel, sequence: EvalSequence, cache: DenseCache) -> Tensor:
    """States of block 1 at every row but the last, whose next token is unknown.

    Args:
        sequence: the text, T tokens, on the drafter's device.
        cache: empty, in the drafter's dtype; it holds the rows then.

    Returns:
        [T − 1, K, H]; row i reads tokens up to i + 1 and drafts what follows them.
    """
    dtype, tokens = drafter.lm_head.weight.dtype, sequence.tokens
    rows = torch.arange(len(tokens) - 1, device=tokens.device)
    return torch.cat(
        [
            drafter(
                drafter.condition(sequence.hidden[part].to(dtype)),
                sequence.embed(tokens[part + 1]).to(dtype),
                part + 1,
                cache.append(),
            )
            for part in rows.split(TOGETHER)
        ]
    )
