"""One training pass: every row of a batch drafts its M blocks, and eq. 7 sums their losses.

Row i of a window is (features of x_i, token x_{i+1}, RoPE base i+1). Position k of a block that
starts `offset` tokens further on predicts x_{i+1+offset+k}; block 1 has offset 0, and a cut at s
adds s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.train.attention import FirstBlock, NextBlock
from vllm_specblock.train.features import Teaching
from vllm_specblock.train.losses import OUTSIDE, BlockLoss, block_loss


@dataclass(frozen=True)
class Objective:
    """Eq. 7 over one batch, and the blocks that it is made of.

    loss: [] fp32; blocks: one entry per block that had a row to draft from.
    """

    loss: Tensor
    blocks: list[BlockLoss]


class Unroll:
    """Drafts blocks 1..M of a batch of windows as training does.

    Args:
        drafter: the model being trained.
        embed: target ids -> the target's own embeddings [..., H].
        tokens: [B, L] int64, negative past a window's end.
        teaching: the target's features and law for the same tokens.
        mask_restart: ablation, block 2's mask does not follow from block 1's.
        loss_floor: N_k of eq. 6 counts as at least this share of block 1's rows; see
            `block_loss`.
        first_row: [B] int64, rows before it give context but no loss (default: all count).
        forward: drafter.forward, or a compiled form of it.
    """

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        embed: Callable[[Tensor], Tensor],
        tokens: Tensor,
        teaching: Teaching,
        mask_restart: bool = False,
        loss_floor: float = 0.0,
        first_row: Tensor | None = None,
        forward: Callable | None = None,
    ):
        self.drafter, self.embed, self.tokens, self.teaching = drafter, embed, tokens, teaching
        self.mask_restart, self.forward = mask_restart, forward or drafter.forward
        self.config = drafter.config
        self.first_row = torch.zeros_like(tokens[:, 0]) if first_row is None else first_row
        self.least = loss_floor * tokens[:, 1:].numel()
        self.label = draft_labels(drafter, tokens)

    def objective(self, cuts: list[int], rank: bool) -> Objective:
        """Run block 1 and one more block after each of `cuts` (each 1..K).

        Returns the sum of all blocks' losses. A block that no row's path reaches is left out,
        and so are those after it.
        """
        batch, length = self.tokens.shape
        row = torch.arange(length - 1, device=self.tokens.device).expand(batch, -1)  # [B, S]
        attend: FirstBlock | NextBlock = FirstBlock(batch)
        condition = self.drafter.condition(self.teaching.hidden[:, :-1].flatten(0, 1))
        live, offset = row >= self.first_row[:, None], 0
        blocks = []
        for cut in [*cuts, None]:
            hidden = self._block(row, offset, condition, attend)
            blocks.append(self._loss(hidden, row, offset, live, rank))
            if cut is None:
                break
            on_path = blocks[-1].on_path[:, cut - 1].view_as(row)
            if self.mask_restart:
                on_path = live & (self._at(self.label, row + 1 + offset + cut) != OUTSIDE)
            source, live = compact(on_path)
            if not source.shape[1]:
                break
            states = hidden[:, cut - 1].view(*row.shape, -1)
            condition = states.gather(1, source[..., None].expand(-1, -1, states.shape[-1]))
            condition = condition.flatten(0, 1)
            attend = NextBlock(attend, source, cut, self.config.block_size)
            row, offset = row.gather(1, source), offset + cut
        return Objective(sum(block.draft.sum() + block.rank for block in blocks), blocks)

    def _block(self, row: Tensor, offset: int, condition: Tensor, attend) -> Tensor:
        """row [B, R] -> hidden [B·R, K, H]."""
        token = self._at(self.tokens, row + 1 + offset).clamp(min=0).flatten()
        base = row.flatten() + 1 + (offset if self.config.block_rope == "path" else 0)
        return self.forward(condition, self.embed(token), base, attend)

    def _loss(self, hidden: Tensor, row: Tensor, offset: int, live: Tensor, rank: bool):
        batch, length = self.tokens.shape
        step = torch.arange(1, self.config.block_size + 1, device=row.device)
        place = (row[..., None] + 1 + offset + step).flatten(1)  # [B, R·K]
        label = self._at(self.label, place).view(-1, self.config.block_size)
        window = torch.arange(batch, device=row.device)[:, None]
        law_row = (window * length + (place - 1).clamp(max=length - 1)).view_as(label)
        law = self.teaching.law.flatten(0, 1)
        return block_loss(
            self.drafter, hidden, label, law, law_row, live.flatten(), rank, self.least
        )

    def _at(self, values: Tensor, place: Tensor) -> Tensor:
        """values [B, L] at columns place [B, n]; `OUTSIDE` past the last column."""
        inside = place < values.shape[1]
        return values.gather(1, place.clamp(max=values.shape[1] - 1)).where(inside, OUTSIDE)


def draft_labels(drafter: SpecBlockDrafter, tokens: Tensor) -> Tensor:
    """Target ids [...] -> draft ids, `OUTSIDE` where the drafter has none (or the id is < 0)."""
    inside = drafter.t2d.cumsum(0) - 1
    to_draft = torch.where(drafter.t2d, inside, OUTSIDE)
    return to_draft[tokens.clamp(min=0)].where(tokens >= 0, OUTSIDE)


def compact(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `wanted` [B, n] bool that are set, as a rectangle.

    Returns:
        index [B, R] int64 and set [B, R] bool, with R the most that any row has; rows with
        fewer are filled up with columns that are not set.
    """
    width = int(wanted.sum(1).max())
    index = wanted.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return index, wanted.gather(1, index)
