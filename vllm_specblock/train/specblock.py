"""SpecBlock as a learner: eq. 7 over a batch, and how the trained drafter drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vllm_specblock.drafters.specblock import checkpoint as drafter_files
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.train.distributed import mean_over_ranks
from vllm_specblock.train.eval.drafting import SpecBlockDraft, serving_shape
from vllm_specblock.train.learner import Draft, EvalSequence, Learner, LossOutput, TrainBatch
from vllm_specblock.train.losses import BlockLoss
from vllm_specblock.train.objective import Recipe, Unroll

Mean = Callable[[Tensor, Tensor, float], Tensor]


class SpecBlockLearner(Learner):
    """A SpecBlock drafter with its objective.

    Args:
        drafter: float32, in training mode.
        shape: of the trees it is judged by (default: those of serving).
    """

    def __init__(
        self, drafter: SpecBlockModel, recipe: Recipe, shape: TreeShape | None = None
    ) -> None:
        super().__init__()
        self.drafter, self.recipe = drafter, recipe
        self.shape = shape or serving_shape(drafter)
        if recipe.recompute:
            for layer in drafter.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        recipe, block = self.recipe, self.drafter.config.block_size
        draws = torch.Generator().manual_seed(train_batch.seed)
        # Where later blocks start in this batch: one position 1..K per boundary.
        starts = torch.randint(1, block + 1, (recipe.num_blocks - 1,), generator=draws).tolist()
        unroll = Unroll(self.drafter, train_batch, recipe)
        return outcome(
            unroll.blocks(starts), recipe.num_blocks, recipe.loss_floor, train_batch.mean
        )

    def draft_along(self, sequence: EvalSequence) -> Draft:
        return SpecBlockDraft(self.drafter, sequence, self.shape)

    def save(self, directory: Path) -> None:
        # Not deepcopy of the module: that would take the checkpointed forwards along.
        drafter = SpecBlockModel(self.drafter.config)
        drafter.load_state_dict(self.drafter.state_dict())
        drafter_files.save(drafter.to(torch.bfloat16), directory)


def outcome(
    blocks: list[BlockLoss], num_blocks: int, loss_floor: float, mean: Mean = mean_over_ranks
) -> LossOutput:
    """Eq. 7 from the sums of up to `num_blocks` blocks: those that were not reached count 0;
    `mean`: see `mean_over_ranks`."""
    absent = num_blocks - len(blocks)

    def grid(rows: list[Tensor]) -> Tensor:
        return torch.cat([torch.stack(rows).float(), rows[0].new_zeros(absent, *rows[0].shape)])

    num_positions = grid([block.num_positions for block in blocks])
    ce_loss = grid([block.draft for block in blocks])
    draft = mean(ce_loss, num_positions, loss_floor)
    rank = mean(grid([block.rank for block in blocks]), num_positions.sum(1), 0.0)
    return LossOutput(
        loss=draft.sum() + rank.sum(),
        ce_loss=ce_loss.detach(),
        num_positions=num_positions,
        hits=grid([block.hit.sum(0) for block in blocks]),
        seen=grid([block.on_path.sum(0) for block in blocks]),
        rank_loss=rank.detach().sum() / len(blocks),
    )
