"""Where committed rows come from and go to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, path_to
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows

from vllm_specblock.commit.committed_tokens import committed_sources
from vllm_specblock.commit.store import store_kv


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


def test_padding_is_stored_where_nobody_reads():
    cache = torch.zeros(3, 2, 4, 6).transpose(1, 2).contiguous().transpose(1, 2)
    key, value = torch.ones(3, 2, 3), 2 * torch.ones(3, 2, 3)
    store_kv(cache, torch.tensor([5, -1, 8]), key, value)
    written = (cache != 0).any(-1).any(1).nonzero().tolist()
    assert written == [[0, 0], [1, 1], [2, 0]]  # entry 0 lies in the null block
    assert cache[1, :, 1].tolist() == [[1, 1, 1, 2, 2, 2]] * 2


def test_a_cache_that_cannot_be_flattened_is_refused():
    scattered = torch.zeros(3, 2, 4, 6)  # heads outermost within a block
    try:
        store_kv(scattered, torch.tensor([1]), torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    except RuntimeError:
        return
    raise AssertionError("writing into a copy would have lost the keys and values")
