"""One launch masks the tables as the torch description does."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal
from vllm_specblock.triton_kernels.kv_cache.mask_holes import mask_holes


@pytest.mark.parametrize(("width", "columns"), [(5, 1024), (40, 16)])
def test_the_tables_are_the_references(kernels, monkeypatch, width, columns):
    """Blocks that no request writes may be in several tables, and behind the last row in any."""
    module = kernels.load("mask_holes")
    monkeypatch.setattr(module, "COLUMNS", columns)
    draw, requests, size = torch.Generator().manual_seed(width), 6, 8
    own = torch.randperm(requests * width, generator=draw).view(requests, width) + 1
    own[1:, : width // 4] = own[0, : width // 4]  # a shared prefix
    first = torch.randint(width // 4 * size, (width - 2) * size, (requests,), generator=draw)
    first[:4] = first[:4] // size * size + 3
    last = first + torch.randint(0, 2 * size, (requests,), generator=draw)
    last[:2] = first[:2]
    missing = torch.full((requests * width + 2,), size)
    holes = torch.randint(1, len(missing) - 1, (len(missing) // 3,), generator=draw)
    missing[holes] = torch.randint(0, size, holes.shape, generator=draw)
    current = own.gather(1, (first // size)[:, None])[:, 0]
    missing[current[:4]] = torch.tensor([2, 3, 0, 3])
    found = []
    for mask in (mask_holes.reference, module.mask_holes_triton):
        to = "cpu" if mask is mask_holes.reference else kernels.device
        table = torch.zeros(requests, width + 3, dtype=torch.int32, device=to)
        table[:, :width] = own
        state, masks = missing.to(to, copy=True), torch.full((2, requests), -1, device=to)
        blind = mask(state, table[:, :width], first.to(to), last.to(to), size, *masks)
        found.append([x.cpu() for x in (table, masks, blind, state[:-1])])
    assert found[0][2].any() and not found[0][2].all() and (found[0][1][0] > 0).any()
    assert_equal(*found)
