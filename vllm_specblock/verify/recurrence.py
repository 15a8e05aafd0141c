"""Draft trees through recurrent layers, without a state per node.

A head's state S [K, V] goes on from its parent's by the node's decay a, key k and value v:

    S_i = a_i S_parent + k_i u_iᵀ        u_i = β_i (v_i − (a_i S_parent)ᵀ k_i), in Mamba-2 v_i
    o_i = S_iᵀ q_i

With G_i the sum of log a from the root to i, node i sees exp(G_i) S_0 and exp(G_i − G_j) k_j u_jᵀ
of its ancestors j and itself: attention with a tree mask and a decay. u solves a unit triangular
system, since parents come before children.

Shapes: R requests, L rows of a request (committed ones, then the tree's nodes, then padding),
H heads in G groups, C channels, W the width of a convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Paths:
    """The parent and the ancestors of each row.

    Args:
        base: [R] int64, committed rows, the root included; they form a chain.
        parent: [R, N] integers, of nodes 1 … N; 0 is the root, or −1.
    """

    def __init__(self, base: Tensor, parent: Tensor, num_rows: int) -> None:
        row = torch.arange(num_rows, device=parent.device)
        node = row - base[:, None]  # [R, L], 0: the first after the root
        above = parent.long().clamp(min=0).gather(1, node.clamp(0, parent.shape[1] - 1))
        # [R, L] int64, a row; −1 before the first.
        self.parent = torch.where(node < 0, row - 1, base[:, None] - 1 + above)
        hop = torch.nn.functional.one_hot(self.parent + 1, num_rows + 1)[..., 1:].float()
        seen = torch.eye(num_rows, device=parent.device) + hop
        reach = 1
        while reach < num_rows:
            seen = (seen @ seen).clamp_(max=1)
            reach *= 2
        self.seen = seen.bool()  # [R, L, L], column j is an ancestor of row i, or i itself
        self._windows: dict[int, Tensor] = {}

    def window(self, width: int) -> Tensor:
        """Return [R, L, W], the rows that a convolution of this width reads, the row itself last.

        W − 1 rows of history come before row 0: row i is number W − 1 + i.
        """
        if width not in self._windows:
            before = width - 1
            row = torch.arange(-before, self.parent.shape[1], device=self.parent.device)
            above = torch.where(row <= 0, row - 1, 0).clamp(min=-before).repeat(len(self.parent), 1)
            above[:, before:] = self.parent
            taken = [row[before:].expand_as(self.parent)]
            for _ in range(before):
                taken.append(above.gather(1, taken[-1] + before))
            self._windows[width] = torch.stack(taken[::-1], 2) + before
        return self._windows[width]


def convolve(
    history: Tensor, x: Tensor, paths: Paths, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return [R, L, C], the causal convolution of x along each row's own path.

    history: [R, W − 1, C], inputs before row 0, the newest last. weight: [C, W]; bias: [C].
    """
    width = weight.shape[1]
    rows, taken = torch.cat([history, x], 1), paths.window(width)
    out = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
    for place in range(width):
        index = taken[:, :, place, None].expand_as(x)
        out += rows.gather(1, index) * weight[:, place]
    return out


def newest(history: Tensor, x: Tensor, paths: Paths, last: Tensor) -> Tensor:
    """Return [R, W − 1, C], the history after the paths that end in rows `last` [R] int64."""
    width = history.shape[1] + 1
    taken = paths.window(width)[torch.arange(len(last), device=last.device), last, 1:]
    return torch.cat([history, x], 1).gather(1, taken[..., None].expand(-1, -1, x.shape[2]))


class Recurrence(NamedTuple):
    """Inputs of a layer's recurrence, in fp32; H / G heads in a row share a query and a key."""

    query: Tensor  # [R, L, G, K]
    key: Tensor  # [R, L, G, K]
    value: Tensor  # [R, L, H, V]; of Mamba-2 Δ x
    log_decay: Tensor  # [R, L, H], log a, at most 0
    beta: Tensor | None = None  # [R, L, H], of the delta rule


class Written(NamedTuple):
    """What each row adds to a state, until it is known which rows are accepted."""

    key: Tensor  # [R, L, G, K]
    value: Tensor  # [R, L, H, V], u
    decay: Tensor  # [R, L, H], G


def scan(rows: Recurrence, paths: Paths, state: Tensor) -> tuple[Tensor, Written]:
    """Return the outputs [R, L, H, V] of all rows, from the state [R, H, K, V] before row 0."""
    heads = rows.value.shape[2]
    query, key = (_per_head(x, heads).transpose(1, 2) for x in rows[:2])  # [R, H, L, K]
    value = rows.value.transpose(1, 2)
    decay = paths.seen.to(rows.log_decay.dtype) @ rows.log_decay
    total = decay.transpose(1, 2)  # [R, H, L]
    # Mask before exp: the difference of unrelated rows may overflow.
    gap = (total[..., None] - total[..., None, :]).masked_fill(~paths.seen[:, None], -torch.inf)
    fade, start = gap.exp(), total.exp()[..., None]
    if rows.beta is not None:
        beta = rows.beta.transpose(1, 2)[..., None]
        known = (beta * fade * (key @ key.mT)).tril(-1)
        given = beta * (value - start * (key @ state))
        value = torch.linalg.solve_triangular(known, given, upper=False, unitriangular=True)
    out = start * (query @ state) + (fade * (query @ key.mT)) @ value
    return out.transpose(1, 2), Written(rows.key, value.transpose(1, 2), decay)


def advance(written: Written, paths: Paths, last: Tensor, state: Tensor) -> Tensor:
    """Return [R, H, K, V], the state after the paths that end in rows `last` [R] int64.

    state: [R, H, K, V] before row 0.
    """
    which = torch.arange(len(last), device=last.device)
    end = written.decay[which, last]  # [R, H]
    on_path = paths.seen[which, last][..., None]
    fade = (end[:, None] - written.decay).masked_fill(~on_path, -torch.inf).exp()
    key = _per_head(written.key, end.shape[1])
    update = torch.einsum("rlh,rlhk,rlhv->rhkv", fade, key, written.value)
    return end.exp()[..., None, None] * state + update


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)  # [R, L, G, K] → [R, L, H, K]
