"""The training objective: all rows of a batch draft M blocks, as inference would (section 3.3).

Row t reads the target's features of x_t and the token x_{t+1} (RoPE base t+1 in its document).
Position k of a block that starts `offset` tokens further on predicts x_{t+1+offset+k}; block 1
has offset 0, and a cut at s adds s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.train.attention import FirstBlock, Kernel, NextBlock
from vllm_specblock.train.labels import draft_labels
from vllm_specblock.train.learner import OUTSIDE, Lesson
from vllm_specblock.train.losses import BlockLoss, RankLoss, block_loss


class Unroll:
    """Drafts blocks 1..M of a batch of windows as training does.

    Args:
        drafter: the model being trained.
        lesson: the batch, with the target's features, law and embeddings.
        valid_prefix: see `block_loss`.
        mask_restart: block 2's mask does not follow from block 1's.
        rank: form of the rank loss, None for none.
        kernel: of the attention.
        recompute: spare memory, see `block_loss`.
        forward: drafter.forward, or a compiled form of it.
    """

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        lesson: Lesson,
        *,
        valid_prefix: bool = True,
        mask_restart: bool = False,
        rank: RankLoss | None = None,
        kernel: Kernel = "sdpa",
        recompute: bool = False,
        forward: Callable | None = None,
    ):
        self.drafter, self.config = drafter, drafter.config
        self.batch, self.teaching, self.embed = lesson.batch, lesson.teaching, lesson.embed
        self.valid_prefix, self.mask_restart, self.rank = valid_prefix, mask_restart, rank
        self.kernel, self.recompute = kernel, recompute
        self.forward = forward or drafter.forward
        self.label = draft_labels(drafter.t2d, lesson.batch)

    def blocks(self, cuts: list[int]) -> list[BlockLoss]:
        """Run block 1 and one more block after each of `cuts` (each 1..K).

        A block that no row's path reaches is left out, and so are those after it.
        """
        batch, length = self.batch.tokens.shape
        row = torch.arange(length - 1, device=self.label.device).expand(batch, -1)  # [B, S]
        attend: FirstBlock | NextBlock = FirstBlock(self.batch, self.config.block_size, self.kernel)
        condition = self.drafter.condition(self.teaching.hidden[:, :-1].flatten(0, 1))
        # The target drew a row's root itself: serving drafts from no other row.
        live = self.batch.at(self.batch.counted, row, row + 1, False)
        offset, blocks = 0, []
        for cut in [*cuts, None]:
            hidden = self._block(row, offset, condition, attend)
            blocks.append(self._loss(hidden, row, offset, live))
            if cut is None:
                break
            source, live = compact(self._reached(blocks[-1], row, offset, live, cut))
            if not source.shape[1]:
                break
            states = hidden[:, cut - 1].view(*row.shape, -1)
            condition = states.gather(1, source[..., None].expand(-1, -1, states.shape[-1]))
            condition = condition.flatten(0, 1)
            attend = NextBlock(attend, source, cut)
            row, offset = row.gather(1, source), offset + cut
        return blocks

    def _reached(
        self, block: BlockLoss, row: Tensor, offset: int, live: Tensor, cut: int
    ) -> Tensor:
        """Rows whose path may go on from position `cut`, [B, R] bool."""
        if self.valid_prefix and not self.mask_restart:
            return block.on_path[:, cut - 1].view_as(row)
        named = self.batch.at(self.label, row, row + 1 + offset + cut, OUTSIDE) != OUTSIDE
        return live & named

    def _block(self, row: Tensor, offset: int, condition: Tensor, attend) -> Tensor:
        """row [B, R] -> hidden [B·R, K, H]."""
        token = self.batch.at(self.batch.tokens, row, row + 1 + offset, 0).clamp(min=0)
        base = self.batch.position.gather(1, row) + 1
        if self.config.block_rope == "path":
            base = base + offset
        return self.forward(condition, self.embed(token.flatten()), base.flatten(), attend)

    def _loss(self, hidden: Tensor, row: Tensor, offset: int, live: Tensor) -> BlockLoss:
        windows, length = self.batch.tokens.shape
        block = self.config.block_size
        step = torch.arange(1, block + 1, device=row.device)
        place = (row[..., None] + 1 + offset + step).flatten(1)  # [B, R·K]
        label = self.batch.at(self.label, row.repeat_interleave(block, 1), place, OUTSIDE)
        window = torch.arange(windows, device=row.device)[:, None]
        law_row = window * length + (place - 1).clamp(max=length - 1)
        return block_loss(
            self.drafter,
            hidden,
            label.view(-1, block),
            self.teaching.law.flatten(0, 1),
            law_row.view(-1, block),
            live.flatten(),
            self.rank,
            self.valid_prefix,
            self.recompute,
        )


def compact(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `wanted` [B, n] bool that are set, as a rectangle.

    Returns:
        index [B, R] int64 and set [B, R] bool, with R the most that any row has; rows with
        fewer are filled up with columns that are not set.
    """
    width = int(wanted.sum(1).max())
    index = wanted.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return index, wanted.gather(1, index)
