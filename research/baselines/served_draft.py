"""Drafting along one text with the drafter that serves."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.registry import DrafterOptions
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree

_BLOCK = 16
"""Tokens in a block of the cache."""
LAST = 3
"""Index of the state that the target's LM head reads, behind the features of three layers."""


class ServedDraft:
    """A `Draft` of one request, over a paged cache of its own; arguments as of `NetworkDrafter`.

    layers: indices into the features of three layers, and `LAST`.
    """

    def __init__(
        self,
        drafter: type[NetworkDrafter],
        model: Any,
        options: DrafterOptions,
        nodes: int,
        sequence: EvalSequence,
        layers: tuple[int, ...] = (0, 1, 2),
        lookahead: int | None = None,
    ) -> None:
        device = sequence.tokens.device
        blocks = -(-(len(sequence.tokens) + (lookahead or nodes)) // _BLOCK) + 1
        given = options, nodes, blocks * _BLOCK, lookahead, layers
        self.drafter = drafter(model, sequence.embed, *given)
        like = {"dtype": next(model.parameters()).dtype, "device": device}
        shapes = [
            (blocks + 1, _BLOCK * each.entries_per_token, each.num_kv_heads, 2 * each.head_dim)
            for each in self.drafter.cache_layers()
        ]
        self.drafter.bind([torch.zeros(shape, **like).transpose(1, 2) for shape in shapes])
        self.table = torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None]
        self.text, self.states = sequence.tokens, [*sequence.hidden.chunk(3, -1), sequence.last]
        self.rows = 0  # that the cache holds

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """Return the tree (R = 1) whose root is the text's token number `root`."""
        first = min(self.rows, root - 1)
        position = torch.arange(first, root, device=self.text.device)
        one = torch.zeros(1, dtype=torch.int64, device=self.text.device)
        self.drafter.advance(
            CommittedTokens(
                states=self.states,
                source=position,
                token=self.text[position + 1],
                position=position,
                index=position,
                kv_slot=self.table[0, position // _BLOCK].long() * _BLOCK + position % _BLOCK,
                row_start=torch.tensor([0, root - first], dtype=torch.int32, device=one.device),
                row_start_host=[0, root - first],
                last=one + root - first - 1,
                start=one,
                block_table=self.table,
                block_size=_BLOCK,
                max_position=root - 1,
                text=self.text[None].int(),
                req_idx=one,
                temperature=one.float(),
            )
        )
        self.rows = root
        return self.drafter.draft()
