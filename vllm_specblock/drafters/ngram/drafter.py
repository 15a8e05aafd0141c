"""N-gram drafter: continuations of the request's own text, as a tree.

Earlier occurrences of the text's last tokens are followed, and weighed as in prediction by partial
matching: longer matches and agreement count.
"""

from __future__ import annotations

import torch

from vllm_specblock.candidates import tree_of
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.drafters.options import NGramConfig
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.ngram import continuations_numba
from vllm_specblock.triton_kernels.ngram.continuations import Following, follow_triton
from vllm_specblock.triton_kernels.ngram.occurrences import Texts

VOTE, POWER = 0.32, 1.2
"""The r-th best occurrence votes VOTE · n^POWER / ⁴√r for what followed it, n being the tokens
that it agrees in, those drafted before included. With the votes V of all that say so, out of P
that agree up to there, a token gets the probability V / P · V / (V + 1).

Fitted by likelihood on held-out source code and a small model's greedy answers.
"""

_VOTES, _NATS = 4096, 1024
"""Votes and scores are multiples of 1/4096 and of 1/1024 nat, few enough for their sums to be
exact in any order: equal texts score the same, and no child scores above its parent."""


class NGramDrafter(Drafter):
    """Follows the `branches` best occurrences, the longest match first, the latest of equals.

    A continuation branches off the one before it that has the longest prefix in common. Beyond
    the text's end it repeats itself.
    """

    kind = "ngram"

    def __init__(self, options: NGramConfig, num_nodes: int, max_model_len: int) -> None:
        self.num_nodes, self.max_model_len = num_nodes, max_model_len
        self.max_depth = min(num_nodes, options.depth)
        matches = options.min_match, options.max_match, options.branches
        sizes = self.max_depth, num_nodes
        self.following = Following(*matches, *sizes, VOTE, POWER, _VOTES, _NATS)

    def advance(self, rows: CommittedTokens) -> None:
        self.texts = Texts(
            rows.text[:, : self.max_model_len], rows.req_idx, rows.position, rows.last
        )

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        texts = self.texts
        if requests is not None:
            texts = texts._replace(row=texts.row[requests], last=texts.last[requests])
        follow = follow_triton if texts.table.is_cuda else continuations_numba.follow_numba
        return tree_of(follow(texts, self.following))
