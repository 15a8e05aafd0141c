"""Chain accuracy: α of the drafter's chain of whole blocks, position by position.

This is the paper's α_{m,j} (SpecBlock, appendix C and figure 5b). For its α_k (figure 5a), blocks
may start anywhere in the previous block (`research/paper_measure.py`).

At every root of the continuation the drafter drafts a chain of M blocks, each from the end of the
previous one. Every block starts from the text's token: α assumes that all earlier tokens were
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.attention import FirstBlock, NextBlock
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import IGNORE_INDEX, EvalSequence, draft_labels
from vllm_specblock.train.losses import RANK_BUCKETS, rank_bucket

BUCKETS = len(RANK_BUCKETS) + 1


class Chain(NamedTuple):
    """Chains of n roots, position k of block m in column (m − 1)·K + k − 1; each [n, M·K].

    seen: bool, the text has a token there; hit: bool, it is the drafter's first choice.
    rank: int64, the bucket of its rank in the drafter's distribution, `IGNORE_INDEX` without one.
    guess: int64, the bucket that the rank head predicts.
    """

    seen: Tensor
    hit: Tensor
    rank: Tensor
    guess: Tensor

    @property
    def on_chain(self) -> Tensor:
        """Return [n, M·K] bool: seen, and the drafter was right at all earlier positions."""
        before = torch.cat([torch.ones_like(self.hit[:, :1]), self.hit[:, :-1]], dim=1)
        return self.seen & before.long().cumprod(1).bool()

    def of_roots(self, index: Tensor) -> Chain:
        """Return the chains of some roots; index int64."""
        return Chain(*(part[index] for part in self))


@torch.no_grad()
def chain_along(drafter: SpecBlockModel, sequence: EvalSequence, blocks: int) -> Chain:
    """The chains of all roots from the first token after the prompt to the last but one."""
    tokens, K = sequence.tokens, drafter.config.block_size
    dtype = drafter.lm_head.weight.dtype

    def draft(condition: Tensor, row: Tensor, offset: int, attend: Attend) -> Tensor:
        # Any token past the text's end: it is not counted.
        token = tokens[(row + 1 + offset).clamp(max=len(tokens) - 1)]
        base = row + 1 + (offset if drafter.config.block_rope == "path" else 0)
        return drafter(condition, sequence.embed(token).to(dtype), base, attend)  # [rows, K, H]

    attend: FirstBlock | NextBlock = FirstBlock(Batch.of(tokens[None]), K)
    every = torch.arange(len(tokens) - 1, device=tokens.device)
    hidden = draft(drafter.condition(sequence.hidden[every].to(dtype)), every, 0, attend)
    source = row = every[sequence.prompt - 1 : -1]
    states = [hidden[row]]
    for block in range(1, blocks):
        attend = NextBlock(attend, source[None], K)
        states.append(draft(states[-1][:, -1], row, block * K, attend))
        source = torch.arange(len(row), device=row.device)
    return _compare(drafter, sequence, torch.cat(states, dim=1))


def _compare(drafter: SpecBlockModel, sequence: EvalSequence, hidden: Tensor) -> Chain:
    """The heads' choices at hidden [n, M·K, H] against the text, a column of logits at a time."""
    tokens, (count, columns) = sequence.tokens, hidden.shape[:2]
    root = len(tokens) - count + torch.arange(count, device=hidden.device)
    place = root[:, None] + torch.arange(columns, device=hidden.device)
    seen = place < len(tokens)
    labels = draft_labels(drafter.t2d, Batch.of(tokens[None]))[0]
    draft_id = labels[place.clamp(max=len(tokens) - 1)].where(seen, IGNORE_INDEX)
    hit, rank = torch.zeros_like(seen), torch.full_like(place, IGNORE_INDEX)
    guess = torch.zeros_like(place)
    for column in range(columns):
        logits, rank_logits = drafter.heads(hidden[:, column])
        label = draft_id[:, column]
        named = label != IGNORE_INDEX
        hit[:, column] = logits.argmax(-1) == label
        rank[named, column] = rank_bucket(logits[named], label[named])
        guess[:, column] = rank_logits.argmax(-1)
    return Chain(seen, hit, rank, guess)


@dataclass(frozen=True)
class ChainFigures:
    """Figures over all roots of all texts; None if no position counts.

    alpha: [M·K], share of right first choices, given that all positions before were right.
    positions: [M·K], how many count.
    rank: [4], the rank head's figures over the `rank_positions` of `alpha` whose token the drafter
        can name.
    """

    alpha: list[float | None]
    positions: list[int]
    rank: list[dict[str, float | None]]
    rank_positions: int
    block_size: int

    @property
    def alpha_mj(self) -> list[list[float | None]]:
        """[M][K], the paper's α_{m,j}: `alpha` by block."""
        width = self.block_size
        return [self.alpha[i : i + width] for i in range(0, len(self.alpha), width)]

    @classmethod
    def of(cls, chains: Iterable[Chain], block_size: int) -> ChainFigures:
        """Return the figures over several texts."""
        chain = Chain(*map(torch.cat, zip(*chains)))
        on_chain = chain.on_chain
        named = on_chain & (chain.rank != IGNORE_INDEX)
        pairs = chain.rank[named] * BUCKETS + chain.guess[named]
        confusion = pairs.bincount(minlength=BUCKETS**2)
        positions = on_chain.sum(0)
        return cls(
            _shares((on_chain & chain.hit).sum(0), positions),
            positions.tolist(),
            bucket_figures(confusion.view(BUCKETS, BUCKETS)),
            int(confusion.sum()),
            block_size,
        )


def bucket_figures(confusion: Tensor) -> list[dict[str, float | None]]:
    """Return figures per bucket, with the names of the paper's table 3, and its share of positions.

    confusion [true, predicted] counts positions.
    """
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    figures = {
        "frequency": (true, true.sum().expand_as(true)),
        "precision": (right, predicted),
        "recall": (right, true),
        "f1": (2 * right, true + predicted),
    }
    shares = (_shares(*pair) for pair in figures.values())
    return [dict(zip(figures, bucket)) for bucket in zip(*shares)]


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    """Return parts / wholes; None for 0 / 0."""
    pairs = zip(parts.tolist(), wholes.tolist())
    return [part / whole if whole else None for part, whole in pairs]
