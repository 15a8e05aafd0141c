"""N-gram drafter: continuations of the request's text and of earlier answers, as a tree.

Occurrences of the text's last tokens are followed, and weighed as in prediction by partial
matching: longer matches and agreement count.
"""

from __future__ import annotations

import torch

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.options import NGramConfig
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.ngram import continuations_numba
from vllm_specblock.triton_kernels.ngram.continuations import follow_triton
from vllm_specblock.triton_kernels.ngram.occurrences import Following, Texts

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
    """Follows the `branches` best occurrences, the longest match first.

    Of equals, those in the request's own text come first, then the latest. A continuation branches
    off the one before it that has the longest prefix in common. Beyond the text's end it repeats
    itself.

    Attributes:
        earlier: [E] int32, earlier answers, the newest at its end, −1 after each.
    """

    kind = "ngram"

    def __init__(self, options: NGramConfig, num_nodes: int, max_model_len: int) -> None:
        self.num_nodes, self.max_model_len = num_nodes, max_model_len
        self.max_depth = min(num_nodes, options.depth)
        matches = options.min_match, options.max_match, options.branches
        sizes = self.max_depth, num_nodes
        self.following = Following(*matches, *sizes, VOTE, POWER, _VOTES, _NATS)
        self.earlier = torch.full((options.earlier_tokens,), -1, dtype=torch.int32)

    def advance(self, rows: CommittedTokens) -> None:
        if self.earlier.device != rows.text.device:  # before any graph
            self.earlier = self.earlier.to(rows.text.device)
        text = rows.text[:, : self.max_model_len]
        self.texts = Texts(text, rows.req_idx, rows.position, rows.last, self.earlier)

    def finish(self, text: torch.Tensor, first: int, length: torch.Tensor) -> None:
        room = len(self.earlier)
        if not room:
            return
        begin = (length - room + 1).clamp(min=first)  # of a long answer, the end
        # Places in `earlier` with the answer and −1 behind it.
        place = torch.arange(room, device=text.device) + (length + 1 - begin).clamp(min=0)
        source = begin + place - room
        answer = text[source.clamp(0, len(text) - 1)].where(source < length, -1)
        self.earlier.copy_(self.earlier[place.clamp(max=room - 1)].where(place < room, answer))

    def forget(self) -> None:
        self.earlier.fill_(-1)

    def draft(self) -> DraftTree:
        follow = follow_triton if self.texts.table.is_cuda else continuations_numba.follow_numba
        return DraftTree(*follow(self.texts, self.following)[:-1])
