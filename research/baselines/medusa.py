"""Medusa (arXiv 2401.10774): K heads on the target's last state, each for one position ahead.

W = 0 at first in every residual block, so that every head starts as the target's own. The target
stays frozen (Medusa-1), and position k weighs 0.8^k in the loss. The heads and the growth of their
tree are those that we serve (`vllm_specblock.drafters.baselines.medusa`); here is the objective.
Simplified: the heads share one LM head over the draft vocabulary, where the paper gives each its
own over all of it, and W has no bias (the paper's formula has none either). Unlike the paper's
static tree the served one is the exact best N of the product of the heads' distributions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from baselines.folder import write_folder, write_mapping
from baselines.positions import PositionsLearner
from torch import Tensor, nn

from vllm_specblock.drafters.baselines.config import MedusaShape
from vllm_specblock.drafters.baselines.medusa import MedusaModel
from vllm_specblock.drafters.baselines.product_trees import ProductTrees
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch
from vllm_specblock.tree import DraftTree


class Medusa(PositionsLearner, MedusaModel):
    """See the module.

    Args:
        hidden_size: Ht, width of the target.
        d2t, t2d: draft vocabulary.
        head: [Vd, Ht], the target's LM head rows as they are: what they read here has been
            through the final norm already.
        num_heads: K.
        num_layers: residual blocks per head.
        decay: of the loss weights from position to position.
        budget: N, nodes of a drafted tree.
    """

    def __init__(
        self,
        hidden_size: int,
        d2t: Tensor,
        t2d: Tensor,
        head: Tensor | None = None,
        num_heads: int = 5,
        num_layers: int = 1,
        decay: float = 0.8,
        budget: int = 60,
    ):
        shape = MedusaShape(
            hidden_size=hidden_size,
            vocab_size=len(t2d),
            draft_vocab_size=len(d2t),
            num_heads=num_heads,
            num_layers=num_layers,
        )
        super().__init__(shape)
        self.begin(d2t, t2d, head)
        self.decay, self.budget = decay, budget
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        **sizes: Any,
    ) -> Medusa:
        """Heads for a target with this transformers config; `seed` of the weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(target_config.hidden_size, d2t, t2d, head, **sizes)

    def states(self, last: Tensor) -> Tensor:
        return super().states(last.to(self.lm_head.weight.dtype))

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        weights = [self.decay**k for k in range(1, len(self.blocks) + 1)]
        return self.outcome(
            self.states(train_batch.target_outputs.last[:, :-1]), train_batch, weights
        )

    def draft_along(self, sequence: EvalSequence) -> Draft:
        trees = ProductTrees(len(self.blocks), len(self.d2t), self.budget, sequence.last.device)

        @torch.no_grad()
        def draft(root: int) -> DraftTree:
            states = self.states(sequence.last[root - 1 : root])
            return trees.grow(*self.best(states, trees.width))

        return draft

    def save(self, directory: Path) -> None:
        """What we serve, and what vLLM's own `{"method": "medusa"}` loads, which drafts the chain
        of first choices.

        The LM head is written over the whole vocabulary: vLLM 0.32 refuses checkpoints with its
        own `token_map`, as not initialised. Tokens that no head can name get the mean of the
        named ones' rows, hence the mean of their logits, which is never the largest.
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
        write_mapping(directory, self.d2t, self.t2d)
