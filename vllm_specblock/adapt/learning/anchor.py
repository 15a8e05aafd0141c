"""KL to the drafter as it was delivered: the paper's guard against drift (SpecBlock §3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.attention import FirstBlock
from vllm_specblock.train.learner import TrainBatch


def anchor(drafter: SpecBlockModel, origin: SpecBlockModel, train_batch: TrainBatch) -> Tensor:
    """KL(p_θ ‖ p_θ0) of block 1's K positions, a mean over the rows that serving drafts from.

    Args:
        drafter: θ. origin: θ_0, of the same config.

    Returns:
        [] fp32, nats, with a gradient for θ; 0 where no row counts.
    """
    live = _live(train_batch)
    if not live.any():
        return torch.zeros((), device=live.device)
    own = _log_probs(drafter, train_batch, live)
    with torch.no_grad():
        before = _log_probs(origin, train_batch, live)
    return (own.exp() * (own - before)).sum(-1).mean()


def _live(train_batch: TrainBatch) -> Tensor:
    """[B, L − 1] bool, rows whose root the target drew itself."""
    batch = train_batch.batch
    windows, length = batch.tokens.shape
    row = torch.arange(length - 1, device=batch.tokens.device).expand(windows, -1)
    return batch.at(batch.loss_mask, row, row + 1, False)


def _log_probs(drafter: SpecBlockModel, train_batch: TrainBatch, live: Tensor) -> Tensor:
    """Of block 1 at the n live rows, [n, K, Vd] fp32."""
    batch = train_batch.batch
    hidden = drafter(
        drafter.condition(train_batch.target_outputs.hidden[:, :-1].flatten(0, 1)),
        train_batch.embed(batch.tokens[:, 1:].clamp(min=0).flatten()),
        (batch.position[:, :-1] + 1).flatten(),
        FirstBlock(batch, drafter.config.block_size),
    )
    normed = drafter.norm(hidden[live.flatten()])
    return drafter.lm_head(normed).float().log_softmax(-1)
