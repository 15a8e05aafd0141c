"""KL to the drafter as it was delivered: the paper's guard against drift (SpecBlock §3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.attention import FirstBlock
from vllm_specblock.train.learner import TrainBatch


def anchor(drafter: SpecBlockModel, origin: SpecBlockModel, train_batch: TrainBatch) -> Tensor:
    """KL(p_θ ‖ p_θ0) of block 1's K positions, a mean over rows whose root the target drew itself.

    Args:
        drafter: θ. origin: θ_0, of the same config.

    Returns:
        [] fp32, nats, with a gradient for θ; 0 where there is no such row.
    """
    batch = train_batch.batch
    row = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    row = row.expand(len(batch.tokens), -1)
    live = batch.at(batch.loss_mask, row, row + 1, False).flatten()
    if not live.any():
        return torch.zeros((), device=live.device)

    def log_probs(model: SpecBlockModel) -> Tensor:
        """[live rows, K, Vd] fp32."""
        hidden = model(
            model.condition(train_batch.target_outputs.hidden[:, :-1].flatten(0, 1)),
            train_batch.embed(batch.tokens[:, 1:].clamp(min=0).flatten()),
            (batch.position[:, :-1] + 1).flatten(),
            FirstBlock(batch, model.config.block_size),
        )
        return model.lm_head(model.norm(hidden[live])).float().log_softmax(-1)

    own = log_probs(drafter)
    with torch.no_grad():
        before = log_probs(origin)
    return (own.exp() * (own - before)).sum(-1).mean()
