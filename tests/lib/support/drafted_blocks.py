"""Random blocks as a drafter gives them to tree expansion."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings


def few_examples(count: int) -> settings:
    """Of interpreted kernels: to shrink a failure would take minutes."""
    return settings(
        deadline=None,
        max_examples=count,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def random_block(draw, shape, vocab, *rows):
    """Top log-probabilities [..., K, B], distinct tokens and buckets, as a drafter gives them."""
    full = (2.0 * torch.randn(*rows, shape.block_size, vocab, generator=draw)).log_softmax(-1)
    top, token = full.topk(shape.width, dim=-1)
    bucket = torch.randint(0, 4, (*rows, shape.block_size), generator=draw)
    return top, token, bucket


def coarse_block(draw, shape, vocab, *rows):
    """The same with scores on a grid of 1/8: sums are exact, and ties are everywhere.

    Some tokens are certain (0), some impossible (−inf).
    """
    top, token, bucket = random_block(draw, shape, vocab, *rows)
    coarse = torch.randint(0, 12, top.shape, generator=draw).sort(dim=-1).values / -8
    return torch.where(coarse < -1.25, float("-inf"), coarse), token, bucket
