"""Offline τ: draft trees replayed along given text.

Whatever drafts, the procedure is the same: the text is the target's own, and a step follows it
down the tree. Nothing here is quick: one text at a time, one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.learner import Draft, EvalSequence
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class Replay:
    """What the steps along one text, or along several, gave.

    accepted: per step, drafted tokens that were right. The step commits one more, the bonus.
    nodes: per step, nodes of the tree.
    """

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

    The text must be the target's own continuation, greedy or sampled. Greedy, this is what
    verification at temperature 0 does. Sampled, it is what verification does at that
    temperature: it draws the target's token at every node, with the noise of the node's
    position, and walks to the child of that token. The nodes that it walks through have the text
    as their prefix, and there it draws what the text goes on with. So the path that it accepts
    is the longest one that matches the text, and the mean over sampled texts is the expected τ.

    Args:
        draft: what drafts; called with ascending roots.
        sequence: the text.
        depth: tokens of the longest path of any tree. No step is taken where fewer than
            depth + 1 tokens follow the root: it could not be accepted in full, and would count
            as a failure. Give drafters that are compared the same depth.
    """
    tokens, root = sequence.tokens.tolist(), sequence.prompt
    result = Replay([], [])
    while root + depth + 1 < len(tokens):
        tree = draft(root)
        result.accepted.append(follow(tree, tokens[root + 1 :]))
        result.nodes.append(int(tree.size[0]))
        root += result.accepted[-1] + 1
    return result


def mean_tau(
    make_draft: Callable[[EvalSequence], Draft], sequences: Iterable[EvalSequence], depth: int
) -> tuple[float, int]:
    """τ over all steps along all texts, and how many steps that were.

    Args:
        make_draft: a fresh draft along one text, such as `Learner.draft_along`.
        sequences, depth: see `replay`.

    Raises:
        TrainError: no text is long enough for a step.
    """
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
    """The longest path of a tree (R = 1) whose tokens are the first of `wanted`.

    Returns:
        its nodes from the root (0) on.
    """
    size = int(tree.size[0])
    reached = {0: [0]}  # node -> its path, of those that the text follows
    links = zip(tree.parent[0, :size].tolist(), tree.token[0, :size].tolist())
    for node, (parent, token) in enumerate(links, start=1):
        path = reached.get(parent)
        if path and len(path) <= len(wanted) and token == wanted[len(path) - 1]:
            reached[node] = [*path, node]
    return max(reached.values(), key=len)


def follow(tree: DraftTree, wanted: list[int]) -> int:
    """How many of the `wanted` tokens lie on one path from the root of a tree (R = 1)."""
    return len(accepted_path(tree, wanted)) - 1
