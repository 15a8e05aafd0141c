"""One launch per block gives every tensor that the torch reference gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.strides import column
from vllm_specblock.triton_kernels.drafting.first_block_metadata import first_block_metadata
from vllm_specblock.triton_kernels.drafting.later_block_metadata import later_block_metadata

from vllm_specblock.drafters.common import draft_attention
from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder

MAX, TOKENS, BLOCKS = 203, 8, 4  # the length limit, tokens of a cache block, M
QUERIES = ("query_start", "seq_len", "prefix_len", "mask_words", "tree_start")
HOST = ("query_start_host", "max_seq_len")


def some_rows(requests: int, width: int, device) -> SimpleNamespace:
    """Requests of 1 to 9 rows, with padding behind some newest rows, up to the length limit."""
    lengths = torch.randint(1, 10, (requests,))
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    last = torch.rand(requests).mul(lengths).long()
    newest = torch.randint(9, MAX - 40, (requests,))
    newest[requests // 2 :] = MAX - 1 - torch.arange(requests - requests // 2) % 9
    request = torch.arange(requests).repeat_interleave(lengths)
    local = torch.arange(len(request)) - row_start[request]
    position = newest[request] - last[request] + local
    index = position - TOKENS * (request % 2)
    # Twice as wide as what is used of it.
    table = torch.randint(0, 1 << 30, (requests, 2 * width), dtype=torch.int32)[:, :width]
    kv_slot = torch.randint(0, 1 << 40, position.shape)
    kv_slot[local > last[request]] = -1
    return SimpleNamespace(
        position=column(position).to(device),
        index=column(index).to(device),
        kv_slot=column(kv_slot).to(device),
        row_start=column(row_start.int()).to(device),
        row_start_host=row_start.tolist(),
        last=column(row_start[:-1] + last).to(device),
        block_table=table.to(device),
        block_size=TOKENS,
        max_position=int(position.max()),
    )


def some_starts(requests: int, starts: int, size: int, block: int, device) -> SimpleNamespace:
    """Anywhere in the rows so far; the drafting row is among them."""
    shape = (starts, requests)
    row = torch.randint(0, 1 + (block - 2) * starts, shape)
    row[torch.rand(shape) < 0.2] = 0
    position = torch.randint(0, size, shape)
    valid = torch.rand(shape) > 0.2
    return SimpleNamespace(
        **{
            name: x.t().to(device)
            for name, x in (("row", row), ("position", position), ("valid", valid))
        }
    )


class Builder(DraftAttentionBuilder):
    """Differs in what works metadata out. forms: of the first block, and of later ones."""

    def __init__(self, forms, *args) -> None:
        super().__init__(*args)
        self.forms = forms

    def first(self, rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft_attention, "first_block_metadata", self.forms[0])
            return super().first(rows)

    def next(self, block, starts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft_attention, "later_block_metadata", self.forms[1])
            return super().next(block, starts)


@pytest.fixture
def both(kernels, monkeypatch):
    """(K, S) -> a sight by torch, and one by launches whose results begin as garbage."""
    first, later = kernels.load("first_block_metadata"), kernels.load("later_block_metadata")
    references = first_block_metadata.reference, later_block_metadata.reference
    launches = first.first_block_metadata_triton, later.later_block_metadata_triton
    empty = torch.empty

    def stale(*shape, **options):
        return empty(*shape, **options).fill_(99)

    monkeypatch.setattr(later.torch, "empty", stale)

    def make(size: int, starts: int, path_rope: bool = False) -> list[DraftAttentionBuilder]:
        caches = [
            torch.empty(0, device=kernels.device)
        ] * 2  # the last layer's queries are those of the newest rows
        args = (caches, size, starts, BLOCKS, MAX, path_rope)
        return [Builder(forms, *args) for forms in (references, launches)]

    return make


def same_tensor(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert mine.dtype == expected.dtype and mine.device == expected.device
    assert mine.shape == expected.shape and torch.equal(mine, expected)


def same(mine: tuple, expected: tuple) -> None:
    """An attention, and the metadata of its rows."""
    (mine, tensors), (expected, others) = mine, expected
    for tensor, other in zip(tensors, others, strict=True):
        same_tensor(tensor, other)
    same_tensor(mine.kv_index, expected.kv_index)
    for queries, wanted in zip(mine.queries, expected.queries, strict=True):
        for name in QUERIES:
            same_tensor(getattr(queries, name), getattr(wanted, name))
        for name in HOST:
            assert getattr(queries, name) == getattr(wanted, name)
        same_tensor(queries.block_table, wanted.block_table)


@pytest.mark.parametrize(
    ("requests", "size", "starts"), [(1, 4, 8), (20, 1, 8), (20, 3, 3), (20, 4, 1), (256, 2, 2)]
)
# A table that ends before the length limit: behind it, its last block is read.
@pytest.mark.parametrize(
    ("width", "path_rope"),
    [(-(-MAX // TOKENS), True), (12, False)],
    ids=["whole table, path", "short table, base"],
)
def test_as_torch_sees(both, kernels, requests, size, starts, width, path_rope):
    torch.manual_seed(requests + 10 * size + starts)
    reference, fused = both(size, starts, path_rope)
    rows = some_rows(requests, width, kernels.device)
    for metadata in (reference, fused):
        metadata.step(rows)
    same(fused.first(rows), reference.first(rows))

    wanted = torch.arange(requests, device=kernels.device).flip(0)[: max(1, requests - 1)]
    for chosen in (None, wanted):
        reference.begin(chosen)
        fused.begin(chosen)
        for metadata in (reference, fused):
            assert (metadata.kept.reach is None) != path_rope
            for each in filter(torch.is_tensor, metadata.kept):
                each.fill_(1 << 60)
        committed = fused.committed
        fused.committed = committed._replace(last=column(committed.last))
        everywhere, nowhere = 0, 0
        for block in range(2, BLOCKS + 1):
            where = some_starts(len(committed.last), starts, size, block, kernels.device)
            expected = reference.next(block, where)
            same(fused.next(block, where), expected)
            there = expected[1].valid
            assert not (there & ~where.valid).any()
            drafted = 1 + (block - 1) * starts
            for mine, theirs in zip(fused.kept, reference.kept):
                if theirs is not None:
                    same_tensor(mine[:, 1:drafted], theirs[:, 1:drafted])
            everywhere += int(there.sum())
            nowhere += int((where.valid & ~there).sum())
        assert requests < 20 or (nowhere and everywhere), "the length limit was not met"
