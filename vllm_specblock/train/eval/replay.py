"""Offline τ: draft trees replayed along given text, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.learner import Draft, EvalSequence
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class Replay:
    """Per step along texts: drafted tokens that were right (the step commits one more, the bonus),
    and nodes of the tree."""

    accepted: list[int]
    nodes: list[int]

    @property
    def tau(self) -> float:
        """Mean tokens committed per step (paper's accepted length); 1 without a step."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))

    @classmethod
    def join(cls, replays: Iterable[Replay]) -> Replay:
        """All steps of several texts: each step counts the same, not each text."""
        whole = cls([], [])
        for part in replays:
            whole.accepted.extend(part.accepted)
            whole.nodes.extend(part.nodes)
        return whole


def replay(draft: Draft, sequence: EvalSequence, depth: int) -> Replay:
    """Draft along a text as serving would.

    The first step's root is the first token after the prompt. Every step accepts the longest
    path of its tree that the text follows, and the next root is the token after that.

    The text must be the target's own continuation, greedy or sampled: verification draws the
    target's token at every node, with the noise of the node's position, and so the text along the
    path that the text takes. The mean over sampled texts is the expected τ.

    Args:
        draft: called with ascending roots.
        depth: tokens of the longest path of any tree, the same for drafters that are compared. No
            step is taken where fewer than depth + 1 tokens follow the root: it could not be
            accepted in full.
    """
    result = Replay([], [])
    for _, tree, path in walk(draft, sequence, depth):
        result.accepted.append(len(path) - 1)
        result.nodes.append(int(tree.size[0]))
    return result


def walk(
    draft: Draft, sequence: EvalSequence, depth: int
) -> Iterator[tuple[int, DraftTree, list[int]]]:
    """The steps of `replay`: (root, tree, nodes of the accepted path from the root on)."""
    tokens, root = sequence.tokens.tolist(), sequence.prompt
    while root + depth + 1 < len(tokens):
        tree = draft(root)
        path = accepted_path(tree, tokens[root + 1 :])
        yield root, tree, path
        root += len(path)


def mean_tau(
    make_draft: Callable[[EvalSequence], Draft], sequences: Iterable[EvalSequence], depth: int
) -> tuple[float, int]:
    """τ over all steps along all texts, and how many steps that were. make_draft: a fresh draft
    along one text, such as `Learner.draft_along`. Raises `TrainError` without a step."""
    whole = Replay.join(replay(make_draft(sequence), sequence, depth) for sequence in sequences)
    check_steps(whole, depth)
    return whole.tau, len(whole.accepted)


def check_steps(whole: Replay, depth: int) -> None:
    """Raises `TrainError` where no step was taken."""
    if not whole.accepted:
        raise TrainError(
            f"No text is long enough to draft along: a step needs {depth + 2} tokens after the "
            "prompt; give more new tokens, or other prompts."
        )


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
