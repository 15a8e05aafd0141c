"""Medusa (arXiv 2401.10774): K heads on the target's last state, each for one position ahead.

Head k is n residual blocks x + SiLU(W x). W = 0 at first, so every head starts as the target's own.
The target stays frozen (Medusa-1), and position k weighs 0.8^k in the loss.
Simplified: the heads share one LM head over the draft vocabulary, and W has no bias. Unlike the
paper's static tree ours is the exact best N of the product of the heads' distributions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from baselines.groups import MedusaShape
from baselines.options import MedusaConfig
from baselines.positions import DECAY, Positions, PositionsLearner, served, write_folder
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.checkpoint_files import MAPPING
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.interface import CacheLayer
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.train.data.shards import replace as replace_file
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch
from vllm_specblock.tree import DraftTree


class MedusaModel(Positions):
    """The heads. Parameter names are those that vLLM's own Medusa loads."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape.hidden_size, shape.draft_vocab_size)
        self.config, self.norm = shape, nn.Identity()  # the target's final norm came before
        self.blocks = nn.ModuleList(
            ResidualBlocks(shape.hidden_size, shape.num_layers) for _ in range(shape.num_heads)
        )

    def states(self, last: Tensor) -> Tensor:
        """The target's last states [..., Ht], of the drafter's dtype -> [..., K, Ht]."""
        return torch.stack([block(last) for block in self.blocks], dim=-2)


class ResidualBlocks(nn.Module):
    """Those of one position."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class MedusaDrafter(NetworkDrafter):
    """The best N of the product of the heads' distributions, from the newest state alone.

    It reads what the target's LM head reads, and nothing is kept in the cache.
    """

    kind = "medusa"
    model: MedusaModel

    def set_shape(self, options: MedusaConfig, lookahead: int) -> None:
        num_nodes, config = self.num_nodes, self.model.config
        width = min(num_nodes, config.draft_vocab_size)
        self.max_depth = min(num_nodes, config.num_heads)
        self.trees = PathTrees(self.max_depth, width, num_nodes, self.device)

    def cache_layers(self) -> list[CacheLayer]:
        return []

    def warm_up(self, block_table: Tensor, most_rows: int) -> None:
        """Nothing to compile."""

    def advance(self, rows: CommittedTokens) -> None:
        self.state = self._forward(rows)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        return rows.states[self.layers[0]][rows.source[rows.last]]  # [R, Ht]

    def draft(self) -> DraftTree:
        states = self.model.states(self.state)[:, : self.max_depth]
        return self.trees.grow(*self.model.best(states, self.trees.width, self.beta))


class Medusa(PositionsLearner, MedusaModel):
    """See the module. `head` is the target's LM head: the final norm came before."""

    config_class = MedusaShape
    defaults: ClassVar = {"num_heads": 5, "num_layers": 1}

    def draw(self) -> None:
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)

    def states(self, last: Tensor) -> Tensor:
        return super().states(last.to(self.lm_head.weight.dtype))

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        weights = [DECAY**k for k in range(1, len(self.blocks) + 1)]
        states = self.states(train_batch.target_outputs.last[:, :-1])
        return self.outcome(states, train_batch, weights)

    def draft_along(self, sequence: EvalSequence) -> Draft:
        last = replace(sequence, hidden=sequence.last)
        return served(MedusaDrafter, self, self.budget, last, layers=(0,))

    def save(self, directory: Path) -> None:
        """Write a checkpoint for us and for vLLM's method "medusa", which drafts a chain.

        The LM head covers the whole vocabulary: vLLM 0.32 refuses checkpoints with its own
        `token_map`. Tokens outside the draft vocabulary get the mean of its rows, hence the mean
        logit, which is never the largest.
        """
        head = self.lm_head.weight.detach()
        rows = head.mean(0).repeat(len(self.t2d), 1)
        rows[self.t2d] = head
        config = self.config.model_dump() | {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "truncated_vocab_size": len(rows),
            "num_hidden_layers": self.config.num_layers,
            "original_lm_head": True,  # vLLM's name for one LM head that all share
        }
        tensors = dict(self.named_parameters()) | {"lm_head.weight": rows}
        write_folder(directory, "medusa", config, tensors)
        mapping = {"d2t": self.d2t.cpu(), "t2d": self.t2d.cpu()}
        replace_file(directory / MAPPING, lambda aside: torch.save(mapping, aside))
