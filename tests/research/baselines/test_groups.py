"""Attention in groups against the formula, every pair of entries under one mask."""

import math

import pytest
import torch
from baselines import groups


def plainly(query, prefix, own, sees, inside):
    """As `group_attention`, by one table of all scores."""
    sharing = query.shape[3] // own[0].shape[3]
    far, near = ([x.repeat_interleave(sharing, dim=-2) for x in each] for each in (prefix, own))
    scores = torch.cat(
        [
            torch.einsum("brnhd,bphd->brnhp", query, far[0]).masked_fill(
                ~sees[:, :, None, None], -math.inf
            ),
            torch.einsum("brnhd,brmhd->brnhm", query, near[0]).masked_fill(
                ~inside[:, None], -math.inf
            ),
        ],
        dim=-1,
    )
    weight = (scores / math.sqrt(query.shape[-1])).softmax(-1)
    split = far[0].shape[1]
    return torch.einsum("brnhp,bphd->brnhd", weight[..., :split], far[1]) + torch.einsum(
        "brnhm,brmhd->brnhd", weight[..., split:], near[1]
    )


@pytest.mark.parametrize("rows", [1, 5, 33, 70])
@pytest.mark.parametrize(("entries", "own"), [(1, 3), (4, 4), (2, 6)])
def test_as_the_formula_with_its_gradients(rows, entries, own):
    torch.manual_seed(rows)
    shapes = {
        "query": (2, rows, entries, 6, 8),
        "far key": (2, rows + 3, 2, 8),
        "far value": (2, rows + 3, 2, 8),
        "own key": (2, rows, own, 2, 8),
        "own value": (2, rows, own, 2, 8),
    }
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes.values()]
    sees = torch.rand(2, rows, rows + 3) < 0.3
    sees[1, : rows // 2] = False  # rows that see nothing but their own
    inside = torch.rand(entries, own) < 0.5
    inside[:, 0] = True
    outcomes = []
    for attention in (groups.group_attention, plainly):
        query, *rest = (x.clone().requires_grad_() for x in given)
        mixed = attention(query, tuple(rest[:2]), tuple(rest[2:]), sees, inside)
        (mixed * torch.arange(mixed.numel()).view(mixed.shape).cos()).sum().backward()
        outcomes.append([mixed, query.grad, *(x.grad for x in rest)])
    for name, ours, theirs in zip(["mixed", *shapes], *outcomes):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
