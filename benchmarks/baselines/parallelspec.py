"""ParallelSpec (arXiv 2410.05589): one forward drafts K positions, by mask tokens after the text.

A row is the target's features of x_i fused with the token x_{i+1}, as EAGLE's; position 1 is read
from the row itself, positions 2..K from K − 1 learned mask tokens at the next RoPE positions. In
training all rows append their masks at once: row i's masks see the rows up to i and earlier masks
of their own group (the paper's group-wise attention), never another group's.
Simplified: features of three target layers and a reduced vocabulary, as all drafters here have
them; two decoder layers; cross-entropy to the target's law and no loss on features; a tree that
is the best N of the product of the positions' distributions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from baselines.groups import GroupTrunk, Kept, earlier_rows, group_attention, sizes_like
from baselines.positions import PositionsLearner
from baselines.trees import independent_tree
from torch import Tensor, nn

from vllm_specblock.draft.config import DrafterConfig
from vllm_specblock.draft.model import RMSNorm
from vllm_specblock.train.learner import Draft, Lesson, Outcome, Script
from vllm_specblock.train.text.batch import Batch
from vllm_specblock.tree import DraftTree

_ROWS_AT_ONCE = 256
"""Rows of one pass along a script: bounds the memory of long ones."""


class ParallelSpec(PositionsLearner):
    """See the module.

    Args:
        config: sizes; `block_size` is K. What it says of the rank head and the shift is not read.
        d2t, t2d: draft vocabulary.
        head: [Vd, H], first weights of the LM head, the target's final norm folded in.
        budget: N, nodes of a drafted tree.
    """

    def __init__(
        self,
        config: DrafterConfig,
        d2t: Tensor,
        t2d: Tensor,
        head: Tensor | None = None,
        budget: int = 60,
    ):
        super().__init__(config.hidden_size, d2t, t2d, head)
        self.config, self.budget = config, budget
        self.trunk = GroupTrunk(config)
        self.mask_tokens = nn.Parameter(torch.randn(config.block_size - 1, config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def for_target(
        cls, target_config: Any, d2t: Tensor, t2d: Tensor, seed: int, head: Tensor | None = None,
        *, positions: int = 8, budget: int = 60, **sizes: Any,
    ) -> ParallelSpec:  # fmt: skip
        """A drafter for a target with this transformers config.

        Args:
            seed: of the weights.
            positions: K.
            sizes: keys of DrafterConfig, such as `intermediate_size` and `num_hidden_layers`.
        """
        config = sizes_like(target_config, len(d2t), positions, **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, d2t, t2d, head, budget)

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(self.norm(states))

    def states(
        self, hidden: Tensor, embedding: Tensor, batch: Batch, rows: slice, prefix: Kept
    ) -> Tensor:
        """One pass over the rows `rows`; those before them have left their keys in `prefix`.

        Args:
            hidden: [B, R, 3·Ht], features of the rows' x_i.
            embedding: [B, R, Ht], of their x_{i+1}.

        Returns:
            [B, R, K, H], before the final norm.
        """
        real = self.trunk.entry(self.trunk.condition(hidden), embedding)[:, :, None]
        masks = self.mask_tokens.to(real.dtype).expand(*real.shape[:2], -1, -1)
        sees = earlier_rows(batch.document, rows)
        count = self.config.block_size
        causal = torch.ones(count, count, dtype=torch.bool, device=real.device).tril()

        def attend(layer: int, *flat: Tensor) -> Tensor:
            query, key, value = (each.unflatten(0, real.shape[:2]) for each in flat)
            seen = prefix.extend(layer, key[:, :, 0], value[:, :, 0])
            return group_attention(query, seen, (key, value), sees, causal).flatten(0, 1)

        return self.trunk(torch.cat([real, masks], 2), batch.position[:, rows] + 1, attend)

    def forward(self, lesson: Lesson) -> Outcome:
        batch, length = lesson.batch, lesson.batch.tokens.shape[1]
        embedding = lesson.embed(batch.tokens[:, 1:].clamp(min=0))
        states = self.states(
            lesson.teaching.hidden[:, :-1], embedding, batch, slice(0, length - 1), Kept(dim=1)
        )
        return self.outcome(states, lesson, [1.0] * self.config.block_size)

    @torch.no_grad()
    def draft_along(self, script: Script) -> Draft:
        batch, prefix = Batch.of(script.tokens[None]), Kept(dim=1)
        embedding = script.embed(script.tokens[1:])[None]
        # No row sees what comes after it, so all can be drafted from before the first root is
        # asked for: the numbers are those of one pass per root.
        last, passes = len(script.tokens) - 1, []
        for start in range(0, last, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, last))
            passes.append(
                self.states(script.hidden[None, rows], embedding[:, rows], batch, rows, prefix)
            )
        states = torch.cat(passes, dim=1)[0]  # [T − 1, K, H]

        @torch.no_grad()
        def draft(root: int) -> DraftTree:
            return independent_tree(*self.candidates(states[root - 1], self.budget), self.budget)

        return draft

    def save(self, directory: Path) -> None:
        """The sizes and the state dict; no engine loads it."""
        config = {"architectures": ["ParallelSpec"], "budget": self.budget}
        self.write(directory, config | self.config.model_dump(mode="json"), self.state_dict())
