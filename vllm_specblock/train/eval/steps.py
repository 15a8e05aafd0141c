"""Speculative decoding steps as plain data: trees, accepted paths, bonus tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vllm_specblock.train.eval.replay import walk
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree


class TreeDraft(Protocol):
    """A `Draft` that knows which drafter forward each node comes from."""

    def __call__(self, root: int) -> DraftTree: ...

    def forwards(self) -> Tensor:
        """[N] integers, 1-based, of the last tree's nodes; 0 for a slot not in use."""
        ...


@dataclass(frozen=True)
class Step:
    """One tree and its verification; entry 0 of each list is the root.

    root: place of the root in the text.
    parent: −1 for the root.
    score: cumulative log-probability in nats, 0 for the root.
    forward: the drafter forward that proposed the node (block m or level d); 0 for the root.
    accepted: nodes of the accepted path, from the root on.
    bonus: the target's own token after that path; None where the text ends with the path.
    """

    root: int
    token: list[int]
    parent: list[int]
    score: list[float]
    forward: list[int]
    accepted: list[int]
    bonus: int | None

    @property
    def nodes(self) -> int:
        """Number of nodes without the root."""
        return len(self.token) - 1

    @property
    def accepted_length(self) -> int:
        """Drafted tokens that were right; the step commits one more where there is a bonus."""
        return len(self.accepted) - 1

    def probability(self, node: int) -> float:
        """Of a node's token given its parent, by the score that the tree was grown with."""
        return math.exp(self.score[node] - self.score[self.parent[node]]) if node else 1.0

    def main_path(self) -> list[int]:
        """Nodes below the root that follow the drafter's greedy token, to the tree's end."""
        path, here = [], 0
        # Nodes stand in descending order of score, so a node's first child is its best.
        for node in range(1, len(self.parent)):
            if self.parent[node] == here:
                path.append(node)
                here = node
        return path


def steps_along(draft: TreeDraft, sequence: EvalSequence, depth: int = 0) -> Iterator[Step]:
    """The steps of `replay` with their trees; depth 0: to the text's end, which may cut a step
    short."""
    tokens = sequence.tokens.tolist()
    for root, tree, path in walk(draft, sequence, depth):
        size, bonus = int(tree.size[0]), root + len(path)
        yield Step(
            root,
            [tokens[root], *tree.token[0, :size].tolist()],
            [-1, *tree.parent[0, :size].tolist()],
            [0.0, *tree.logprob[0, :size].tolist()],
            [0, *draft.forwards()[:size].tolist()],
            path,
            tokens[bonus] if bonus < len(tokens) else None,
        )
