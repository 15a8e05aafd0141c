"""SpecBlock as a learner: eq. 7 over a batch, and how the trained drafter drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vllm_specblock.drafters.specblock import checkpoint as drafter_files
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.train.attention import Kernel
from vllm_specblock.train.distributed import mean_over_ranks
from vllm_specblock.train.eval.drafting import SpecBlockDraft, serving_shape
from vllm_specblock.train.learner import Draft, EvalSequence, Learner, LossOutput, TrainBatch
from vllm_specblock.train.losses import BlockLoss, RankLoss
from vllm_specblock.train.objective import Unroll

Mean = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a SpecBlock drafter learns; the defaults are those of `TrainConfig`.

    Attributes:
        num_blocks: M, blocks drafted one after the other.
        rank_from: first update with the rank loss.
        rank_loss: its form.
        loss_floor: N_k of eq. 6 counts as at least this share of block 1's rows. With 0,
            while paths are still short, the mean of a handful of rows weighs as much as that
            of all rows, and its noise drowns the first position.
        shift_lr: learning rate of the layer-wise shift, as a multiple of everybody's.
        valid_prefix: eq. 5; False is an ablation.
        mask_restart: the valid-prefix mask starts anew in each block.
        kernel: of the attention.
        recompute: activation checkpointing, of the layers and of the logits.
        rejected_only: see `block_loss`; for updates while serving, as OSD makes them.
        compiled: run the drafter's forward through torch.compile.
    """

    num_blocks: int = 2
    rank_from: int = 2000
    rank_loss: RankLoss = "plain"
    loss_floor: float = 0.25
    shift_lr: float = 1.0
    valid_prefix: bool = True
    mask_restart: bool = False
    kernel: Kernel = "sdpa"
    recompute: bool = False
    rejected_only: bool = False
    compiled: bool = False


class SpecBlockLearner(Learner):
    """A SpecBlock drafter with its objective.

    Args:
        drafter: float32, in training mode.
        recipe: how it learns.
        shape: of the trees it is judged by (default: what serving drafts by default).
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
        # A list: as an attribute the compiled function would be a module of ours.
        self._forward = [torch.compile(drafter.forward) if recipe.compiled else drafter.forward]

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        recipe = self.recipe
        blocks = Unroll(
            self.drafter,
            train_batch,
            valid_prefix=recipe.valid_prefix,
            mask_restart=recipe.mask_restart,
            rank=recipe.rank_loss if train_batch.step >= recipe.rank_from else None,
            kernel=recipe.kernel,
            recompute=recipe.recompute,
            rejected_only=recipe.rejected_only,
            forward=self._forward[0],
        ).blocks(self.restart_positions(train_batch))
        return outcome(blocks, recipe.num_blocks, recipe.loss_floor, train_batch.mean)

    def restart_positions(self, train_batch: TrainBatch) -> list[int]:
        """Where later blocks start in this batch: one position 1..K per boundary."""
        block, boundaries = self.drafter.config.block_size, self.recipe.num_blocks - 1
        return torch.randint(1, block + 1, (boundaries,), generator=train_batch.draws()).tolist()

    def rate_of(self, name: str) -> float:
        return self.recipe.shift_lr if name.startswith("drafter.shift_proj.") else 1.0

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
    """Eq. 7 from the sums of up to `num_blocks` blocks: those that were not reached count 0.

    mean: sums, rows and a floor of the divisors -> means over the whole batch.
    """
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
