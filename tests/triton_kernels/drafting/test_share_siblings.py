"""One launch lays siblings side by side as torch does."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.synthetic_acceptance import SyntheticAcceptance


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same values with others between them."""
    table = torch.full((*x.shape, 2), 1 << 20, dtype=x.dtype, device=x.device)
    table[..., 0] = x
    return table[..., 0]


@pytest.mark.parametrize(("count", "num_nodes"), [(1, 1), (3, 12), (5, 60), (2, 64), (3, 256)])
@pytest.mark.parametrize("spread", [False, True])
def test_as_torch(kernels, count, num_nodes, spread):
    draw = torch.Generator().manual_seed(num_nodes)
    parent = (torch.rand(count, num_nodes, generator=draw) * torch.arange(1, num_nodes + 1)).int()
    share = 0.5 * torch.rand(count, num_nodes, generator=draw)
    score = torch.zeros(count, num_nodes + 1)
    for node in range(1, num_nodes + 1):
        above = score.gather(1, parent[:, node - 1 : node].long())
        score[:, node : node + 1] = above + share[:, node - 1 : node].log()
    unused = (
        torch.arange(num_nodes) >= torch.tensor([num_nodes, num_nodes // 2, 0, 5, 3])[:count, None]
    )
    parent[unused] = -1
    logprob = score[:, 1:].masked_fill(unused, float("-inf"))
    slots = torch.tensor([4, 6, 0, 2, 1])[:count]

    wanted = SyntheticAcceptance(8, num_nodes, torch.device("cpu"))
    wanted.low.fill_(7)
    wanted.note(slots, DraftTree.from_nodes(parent.long(), parent, logprob, slots))
    assert (wanted.low[slots] > 0).any() or num_nodes == 1

    low = torch.full((8, num_nodes), 7.0, device=kernels.device)
    high = torch.zeros(8, num_nodes, device=kernels.device)
    given = [x.to(kernels.device) for x in (slots, parent, logprob)]
    given = [wide(x) for x in given] if spread else given
    kernels.load("share_siblings").share_siblings_triton(*given, low, high)
    torch.testing.assert_close(low.cpu(), wanted.low, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(high.cpu(), wanted.high, atol=1e-5, rtol=1e-5)
