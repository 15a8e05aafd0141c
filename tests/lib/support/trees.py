"""Random trees and the plain-Python meaning of a tree, for property tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import strategies as st
from vllm_specblock.triton_kernels.tree.node_bits import words_for
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees

from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.accept_path import DrawnRows, accept_path_rows

Nodes = list[tuple[int, int]]
"""(parent, token) of node 1, 2, …; parents come first."""


@st.composite
def nodes(draw, max_nodes: int = 40, vocab: int = 5) -> Nodes:
    """A tree of few tokens, so that siblings are often equal."""
    count = draw(st.integers(0, max_nodes))
    return [
        (draw(st.integers(0, index)), draw(st.integers(0, vocab - 1))) for index in range(count)
    ]


def to_tree(batch: list[Nodes], slots: int, device: torch.device | str = "cpu") -> DraftTree:
    """The batch as a DraftTree of `slots` node slots; scores fall by 0.1 from node to node."""
    token = torch.zeros(len(batch), slots, dtype=torch.int64)
    parent = torch.full((len(batch), slots), -1, dtype=torch.int32)
    logprob = torch.full((len(batch), slots), float("-inf"))
    for request, tree in enumerate(batch):
        for index, (up, what) in enumerate(tree):
            parent[request, index], token[request, index] = up, what
            logprob[request, index] = -0.1 * (index + 1)
    size = torch.tensor([len(tree) for tree in batch], dtype=torch.int32)
    return DraftTree.from_nodes(*(x.to(device) for x in (token, parent, logprob, size)))


def prefix(tree: DraftTree, count: int) -> DraftTree:
    """The best `count` nodes, which are a tree of their own."""
    return DraftTree(
        tree.token[:, :count],
        tree.parent[:, :count],
        tree.depth[:, :count],
        tree.logprob[:, :count],
        tree.size.clamp(max=count),
        tree.ancestors[:, : count + 1, : words_for(count)],
        None if tree.origin is None else tree.origin[:, :count],
    )


def path_to(tree: Nodes, node: int) -> list[int]:
    """Nodes from the root (0) to `node`."""
    path = [node]
    while path[0]:
        path.insert(0, tree[path[0] - 1][0])
    return path


def ancestor_sets(tree: Nodes, slots: int) -> list[set[int]]:
    """Ancestors of every slot, root and itself included; unused slots hang from the root."""
    used = [set(path_to(tree, node)) for node in range(len(tree) + 1)]
    return used + [{0, node} for node in range(len(tree) + 1, slots + 1)]


def walk(
    tree: DraftTree, live: torch.Tensor, sampled: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, ...]:
    """Output, accepted nodes and paths of R trees; live: [R, N]; sampled: [R, N+1], draws."""
    requests, nodes = tree.token.shape
    rooted = torch.nn.functional.pad(torch.where(live, tree.token, -1), (1, 0))
    first_row = torch.arange(requests + 1, dtype=torch.int32) * (nodes + 1)
    rows = DrawnRows(rooted.flatten(), sampled.flatten(), first_row, torch.arange(requests))
    depth = torch.nn.functional.pad(tree.depth.long(), (1, 0))
    path = torch.zeros(requests, max_depth + 1, dtype=torch.int64)
    verdict = path[:, 0].int(), path
    kept = KeptTrees(tree.parent, depth, tree.logprob, tree.ancestors, tree.origin, *verdict)
    return accept_path_rows(rows, kept)[0], *verdict


def texts(tree: DraftTree, request: int) -> dict[tuple, float]:
    """Every node's tokens from the root on, and its score."""
    parent, token = tree.parent[request].tolist(), tree.token[request].tolist()
    known, out = {0: ()}, {}
    for node in range(1, int(tree.size[request]) + 1):
        known[node] = (*known[parent[node - 1]], token[node - 1])
        out[known[node]] = float(tree.logprob[request, node - 1])
    return out


def assert_same_tree(
    tree: DraftTree, request: int, wanted: dict[tuple, float], ties: int = 2
) -> None:
    """A request's texts and scores, but for so many `ties` at the budget's cut."""
    found = texts(tree, request)
    common = found.keys() & wanted.keys()
    assert len(found) == len(wanted)
    assert len(common) >= len(wanted) - ties, "more than a tie at the budget's cut differs"
    assert {p: found[p] for p in common} == pytest.approx({p: wanted[p] for p in common}, abs=1e-3)


def best_paths(
    choices: Callable[[tuple[int, ...]], Mapping[int, float]], depth: int, count: int = 1 << 30
) -> dict[tuple[int, ...], float]:
    """Path → the sum of its scores: the `count` best paths of up to `depth` tokens.

    choices: token → score of the tokens behind a path.
    """
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level = {
            (*path, token): score + each
            for path, score in level.items()
            for token, each in choices(path).items()
        }
        level = dict(sorted(level.items(), key=lambda node: -node[1])[:count])
        found |= level
    return dict(sorted(found.items(), key=lambda node: -node[1])[:count])
