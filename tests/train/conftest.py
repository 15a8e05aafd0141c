"""A drafter that often guesses right, and options of short training runs."""

from __future__ import annotations

import pytest
import torch
from support.records import HIDDEN, VOCAB, small_drafter
from support.training import short_run, write_pair


@pytest.fixture
def make_drafter():
    return small_drafter


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
        common = drafter.target_ids(torch.tensor([3, 7]))
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
