"""CommittedTokens of made-up steps, for heads that are tested without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree


def rows_of(
    requests: Sequence[tuple[int, int]],
    tables: torch.Tensor,
    states: torch.Tensor,
    text: torch.Tensor,
    page: int,
    padding: int = 0,
) -> CommittedTokens:
    """Rows first … end − 1 of requests (first, end), then `padding` rows of rejected nodes.

    tables [R, blocks] int64, states [L, R, ≥ end, Ht], text [R, > end] int64 with the root at
    `end`. The first request is greedy, the others sample hotter and hotter.
    """
    parts, start, last = [], [0], []
    for request, (first, end) in enumerate(requests):
        position = torch.arange(first, end + padding)
        block = tables[request][(position // page).clamp(max=tables.shape[1] - 1)]
        slot = torch.where(position < end, block * page + position % page, -1)
        index = position.clamp(max=end - 1)
        state, token = states[:, request, index].transpose(0, 1), text[request][index + 1]
        parts.append((state, token, position, slot))
        last.append(start[-1] + end - first - 1)
        start.append(start[-1] + len(position))
    of_rows, token, position, kv_slot = (torch.cat(part) for part in zip(*parts))
    return CommittedTokens(
        states=of_rows.unbind(1),
        source=torch.arange(len(token)),
        token=token,
        position=position,
        index=position,
        kv_slot=kv_slot,
        row_start=torch.tensor(start, dtype=torch.int32),
        row_start_host=start,
        last=torch.tensor(last),
        block_table=tables.int(),
        block_size=page,
        max_position=int(position.max()),
        text=text.int(),
        req_idx=torch.arange(len(requests)),
        temperature=torch.arange(len(requests)) * 0.8,
    )


def zero_rows(page: int, width: int, max_len: int = 64) -> CommittedTokens:
    """Two requests of 9 and 3 rows of zeros."""
    states, text = torch.zeros(3, 2, 9, width), torch.zeros(2, max_len)
    return rows_of([(0, 9), (0, 3)], torch.zeros(2, 8).long(), states, text, page)


def advance(drafter: Drafter, rows: CommittedTokens) -> None:
    """Let it read rows, with β as the draft policy sets it."""
    if drafter.calibration is not None:
        drafter.beta = drafter.calibration.of(rows.temperature, rows.req_idx)
    drafter.advance(rows)


def served_trees(
    drafter: Drafter,
    sequence: EvalSequence,
    roots: Iterable[int],
    pages: int,
    page: int,
    layers: int = 3,
) -> Iterator[DraftTree]:
    """The trees of a greedy request that is committed up to each of `roots` in turn."""
    table = torch.randperm(pages)[None] + 1
    states = torch.stack(sequence.hidden.chunk(layers, dim=-1))[:, None]  # [L, 1, n, Ht]
    done, tree, greedy = 0, None, torch.zeros(1)
    for root in roots:
        rows = rows_of([(done, root)], table, states, sequence.tokens[None], page)
        if tree is not None and drafter.calibration is not None:
            accepted = torch.tensor([root - done - 1])
            drafter.calibration.learn(greedy, tree.logprob.exp().sum(1), accepted, accepted >= 0)
        advance(drafter, rows)
        tree = drafter.draft()
        yield tree
        done = root
