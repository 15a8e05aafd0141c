"""Attention metadata of drafters whose rows are groups of k entries.

Row i's group sees itself and the groups of rows i − k, i − 2k, …: k sequences of rows side by
side, by i mod k. In the cache a block of b tokens holds b·k entries. Cut into k parts of b, one
per sequence, it is k blocks of a paged cache in which a row's groups are a plain prefix; b is a
multiple of k. Groups that are drafted go on where the newest row's sequence ends, into the slots
of tokens to come.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from baselines.static_tree import TreePlan
from vllm_specblock.commit.store import store_kv
from vllm_specblock.drafters.common.draft_attention import PagedAttention
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.tree import pack_bits


class GroupAttentionBuilder:
    """Builds the PagedAttention of each forward of a step, and keeps the rows' inputs.

    Args:
        caches: one [blocks, kv heads, block size · k, 2D] per drafter layer, and the last
            [blocks, 1, block size, H] for what goes into the first layer: a group begins k − 1
            rows before its own.
        size: k.
        plan: what is drafted after the first forward.
        max_position: entries at or beyond it have no place (the model's length limit).
    """

    def __init__(self, caches: list[Tensor], size: int, plan: TreePlan, max_position: int) -> None:
        *layers, self.inputs = caches
        self.size, self.max_position, self.total = size, max_position, plan.starts
        self.caches = [_cut(cache, size) for cache in layers]
        device = self.inputs.device
        self.offset = torch.arange(size, device=device)
        # Entries of a drafted group see each other and those of the groups on their path.
        self.mask_words = [
            pack_bits(_sees(step.ancestry, size, plan.starts).to(device)) for step in plan.steps[1:]
        ]
        self.rows_per_token = size
        self.word_counts = {1, *(words.shape[-1] for words in self.mask_words)}

    def step(self, rows: CommittedTokens) -> None:
        """Begin a step; drafted groups follow the newest of `rows`."""
        self.rope, self.newest = rows.position[rows.last], rows.index[rows.last]
        self.table = rows.block_table
        self.block_size, self.bound = rows.block_size, rows.max_position

    def groups(self, rows: CommittedTokens, entry: Tensor) -> Tensor:
        """Store the rows' entries [T, H], and give each its group [T, k, H]: those of the k − 1
        rows before it and its own, zeros where the text has not begun."""
        key, value = entry[:, None].chunk(2, dim=-1)
        store_kv(self.inputs, rows.kv_slot, key, value)
        index = rows.index[:, None] + self.offset - (self.size - 1)
        exists = index >= 0
        there = index.clamp(min=0)
        block = rows.block_table[
            rows.request()[:, None],
            (there // rows.block_size).clamp(max=rows.block_table.shape[1] - 1),
        ].long()
        found = self.inputs[block, 0, there % rows.block_size]  # [T, k, H]
        # A row of padding has no slot, and its group is not read.
        return found.masked_fill(~exists[..., None], 0.0)

    def first(self, rows: CommittedTokens) -> tuple[PagedAttention, Tensor, Tensor]:
        """Committed rows, of which the newest of each request drafts.

        Returns:
            the attention over T·k entries, the groups in another order: `order` [T] int64, the row
            of each; and keep [R·k] int64, the entries of the newest rows in that order.
        """
        k, device = self.size, rows.token.device
        request, count = rows.request(), rows.row_start.diff().long()  # [T], [R]
        row = torch.arange(len(request), device=device)
        local = row - rows.row_start[:-1].long()[request]
        # How many rows a sequence has, the host knows; which it is, by i mod k, it does not.
        order = (request * k + local % k).argsort(stable=True)
        each = ((count[:, None] + k - 1 - self.offset) // k).flatten()  # [R·k]
        start = pad(each.cumsum(0), (1, 0)) * k
        host = [0]
        for size in _sizes(rows.row_start_host):
            host += [(size + k - 1 - turn) // k for turn in range(k)]
        for number in range(1, len(host)):
            host[number] = host[number - 1] + k * host[number]
        begins = rows.index[rows.row_start[:-1].long().clamp(max=len(row) - 1)]
        which = (begins[:, None] + self.offset) % k  # [R, k]
        table = rows.block_table[:, None] * k + which[..., None]  # [R, k, blocks]

        index, newest = rows.index[order], rows.index[rows.last]
        ends = self._ends(newest)
        see = ((index // k + 1) * k).minimum(ends[request[order]]).int()
        bound = self._bound(rows.max_position, 0)
        queries = TreeAttentionBatch(
            table.flatten(0, 1).int(),
            start.int(),
            host,
            _each(ends, k).int(),
            bound,
            _each(see, k),
            see.new_zeros(len(see) * k, 1, dtype=torch.int64),
            _each(ends, k).int(),
        )
        kept = self._queries(
            newest, rows.block_table, 1, bound, see.new_zeros(k, 1, dtype=torch.int64)
        )
        place = torch.empty_like(order).scatter_(0, order, row)
        keep = (place[rows.last, None] * k + self.offset).flatten()
        kv_slot = rows.kv_slot[order]
        block, at = kv_slot // self.block_size, index % self.block_size
        entry = (block * k + index % k) * self.block_size + at - index % k
        entry = torch.where(kv_slot >= 0, entry, -k)[:, None] + self.offset
        return PagedAttention(self.caches, entry.view(-1, 1), queries, kept), order, keep

    def begin(self, requests: Tensor | None) -> None:
        """Say for which requests ([n] int64; None: all of the step) groups are drafted."""
        self.position, self.index, self.block_table = self.rope, self.newest, self.table
        if requests is not None:
            self.position, self.index = self.rope[requests], self.newest[requests]
            self.block_table = self.table[requests]

    def next(self, step: int, before: int, starts: int) -> tuple[PagedAttention, Tensor]:
        """The groups of a later step of the plan, S per request.

        Args:
            step: which one, from 1 on.
            before: groups that were drafted before; starts: S.

        Returns:
            the attention over R·S·k entries, and [R, S] bool: groups that have a place.
        """
        k, size = self.size, self.block_size
        group = torch.arange(before, before + starts, device=self.position.device)
        at = self._ends(self.index)[:, None] + group * k  # [R, S], in the sequence
        there = at + k <= self.max_position - (self.position - self.index)[:, None]
        column = (at // size).clamp(max=self.block_table.shape[1] - 1)
        block = self.block_table.gather(1, column).long() * k + self.index[:, None] % k
        entry = torch.where(there, block * size + at % size, -k)[..., None] + self.offset
        bound = self._bound(self.bound, before + starts)
        mask_words = self.mask_words[step - 1].expand(len(at), -1, -1).flatten(0, 1)
        queries = self._queries(
            self.index, self.block_table, starts, bound, mask_words, (before + starts) * k
        )
        return PagedAttention(self.caches, entry.view(-1, 1), queries), there

    def _ends(self, position: Tensor) -> Tensor:
        """Entries of a row's sequence up to its own group [...] int64; `position` [...]."""
        return (position // self.size + 1) * self.size

    def _bound(self, position: int, groups: int) -> int:
        """Return a host bound of the entries that any row sees: rows to `position`, and groups."""
        return min(position + self.size * (1 + groups), self._most)

    @property
    def _most(self) -> int:
        """Entries of a sequence for which a block table has blocks."""
        return -(-self.max_position // self.block_size) * self.block_size

    def _queries(
        self,
        newest: Tensor,
        table: Tensor,
        groups: int,
        bound: int,
        mask_words: Tensor,
        more: int = 0,
    ) -> TreeAttentionBatch:
        """So many groups per request in the sequence of the newest row.

        They see its prefix up to the newest group, and their words [R · groups · k or groups · k,
        W]; `more` entries follow the prefix.
        """
        k, requests = self.size, len(newest)
        each = groups * k
        ends = self._ends(newest).int()
        start = torch.arange(0, requests * each + 1, each, dtype=torch.int32, device=ends.device)
        if len(mask_words) != requests * each:
            mask_words = mask_words.repeat(requests, 1)
        return TreeAttentionBatch(
            (table * k + (newest % k)[:, None]).int(),
            start,
            [each * request for request in range(requests + 1)],
            (ends + more).clamp(max=self._most),
            bound,
            _each(ends, each),
            mask_words,
            ends,
        )


def _cut(cache: Tensor, size: int) -> Tensor:
    """[blocks, kv heads, b·k, 2D] -> [blocks·k, kv heads, b, 2D], the same memory."""
    blocks, heads, entries, width = cache.shape
    parts = cache.transpose(1, 2).view(blocks * size, entries // size, heads, width)
    return parts.transpose(1, 2)


def _sees(ancestry: list[list[int]], size: int, total: int) -> Tensor:
    """[S·k, total·k] bool: which entries of drafted groups those of S groups see."""
    seen = torch.zeros(len(ancestry), total, dtype=torch.bool)
    for row, path in zip(seen, ancestry):
        row[path] = True
    return seen.repeat_interleave(size, 0).repeat_interleave(size, 1)


def _each(values: Tensor, times: int) -> Tensor:
    """[n] -> [n · times], every value so many times."""
    return values[:, None].expand(-1, times).flatten()


def _sizes(bounds: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]
