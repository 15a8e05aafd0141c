"""Offline τ: verification steps with draft trees along given text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.drafting import ServedDraft
from vllm_specblock.train.learner import Draft, EvalSequence
from vllm_specblock.tree import DraftTree


@dataclass
class Replay:
    """Per step along texts: accepted draft tokens, without the bonus, and nodes of the tree."""

    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def follow(self, draft: Draft, sequence: EvalSequence, depth: int) -> None:
        """Add the steps of `walk` along a text."""
        for _, tree, path in walk(draft, sequence, depth):
            self.accepted.append(len(path) - 1)
            self.nodes.append(int(tree.size[0]))

    @property
    def tau(self) -> float:
        """Mean tokens committed per step (paper's accepted length), over all texts."""
        return 1 + sum(self.accepted) / len(self.accepted)

    def check(self, depth: int) -> None:
        """Raise `TrainError` if there was no step."""
        if not self.accepted:
            raise TrainError(
                f"No text is long enough to draft along: a step needs {depth + 2} tokens after the "
                "prompt; give more new tokens, or other prompts."
            )


def replay(
    make_draft: Callable[[EvalSequence], Draft], sequences: Iterable[EvalSequence], depth: int
) -> Replay:
    """Return the steps of `walk` along all texts, each with a fresh draft of `make_draft`, such as
    `Learner.draft_along`; raises `TrainError` if no text is long enough for a step."""
    whole = Replay()
    for sequence in sequences:
        whole.follow(make_draft(sequence), sequence, depth)
    whole.check(depth)
    return whole


def walk(
    draft: Draft, sequence: EvalSequence, depth: int
) -> Iterator[tuple[int, DraftTree, list[int]]]:
    """Draft along a text as serving would: (root, tree, nodes of the accepted path) of each step.

    The first root is the first token after the prompt. Every step accepts the longest path of its
    tree along the text; the next root is the token after it.

    The text must be the target's own continuation, greedy or sampled: verification would draw the
    same tokens, since the noise depends on the position. The mean over sampled texts is the
    expected τ.

    depth: tokens of the longest path of any tree, equal for compared drafters. Roots with fewer
        than depth + 1 following tokens are skipped: the path could not be accepted in full.
    """
    tokens, root = sequence.tokens.tolist(), sequence.prompt
    while root + depth + 1 < len(tokens):
        tree = draft(root)
        path = accepted_path(tree, tokens[root + 1 :])
        yield root, tree, path
        root += len(path)


def accepted_path(tree: DraftTree, wanted: list[int]) -> list[int]:
    """Nodes, from the root (0) on, of the longest path of a tree (R = 1) whose tokens are the
    first of `wanted`."""
    size = int(tree.size[0])
    reached = {0: [0]}  # node -> its path, of those that the text follows
    links = zip(tree.parent[0, :size].tolist(), tree.token[0, :size].tolist())
    for node, (parent, token) in enumerate(links, start=1):
        path = reached.get(parent)
        if path and len(path) <= len(wanted) and token == wanted[len(path) - 1]:
            reached[node] = [*path, node]
    return max(reached.values(), key=len)


@dataclass(frozen=True)
class Step:
    """One tree and its verification; entry 0 of each list is the root.

    root: index of the root in the text.
    parent: −1 for the root.
    score: cumulative log-probability in nats, 0 for the root.
    forward: the drafter forward that proposed the node (block m or level d); 0 for the root.
    accepted: nodes of the accepted path, from the root on.
    bonus: the target's token after that path; None if the text ends there.
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
        """Accepted draft tokens, without the bonus token."""
        return len(self.accepted) - 1

    def probability(self, node: int) -> float:
        """Return the probability of a node's token given its parent, by draft scores."""
        return math.exp(self.score[node] - self.score[self.parent[node]]) if node else 1.0


def steps_along(draft: ServedDraft, sequence: EvalSequence, depth: int = 0) -> Iterator[Step]:
    """Yield the steps of `walk` with trees; depth 0: up to the text's end, which may cut a step."""
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
