"""SpecBlock's training objective: all rows of a batch draft M blocks, as inference would (section
3.3), and the drafter as a learner.

Row t reads the target's features of x_t and the token x_{t+1} (RoPE base t+1 in its document).
Position k of a block that starts `offset` tokens further on predicts x_{t+1+offset+k}; block 1
has offset 0, and a cut at s adds s.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train import saving
from vllm_specblock.train.attention import FirstBlock, Kernel, NextBlock
from vllm_specblock.train.config import Recipe
from vllm_specblock.train.distributed import BatchCounts
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    Draft,
    EvalSequence,
    Learner,
    LossOutput,
    TrainBatch,
    draft_labels,
)
from vllm_specblock.train.losses import BlockLoss, block_loss


class SpecBlockLearner(Learner):
    """A SpecBlock drafter with its objective.

    Args:
        drafter: float32, in training mode.
        rejected_only: see `block_loss`; for updates while serving, as in OSD.
    """

    def __init__(
        self,
        drafter: SpecBlockModel,
        recipe: Recipe,
        kernel: Kernel = "sdpa",
        rejected_only: bool = False,
    ) -> None:
        super().__init__()
        self.drafter, self.recipe = drafter, recipe
        self.kernel: Kernel = kernel
        self.rejected_only = rejected_only
        self.shape = serving_shape(drafter)
        if recipe.recompute:
            for layer in drafter.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        recipe, block = self.recipe, self.drafter.config.block_size
        draws = torch.Generator().manual_seed(train_batch.seed)
        # Start of later blocks in this batch: one position 1..K per boundary.
        starts = torch.randint(1, block + 1, (recipe.num_blocks - 1,), generator=draws).tolist()
        blocks = Unroll(self, train_batch).blocks(starts)
        return outcome(blocks, recipe.num_blocks, recipe.loss_floor, train_batch.counts)

    def draft_along(self, sequence: EvalSequence) -> Draft:
        return draft_trees(self.drafter, sequence, self.shape)

    def save(self, directory: Path) -> None:
        # No deepcopy of the module: it would copy checkpointed forwards.
        drafter = SpecBlockModel(self.drafter.config)
        drafter.load_state_dict(self.drafter.state_dict())
        saving.save(drafter.to(torch.bfloat16), directory)


def outcome(
    blocks: list[BlockLoss], num_blocks: int, loss_floor: float, counts: BatchCounts
) -> LossOutput:
    """Return eq. 7 from the sums of up to `num_blocks` blocks; unreached blocks count 0."""
    absent = num_blocks - len(blocks)

    def grid(rows: list[Tensor]) -> Tensor:
        return torch.cat([torch.stack(rows).float(), rows[0].new_zeros(absent, *rows[0].shape)])

    num_positions = grid([block.num_positions for block in blocks])
    ce_loss = grid([block.draft for block in blocks])
    draft = counts.mean(ce_loss, num_positions, loss_floor)
    rank = counts.mean(grid([block.rank for block in blocks]), num_positions.sum(1), name="rank")
    return LossOutput(
        loss=draft.sum() + rank.sum(),
        ce_loss=ce_loss.detach(),
        num_positions=num_positions,
        hits=grid([block.hit.sum(0) for block in blocks]),
        seen=grid([block.on_path.sum(0) for block in blocks]),
        rank_loss=rank.detach().sum() / len(blocks),
    )


class Unroll:
    """Drafts blocks 1..M of a batch of windows for training."""

    def __init__(self, learner: SpecBlockLearner, train_batch: TrainBatch) -> None:
        self.learner, self.recipe = learner, learner.recipe
        self.drafter, self.config = learner.drafter, learner.drafter.config
        self.batch, self.embed = train_batch.batch, train_batch.embed
        self.hidden = train_batch.target_outputs.hidden
        self.target_probs = train_batch.target_outputs.target_probs.flatten(0, 1)
        self.rank = train_batch.step >= self.recipe.rank_from
        self.label = draft_labels(self.drafter.t2d, train_batch.batch)

    def blocks(self, restart_positions: list[int]) -> list[BlockLoss]:
        """Run block 1 and one more block after each of `restart_positions` (each 1..K), up to the
        first that no row's path reaches."""
        batch, length = self.batch.tokens.shape
        row = torch.arange(length - 1, device=self.label.device).expand(batch, -1)  # [B, S]
        attend: FirstBlock | NextBlock = FirstBlock(
            self.batch, self.config.block_size, self.learner.kernel
        )
        condition = self.drafter.condition(self.hidden[:, :-1].flatten(0, 1))
        # Roots are tokens that the target generated, as in serving.
        live = self.batch.at(self.batch.loss_mask, row, row + 1, False)
        offset, blocks = 0, []
        for restart_position in [*restart_positions, None]:
            hidden = self._block(row, offset, condition, attend)
            blocks.append(self._loss(hidden, row, offset, live))
            if restart_position is None:
                break
            source, live = compact(self._reached(blocks[-1], row, offset, live, restart_position))
            if not source.shape[1]:
                break
            states = hidden[:, restart_position - 1].view(*row.shape, -1)
            condition = states.gather(1, source[..., None].expand(-1, -1, states.shape[-1]))
            condition = condition.flatten(0, 1)
            attend = NextBlock(attend, source, restart_position)
            row, offset = row.gather(1, source), offset + restart_position
        return blocks

    def _reached(
        self, block: BlockLoss, row: Tensor, offset: int, live: Tensor, restart_position: int
    ) -> Tensor:
        """Return the rows whose path may continue from `restart_position`, [B, R] bool."""
        if self.recipe.valid_prefix and not self.recipe.mask_restart:
            return block.on_path[:, restart_position - 1].view_as(row)
        named = (
            self.batch.at(self.label, row, row + 1 + offset + restart_position, IGNORE_INDEX)
            != IGNORE_INDEX
        )
        return live & named

    def _block(self, row: Tensor, offset: int, condition: Tensor, attend: Attend) -> Tensor:
        """row [B, R] -> hidden [B·R, K, H]."""
        token = self.batch.at(self.batch.tokens, row, row + 1 + offset, 0).clamp(min=0)
        base = self.batch.position.gather(1, row) + 1
        if self.config.block_rope == "path":
            base = base + offset
        return self.drafter(condition, self.embed(token.flatten()), base.flatten(), attend)

    def _loss(self, hidden: Tensor, row: Tensor, offset: int, live: Tensor) -> BlockLoss:
        windows, length = self.batch.tokens.shape
        block = self.config.block_size
        step = torch.arange(1, block + 1, device=row.device)
        place = (row[..., None] + 1 + offset + step).flatten(1)  # [B, R·K]
        label = self.batch.at(self.label, row.repeat_interleave(block, 1), place, IGNORE_INDEX)
        window = torch.arange(windows, device=row.device)[:, None]
        target_row = window * length + (place - 1).clamp(max=length - 1)
        return block_loss(
            self.drafter,
            hidden,
            label.view(-1, block),
            self.target_probs,
            target_row.view(-1, block),
            live.flatten(),
            self.rank,
            self.recipe.valid_prefix,
            self.learner.rejected_only,
        )


def compact(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `wanted` [B, n] bool that are set: index [B, R] int64 and set [B, R] bool, with R
    the most that any row has; shorter rows are filled up with columns that are not set."""
    width = int(wanted.sum(1).max())
    index = wanted.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return index, wanted.gather(1, index)
