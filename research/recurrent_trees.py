"""Draft trees through a recurrent layer, in plain torch: what verifying them would take.

    python research/recurrent_trees.py --out runs/recurrent_trees.json

The layers are Gated DeltaNet's and, with `delta` false, Mamba-2's. A head's state S [K, V] goes on
from its parent's, over the node's decay a, key k and what is written, u:

    S_i = a_i S_parent + k_i u_iᵀ        u_i = β_i (v_i − (a_i S_parent)ᵀ k_i), in Mamba-2 v_i
    o_i = S_iᵀ q_i

`by_parents` keeps a state for every node. `by_mask` keeps none: with G_i the sum of log a from the
root to i, node i sees exp(G_i) S_0 and exp(G_i − G_j) k_j u_jᵀ of its ancestors j and itself, so u
solves one unit triangular system, and the state after any path is S_0 and one product over it.
`docs/hybrid_targets.md` says what follows. Parents stand before their children, as in every
`DraftTree`; node 0 is the root, a token that is certain.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch.nn.functional import normalize

from vllm_specblock.bench.table import markdown_table


class Rows(NamedTuple):
    """What a layer computes of each node before its recurrence.

    Attributes (R requests, N nodes with the root, H heads):
        query, key: [R, N, H, K], of length 1, the query scaled.
        value: [R, N, H, V]; of Mamba-2 Δ x.
        beta: [R, N, H]; of Mamba-2 not read.
        log_decay: [R, N, H], log a, at most 0.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor


def ancestors(parent: torch.Tensor) -> torch.Tensor:
    """[R, N, N] bool: column j is an ancestor of row i, or i itself.

    Args:
        parent: [R, N] int64, a lower index; −1: none.
    """
    requests, nodes = parent.shape
    seen = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    which = torch.arange(requests)
    for node in range(nodes):
        above = parent[:, node]
        seen[:, node] = seen[which, above.clamp(min=0)] & (above >= 0)[:, None]
        seen[:, node, node] = True
    return seen


def by_parents(
    rows: Rows, parent: torch.Tensor, state: torch.Tensor, delta: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """One node after the other, each from the state that its parent left.

    Args:
        parent: [R, N] int64.
        state: [R, H, K, V] after the committed tokens.
        delta: whether u is corrected by what is known under the key.

    Returns:
        [R, N, H, V], outputs; [R, N, H, K, V], states.
    """
    requests, nodes = parent.shape
    states = state.new_empty(requests, nodes, *state.shape[1:])
    which, out = torch.arange(requests), torch.empty_like(rows.value)
    for node in range(nodes):
        above = parent[:, node]
        kept = states[which, above.clamp(min=0)]
        before = torch.where((above < 0)[:, None, None, None], state, kept)
        before = before * rows.log_decay[:, node].exp()[..., None, None]
        query, key, value = (x[:, node] for x in rows[:3])
        if delta:
            known = torch.einsum("rhkv,rhk->rhv", before, key)
            value = rows.beta[:, node, :, None] * (value - known)
        states[:, node] = before + key[..., None] * value[..., None, :]
        out[:, node] = torch.einsum("rhkv,rhk->rhv", states[:, node], query)
    return out, states


def by_mask(
    rows: Rows, seen: torch.Tensor, state: torch.Tensor, delta: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """All nodes at once, from the state after the committed tokens alone.

    Args:
        seen: [R, N, N] bool, see `ancestors`.
        state, delta: as `by_parents` has them.

    Returns:
        [R, N, H, V], outputs; [R, N, H, V], u: what `commit` needs.
    """
    query, key, value = (x.transpose(1, 2) for x in rows[:3])  # [R, H, N, ·]
    total = path_decay(rows, seen).transpose(1, 2)  # [R, H, N], G
    # Masked before exp: of nodes that do not see each other the difference may be large.
    fade = (total[..., None] - total[..., None, :]).masked_fill(~seen[:, None], -torch.inf).exp()
    start = total.exp()[..., None]
    written = value
    if delta:
        beta = rows.beta.transpose(1, 2)[..., None]
        known = beta * fade * (key @ key.mT)
        given = beta * (value - start * (key @ state))
        written = torch.linalg.solve_triangular(
            known.tril(-1), given, upper=False, unitriangular=True
        )
    out = start * (query @ state) + (fade * (query @ key.mT)) @ written
    return out.transpose(1, 2), written.transpose(1, 2)


def path_decay(rows: Rows, seen: torch.Tensor) -> torch.Tensor:
    """[R, N, H], G: log a summed over a node and its ancestors."""
    return seen.to(rows.log_decay.dtype) @ rows.log_decay


def commit(
    rows: Rows,
    written: torch.Tensor,
    seen: torch.Tensor,
    last: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """[R, H, K, V], the state after an accepted path.

    Args:
        written: [R, N, H, V], u, of `by_mask`.
        last: [R] int64, the path's last node.
        state: [R, H, K, V] before the tree.
    """
    which = torch.arange(len(last))
    total = path_decay(rows, seen)
    end = total[which, last]  # [R, H]
    fade = (end[:, None] - total).masked_fill(~seen[which, last][..., None], -torch.inf).exp()
    update = torch.einsum("rnh,rnhk,rnhv->rhkv", fade, rows.key, written)
    return end.exp()[..., None, None] * state + update


def tree_convolution(
    x: torch.Tensor, parent: torch.Tensor, history: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """[R, N, C], the causal convolution before the recurrence, along each node's own path.

    Args:
        x: [R, N, C].
        parent: [R, N] int64.
        history: [R, W − 1, C], inputs of the last committed tokens, the newest last.
        weight: [C, W], the newest token's last.
    """
    before = history.shape[1]
    table = torch.cat([history, x], 1)
    node = torch.arange(x.shape[1]).expand_as(parent) + before  # row of `table`
    # Above the root stands the newest of the history, above that the one before.
    above = torch.cat([torch.arange(-1, before - 1).expand(len(x), -1), parent + before], 1)
    out = torch.zeros_like(x)
    for back in range(before + 1):
        taken = table.gather(1, node[..., None].expand_as(x))
        out += taken * weight[:, before - back]
        # Beyond the window nothing is read any more.
        node = above.gather(1, node).clamp(min=0)
    return out


# ---- what it costs ----

QWEN3_NEXT = {"heads": 32, "key": 128, "value": 128, "layers": 36, "key_heads": 16}
"""Qwen3-Next-80B-A3B: of its 48 layers, those with Gated DeltaNet."""


def made_up(nodes: int, heads: int, key: int, value: int, requests: int = 1) -> Rows:
    """Rows of normal numbers, with decays as gates of trained models have them, 0.8 to 1."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(requests, nodes, heads, *size)

    query, of_key = (normalize(draw(key), dim=-1) for _ in range(2))
    beta, decay = draw().sigmoid(), -0.2 * draw().sigmoid()
    return Rows(query * key**-0.5, of_key, draw(value), beta, decay)


def random_tree(nodes: int, requests: int = 1) -> torch.Tensor:
    """[R, N] int64, parents: any earlier node."""
    above = torch.rand(requests, nodes) * torch.arange(nodes)
    return above.long().where(torch.arange(nodes) > 0, -1)


def median_ms(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Milliseconds of each, which take turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if run:  # the first one allocates
                took[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(each) for name, each in took.items()}


def measure(nodes: int, runs: int) -> dict[str, float]:
    """One layer of Qwen3-Next's sizes, one request: milliseconds, and MiB of all layers."""
    shape = QWEN3_NEXT
    heads, key, value = shape["heads"], shape["key"], shape["value"]
    rows, parent = made_up(nodes + 1, heads, key, value), random_tree(nodes + 1)
    state, seen = torch.randn(1, heads, key, value), ancestors(parent)
    chain = torch.arange(-1, nodes)[None]
    last = torch.tensor([nodes])
    _, written = by_mask(rows, seen, state)
    found = median_ms(
        {
            "chain_ms": lambda: by_parents(rows, chain, state),
            "by_parents_ms": lambda: by_parents(rows, parent, state),
            "by_mask_ms": lambda: by_mask(rows, seen, state),
            "commit_ms": lambda: commit(rows, written, seen, last, state),
        },
        runs,
    )
    per_node = heads * (value + 1) + shape["key_heads"] * key
    kept = {"states": (nodes + 1) * heads * key * value, "rows": (nodes + 1) * per_node}
    mib = {f"{name}_mib": 4 * shape["layers"] * each / 2**20 for name, each in kept.items()}
    exact = by_parents(rows, parent, state)[0]
    return (
        found | mib | {"largest_error": (exact - by_mask(rows, seen, state)[0]).abs().max().item()}
    )


def main(
    nodes: Annotated[list[int], typer.Option(help="Nodes of the tree.")] = [12, 24, 60],  # noqa: B006
    runs: Annotated[int, typer.Option(min=1, help="Of each; the median counts.")] = 20,
    out: Annotated[Path | None, typer.Option(help="JSON of the figures.")] = None,
) -> None:
    """Measure both ways, and print a table."""
    torch.manual_seed(0)
    found = {str(count): measure(count, runs) for count in nodes}
    names = list(next(iter(found.values())))
    table = [["nodes", *names]]
    table += [[count, *(f"{each[name]:.3g}" for name in names)] for count, each in found.items()]
    print(markdown_table(table))
    if out is not None:
        settings = {"shape": QWEN3_NEXT, "runs": runs, "threads": torch.get_num_threads()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"settings": settings, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
