"""A drafter that often guesses right, and options of short training runs."""

from __future__ import annotations

import pytest
import torch
from support.dense_cache import DenseCache
from support.records import HIDDEN, VOCAB, small_drafter
from support.training import short_run, write_pair


@pytest.fixture
def lucky():
    """A drafter whose first choice is draft id 3 or 7, by the sign of one product, and tokens
    [B, L] that are mostly those two: paths of every length occur."""

    def make(batch: int, length: int, **changes):
        drafter = small_drafter(**changes)
        with torch.no_grad():
            drafter.lm_head.weight.mul_(0.05)
            drafter.lm_head.weight[3] = torch.randn(HIDDEN)
            drafter.lm_head.weight[7] = -drafter.lm_head.weight[3]
        common = torch.tensor([3, 7]) + drafter.d2t[[3, 7]]
        tokens = common[torch.randint(2, (batch, length))]
        other = torch.rand(batch, length) < 0.1
        return drafter, tokens.where(~other, torch.randint(VOCAB, (batch, length)))

    return make


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`target` and `d.safetensors` for short training runs."""
    return write_pair(tmp_path_factory.mktemp("train"))


@pytest.fixture
def options(folder, tmp_path):
    def make(**changes):
        return short_run(folder, **{"out": tmp_path / "out", **changes})

    return make


class Inference:
    """A document's rows through `DenseCache`, one at a time, as a request would run them."""

    def __init__(self, drafter, embed, tokens, hidden):
        self.drafter, self.embed, self.tokens, self.hidden = drafter, embed, tokens, hidden
        self.path_rope = drafter.config.block_rope == "path"

    def blocks(self, restart_positions: list[int]):
        """Yield per row its states of every block [K, H], block b+1 started at cuts[b]."""
        cache = DenseCache(self.drafter.config)
        for row in range(len(self.tokens) - 1):
            condition = self.drafter.condition(self.hidden[row][None])
            states = [self._forward(row, 0, condition, cache.append())]
            growth, offset = cache.grow(), 0
            for block, restart_position in enumerate(restart_positions):
                offset += restart_position
                attend = growth.starts(torch.tensor([block]), torch.tensor([restart_position - 1]))
                states.append(
                    self._forward(row, offset, states[-1][restart_position - 1][None], attend)
                )
            yield row, states

    def _forward(self, row, offset, condition, attend):
        place = row + 1 + offset
        token = self.tokens[place] if place < len(self.tokens) else torch.tensor(0)
        base = torch.tensor([row + 1 + (offset if self.path_rope else 0)])
        return self.drafter(condition, self.embed(token)[None], base, attend)[0]


@pytest.fixture
def inference() -> type[Inference]:
    return Inference
