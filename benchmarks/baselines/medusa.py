"""Medusa (arXiv 2401.10774): K heads on the target's last state, each for one position ahead.

Head k is n residual blocks x + SiLU(W x), W = 0 at first, so that every head starts as the
target's own. The target stays frozen (Medusa-1), and position k weighs 0.8^k in the loss.
Simplified: the heads share one LM head over the draft vocabulary, where the paper gives each its
own over all of it, and W has no bias (the paper's formula has none either). Unlike the paper's
static tree the served one is the exact best N of the product of the heads' distributions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from baselines.positions import PositionsLearner
from baselines.trees import independent_tree
from torch import Tensor, nn
from torch.nn.functional import silu

from vllm_specblock.train.learner import Draft, Lesson, Outcome, Script
from vllm_specblock.tree import DraftTree


class Medusa(PositionsLearner):
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
        super().__init__(hidden_size, d2t, t2d, head)
        self.decay, self.budget = decay, budget
        self.blocks = nn.ModuleList(Head(hidden_size, num_layers) for _ in range(num_heads))

    @classmethod
    def for_target(
        cls, target_config: Any, d2t: Tensor, t2d: Tensor, seed: int, head: Tensor | None = None,
        **sizes: Any,
    ) -> Medusa:  # fmt: skip
        """Heads for a target with this transformers config; `seed` of the weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(target_config.hidden_size, d2t, t2d, head, **sizes)

    def states(self, last: Tensor) -> Tensor:
        """The target's last states [..., Ht] -> [..., K, Ht], one per position."""
        last = last.to(self.lm_head.weight.dtype)
        return torch.stack([block(last) for block in self.blocks], dim=-2)

    def forward(self, lesson: Lesson) -> Outcome:
        weights = [self.decay**k for k in range(1, len(self.blocks) + 1)]
        return self.outcome(self.states(lesson.teaching.last[:, :-1]), lesson, weights)

    def draft_along(self, script: Script) -> Draft:
        @torch.no_grad()
        def draft(root: int) -> DraftTree:
            states = self.states(script.last[root - 1])
            return independent_tree(*self.candidates(states, self.budget), self.budget)

        return draft

    def save(self, directory: Path) -> None:
        """What vLLM's `{"method": "medusa"}` loads; it drafts the chain of first choices.

        The LM head is written over the whole vocabulary: vLLM 0.32 refuses checkpoints with its
        own `token_map`, as not initialised. Tokens that no head can name get the mean of the
        named ones' rows, hence the mean of their logits, which is never the largest.
        """
        head = self.lm_head.weight.detach()
        rows = head.mean(0).repeat(len(self.t2d), 1)
        rows[self.t2d] = head
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head.shape[1],
            "vocab_size": len(rows),
            "truncated_vocab_size": len(rows),
            "num_heads": len(self.blocks),
            "num_hidden_layers": len(self.blocks[0].layers),
            "original_lm_head": True,  # vLLM's name for one LM head that all share
            "torch_dtype": "bfloat16",
        }
        self.write(directory, config, dict(self.named_parameters()) | {"lm_head.weight": rows})


class Head(nn.Module):
    """Residual blocks of one position."""

    def __init__(self, hidden_size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_layers)
        )
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., Ht] -> [..., Ht]."""
        for layer in self.layers:
            x = x + silu(layer(x))
        return x
