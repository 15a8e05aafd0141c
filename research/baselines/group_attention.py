"""Attention metadata of drafters whose rows are groups of k entries, k = 1 for plain causal rows.

Row i's group sees itself and the groups of rows i − k, i − 2k, …: k sequences of rows, by i mod k.
A cache block of b tokens, b a multiple of k, holds b·k entries. Cut into k parts, one per sequence,
it is k blocks of a paged cache in which a row's groups are a prefix. Drafted groups follow the
newest row's sequence, in the slots of tokens to come.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits

from baselines.static_tree import TreePlan
from vllm_specblock.commit import store_kv
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.draft_attention import PagedAttention


class GroupRows:
    """Builds the PagedAttention of committed rows; with `size` k = 1 they are plain causal.

    Args:
        caches: one [blocks, kv heads, block size · k, 2D] per drafter layer.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(self, caches: list[Tensor], size: int, max_position: int) -> None:
        self.size, self.max_position = size, max_position
        self.caches = [_cut(cache, size) for cache in caches]
        self.offset = torch.arange(size, device=caches[0].device)
        self.rows_per_token, self.word_counts = size, {1}

    def step(self, rows: CommittedTokens) -> None:
        """Begin a step; drafted rows follow the newest of `rows`."""
        self.rows = newest_rows(rows)

    def first(self, rows: CommittedTokens) -> tuple[PagedAttention, Tensor, Tensor]:
        """Committed rows, of which the newest of each request drafts.

        Returns:
            the attention over T·k entries; order [T] int64, the row of each of its groups; keep
            [R·k] int64, the entries of the newest rows in that order.
        """
        k, device = self.size, rows.token.device
        request, count = rows.request(), rows.row_start.diff().long()  # [T], [R]
        row = torch.arange(len(request), device=device)
        local = row - rows.row_start[:-1].long()[request]
        # The host knows the lengths of a request's sequences, but not which comes first.
        order = (request * k + local % k).argsort(stable=True)
        each = ((count[:, None] + k - 1 - self.offset) // k).flatten()  # [R·k]
        start = pad(each.cumsum(0), (1, 0)) * k
        host = [0]
        for begin, end in pairwise(rows.row_start_host):
            host += [(end - begin + k - 1 - turn) // k for turn in range(k)]
        for number in range(1, len(host)):
            host[number] = host[number - 1] + k * host[number]
        begins = rows.index[rows.row_start[:-1].long().clamp(max=len(row) - 1)]
        which = (begins[:, None] + self.offset) % k  # [R, k]
        table = rows.block_table[:, None] * k + which[..., None]  # [R, k, blocks]

        index, newest = rows.index[order], rows.index[rows.last]
        ends = self._ends(newest).clamp(max=self._most)
        see = ((index // k + 1) * k).minimum(ends[request[order]]).int()
        bound = self._bound(rows.max_position, 0)
        ends = ends.repeat_interleave(k).int()
        no_words = see.new_zeros(len(see) * k, 1, dtype=torch.int64)
        tables, prefix = table.flatten(0, 1).int(), see.repeat_interleave(k)
        queries = TreeAttentionBatch(tables, start.int(), host, ends, bound, prefix, no_words, ends)
        kept = self._queries(newest, rows.block_table, 1, bound, no_words[: len(newest) * k])
        place = torch.empty_like(order).scatter_(0, order, row)
        keep = (place[rows.last, None] * k + self.offset).flatten()
        kv_slot = rows.kv_slot[order]
        block, at = kv_slot // rows.block_size, index % rows.block_size
        entry = (block * k + index % k) * rows.block_size + at - index % k
        entry = torch.where(kv_slot >= 0, entry, -k)[:, None] + self.offset
        of_layers = [queries] * (len(self.caches) - 1) + [kept]
        return PagedAttention(self.caches, entry.view(-1, 1), of_layers), order, keep

    def _ends(self, position: Tensor) -> Tensor:
        """Entries of a row's sequence up to its own group [...] int64; `position` [...]."""
        return (position // self.size + 1) * self.size

    def _bound(self, position: int, groups: int) -> int:
        """Return a host bound of the entries that any row sees."""
        return min(position + self.size * (1 + groups), self._most)

    @property
    def _most(self) -> int:
        """Entries of a sequence for which a block table has blocks."""
        size = self.rows.block_size
        return -(-self.max_position // size) * size

    def _queries(
        self,
        newest: Tensor,
        table: Tensor,
        groups: int,
        bound: int,
        mask_words: Tensor,
        more: int = 0,
    ) -> TreeAttentionBatch:
        """Return queries of so many groups per request in the sequence of the newest row.

        mask_words: [R · groups · k, W], of the `more` entries behind the newest group.
        """
        k, requests = self.size, len(newest)
        each = groups * k
        ends = self._ends(newest).clamp(max=self._most).int()
        start = torch.arange(0, requests * each + 1, each, dtype=torch.int32, device=ends.device)
        return TreeAttentionBatch(
            (table * k + (newest % k)[:, None]).int(),
            start,
            [each * request for request in range(requests + 1)],
            (ends + more).clamp(max=self._most),
            bound,
            ends.repeat_interleave(each),
            mask_words,
            ends,
        )


class FalconAttention(GroupRows):
    """Adds the inputs of groups and the groups that are drafted.

    Args:
        caches: as of `GroupRows`, and the last [blocks, 1, block size, H] for the inputs of the
            first layer: a group begins k − 1 rows before its own.
        plan: the groups that are drafted after the first forward.
    """

    def __init__(self, caches: list[Tensor], size: int, plan: TreePlan, max_position: int) -> None:
        *layers, self.inputs = caches
        super().__init__(layers, size, max_position)
        # Entries of a drafted group see each other and those of the groups on their path.
        self.mask_words = [
            pack_bits(_sees(step.ancestry, size, plan.starts).to(self.offset.device))
            for step in plan.steps[1:]
        ]
        self.word_counts = {1, *(words.shape[-1] for words in self.mask_words)}

    def groups(self, rows: CommittedTokens, entry: Tensor) -> Tensor:
        """Store the rows' entries [T, H]; return their groups [T, k, H]: the k − 1 rows before and
        the row, zeros before the text."""
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

    def next(self, step: int, before: int, starts: int) -> tuple[PagedAttention, Tensor]:
        """The groups of a later step of the plan (from 1 on), S = `starts` per request.

        before: groups that were drafted before.

        Returns:
            the attention over R·S·k entries, and [R, S] bool: groups with slots.
        """
        rows, k = self.rows, self.size
        size, index, table = rows.block_size, rows.index, rows.block_table
        group = torch.arange(before, before + starts, device=index.device)
        at = self._ends(index)[:, None] + group * k  # [R, S], in the sequence
        there = at + k <= self.max_position - (rows.position - index)[:, None]
        column = (at // size).clamp(max=table.shape[1] - 1)
        block = table.gather(1, column).long() * k + index[:, None] % k
        entry = torch.where(there, block * size + at % size, -k)[..., None] + self.offset
        bound = self._bound(rows.max_position, before + starts)
        mask_words = self.mask_words[step - 1].repeat(len(at), 1)
        queries = self._queries(index, table, starts, bound, mask_words, (before + starts) * k)
        of_layers = [queries] * len(self.caches)
        return PagedAttention(self.caches, entry.view(-1, 1), of_layers), there


def newest_rows(rows: CommittedTokens) -> CommittedTokens:
    """The newest row of each request, without the target's states."""
    fields = {name: getattr(rows, name)[rows.last] for name in rows.PER_ROW}
    return replace(rows, states=(), **fields, **_apart(len(rows.last), rows.last.device))


def rows_after(rows: CommittedTokens, count: int, max_position: int) -> CommittedTokens:
    """The next `count` rows of requests that have one row each; each row is its own request, and
    those from `max_position` on have no slot."""
    ahead = torch.arange(1, count + 1, device=rows.position.device)
    position, index = ((x[:, None] + ahead).flatten() for x in (rows.position, rows.index))
    names = (*rows.PER_ROW, *rows.PER_REQUEST)
    fields = {name: getattr(rows, name).repeat_interleave(count, 0) for name in names}
    table, size = fields["block_table"], rows.block_size
    block = (index // size).clamp(max=table.shape[1] - 1)
    kv_slot = table.gather(1, block[:, None])[:, 0].long() * size + index % size
    fields |= {"kv_slot": kv_slot.masked_fill(position >= max_position, -1)}
    fields |= {"position": position, "index": index} | _apart(len(position), position.device)
    return replace(rows, **fields, max_position=min(rows.max_position + count, max_position))


def joined(rows: CommittedTokens, more: CommittedTokens) -> CommittedTokens:
    """Requests of `rows`, then those of `more`."""
    total, names = len(rows.token), (*rows.PER_ROW, *rows.PER_REQUEST)
    return replace(
        rows,
        **{name: torch.cat([getattr(rows, name), getattr(more, name)]) for name in names},
        row_start=torch.cat([rows.row_start, more.row_start[1:] + total]),
        row_start_host=[*rows.row_start_host, *(total + row for row in more.row_start_host[1:])],
        last=torch.cat([rows.last, more.last + total]),
        max_position=max(rows.max_position, more.max_position),
    )


def _apart(count: int, device: torch.device) -> dict[str, Any]:
    """Fields of `count` requests of one row each."""
    start = torch.arange(count + 1, device=device)
    return {"row_start": start.int(), "row_start_host": [*range(count + 1)], "last": start[:-1]}


def _cut(cache: Tensor, size: int) -> Tensor:
    """[blocks, kv heads, b·k, 2D] -> [blocks·k, kv heads, b, 2D], the same memory."""
    blocks, heads, entries, width = cache.shape
    parts = cache.transpose(1, 2).view(blocks * size, entries // size, heads, width)
    return parts.transpose(1, 2)


def _sees(ancestry: list[list[int]], size: int, total: int) -> Tensor:
    """[S·k, total·k] bool: the entries of drafted groups that those of S groups see."""
    seen = torch.zeros(len(ancestry), total, dtype=torch.bool)
    for row, path in zip(seen, ancestry):
        row[path] = True
    return seen.repeat_interleave(size, 0).repeat_interleave(size, 1)
