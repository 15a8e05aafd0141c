"""What one update of SpecBlock's training has to compute, counted from the text alone.

A row costs a pass through the layers, a counted position costs the LM head, and a pair of a query
and an entry that it sees costs attention. Which of them an update has follows from where the
drafter is right and from the cuts, so nothing has to be watched while it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.target.features import OnlineTeacher


@dataclass(frozen=True)
class Load:
    """How much one update has to compute.

    Attributes:
        rows: [M] rows of each block; laid_out: with those that fill the rectangle up.
        num_positions: [M][K] rows that a loss is counted for, and so runs the LM head for.
        visible: pairs of a query position and an entry that it sees, over all blocks.
    """

    rows: list[int]
    laid_out: list[int]
    num_positions: list[list[int]]
    visible: int


def load_of(right: Tensor, restart_positions: Sequence[int], block: int) -> Load:
    """The load of windows of one document each, every token of which is counted.

    Args:
        right: [B, L] bool on the CPU, the drafter's choice for this column is its token.
        restart_positions: where each block after the first starts, 1..K.
        block: K.
    """
    windows, length = right.shape
    row = torch.arange(length - 1)
    live = torch.ones(windows, length - 1, dtype=torch.bool)
    rows, laid_out, num_positions, visible, offset = [], [], [], 0, 0
    for restart_position in [*restart_positions, None]:
        rows.append(int(live.sum()))
        laid_out.append(windows * int(live.sum(1).max()))
        # Earlier rows' block 1, the path of `offset` entries, the block itself up to each position.
        sees = block * (row * block + offset) + block * (block + 1) // 2
        visible += int((live * sees).sum())
        path, onward, counted_here = live, live, []
        for k in range(1, block + 1):
            place = row + 1 + offset + k
            path = path & (place < length)
            counted_here.append(int(path.sum()))
            onward = path if k == restart_position else onward
            path = path & right[:, place.clamp(max=length - 1)]
        num_positions.append(counted_here)
        live, offset = onward, offset + (restart_position or 0)
    return Load(rows, laid_out, num_positions, visible)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations, a multiplication and an addition being two. Those of rows that
    fill up, of recomputed activations and of element-wise arithmetic are left out."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        return self.matmul + self.attention


def drafter_flops(drafter: SpecBlockModel, load: Load) -> Flops:
    """Forward and backward of one update with the rank loss."""
    size, block = drafter.config.hidden_size, drafter.config.block_size
    rows, blocks = sum(load.rows), sum(count > 0 for count in load.rows)
    positions, num_positions = block * rows, sum(map(sum, load.num_positions))
    shared, own = drafter.rank_head[0].weight.numel(), drafter.rank_head[2].weight.numel()
    # Three products each: forward, gradient of the input, gradient of the weight.
    thrice = rows * 2 * size * size + blocks * block * size * size  # fuse: per row, per query
    thrice += positions * (_matrices(drafter.layers) + _matrices(drafter.shift_proj))
    thrice += num_positions * (drafter.lm_head.weight.numel() + own)
    # No gradient goes into the features, nor from the rank head into the trunk.
    twice = (
        load.rows[0] * drafter.input_layer.condition_proj.weight.numel() + num_positions * shared
    )
    width = drafter.config.num_attention_heads * drafter.config.head_dim
    pairs = len(drafter.layers) * load.visible
    return Flops(2 * (3 * thrice + 2 * twice), 3 * 4 * width * pairs)


def teacher_flops(teacher: OnlineTeacher, windows: int, length: int) -> Flops:
    """Forward of the target over windows of one document each, and p*."""
    config = teacher.decoder.config
    weights = _matrices(teacher.decoder.layers) + teacher.head.numel()
    pairs = windows * length * (length + 1) // 2 * config.num_hidden_layers
    width = config.num_attention_heads * config.head_dim
    return Flops(2 * windows * length * weights, 4 * width * pairs)


def _matrices(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
