"""Where committed rows come from and go to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, path_to
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows

from vllm_specblock.commit.move import committed_sources


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(nodes(max_nodes=12), st.integers(1, 9)), min_size=1), st.data())
def test_moving_brings_the_path_together(batch, data):
    D = 12
    start, paths, cells, expected = 0, [], [], []
    starts, bases, accepted = [], [], []
    for request, (plain, base) in enumerate(batch):
        end = data.draw(st.integers(0, len(plain)))
        path = path_to(plain, end)
        starts.append(start)
        bases.append(base)
        accepted.append(len(path) - 1)
        paths.append(path + [0] * (D + 1 - len(path)))
        rows = [(request, "base", i) for i in range(base - 1)]
        rows += [(request, "node", i) for i in range(len(plain) + 1)]
        cells += rows
        expected.append(rows[: base - 1] + [(request, "node", node) for node in path])
        start += len(rows)
    tensors = (torch.tensor(values) for values in (starts, bases, paths))
    rows = AcceptedRows(*tensors, torch.tensor(accepted, dtype=torch.int32))
    source, target, moves = committed_sources(rows)
    assert source.shape == target.shape == moves.shape == (len(batch), D)
    assert (source >= target)[moves].all(), "a node never moves up"
    before = list(cells)
    for at, to, move in zip(
        source.flatten().tolist(), target.flatten().tolist(), moves.flatten().tolist()
    ):
        if move:
            cells[to] = before[at]
    for first, rows in zip(starts, expected):
        assert cells[first : first + len(rows)] == rows
