"""α_k along the main path of the served tree (SpecBlock, appendix C and figure 5a).

The chain of figure 5a has no fixed block boundary: it is the drafter's greedy token at every
position of the served tree, not a chain of whole blocks (`chain.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_specblock.train.eval.steps import Step


def main_path(step: Step) -> list[int]:
    """Nodes below the root that follow the drafter's greedy token, to the tree's end."""
    path, here = [], 0
    # Nodes stand in descending order of score, so a node's first child is its best.
    for node in range(1, len(step.parent)):
        if step.parent[node] == here:
            path.append(node)
            here = node
    return path


@dataclass(frozen=True)
class MainPathFigures:
    """Counts over steps, position k of the main path in entry k − 1.

    Attributes:
        reached: main paths that have a token there, all tokens before being the target's.
        hits: how many of those tokens are the target's.
        ended: main paths that end just before it, with all tokens the target's: neither a hit
            nor a miss.
        forward: of the tokens in `reached`, how many each drafter forward proposed.
    """

    reached: list[int]
    hits: list[int]
    ended: list[int]
    forward: list[dict[int, int]]

    @property
    def alpha(self) -> list[float | None]:
        """α_k, the share of `hits` in `reached`; None where nothing was reached."""
        return [hit / count if count else None for hit, count in zip(self.hits, self.reached)]

    @classmethod
    def of(cls, steps: Iterable[Step], depth: int) -> MainPathFigures:
        """Count over `steps`, none of them cut short by the text's end; `depth`: tokens of the
        longest path of any tree, K·M for SpecBlock."""
        reached, hits, ended = ([0] * depth for _ in range(3))
        forward: list[Counter[int]] = [Counter() for _ in range(depth)]
        for step in steps:
            right, path = set(step.accepted), main_path(step)
            for k, node in enumerate(path):
                reached[k] += 1
                forward[k][step.forward[node]] += 1
                # No two nodes of a tree are of equal text: those on the way that the text takes
                # are the accepted ones.
                if node not in right:
                    break
                hits[k] += 1
            else:
                if len(path) < depth:
                    ended[len(path)] += 1
        return cls(reached, hits, ended, [dict(sorted(counts.items())) for counts in forward])
