"""Drafters along the target's own answers: τ, α_k and α_{m,j}, by set and in the mean.

α_k is taken along the main path of the served tree (SpecBlock, appendix C and figure 5a), the
drafter's greedy token at every position. It has no fixed block boundary, as a chain of whole blocks
(`chain.py`) has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from vllm_specblock.train.eval.chain import ChainFigures
from vllm_specblock.train.eval.loaded import LoadedDrafter
from vllm_specblock.train.eval.steps import Replay, Step, steps_along
from vllm_specblock.train.learner import EvalSequence


def main_path(step: Step) -> list[int]:
    """Return the nodes below the root that follow the drafter's greedy token."""
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
        reached: main paths with a token there, all tokens before being the target's.
        hits: of those tokens, the target's.
    """

    reached: list[int]
    hits: list[int]

    @property
    def alpha(self) -> list[float | None]:
        """α_k, the share of `hits` in `reached`; None where nothing was reached."""
        return [hit / count if count else None for hit, count in zip(self.hits, self.reached)]

    @classmethod
    def of(cls, steps: Iterable[Step], depth: int) -> MainPathFigures:
        """Count over `steps`, none cut short by the text's end; depth: of the deepest tree."""
        reached, hits = [0] * depth, [0] * depth
        for step in steps:
            for k, node in enumerate(main_path(step)):
                reached[k] += 1
                if node not in step.accepted:
                    break
                hits[k] += 1
        return cls(reached, hits)


@dataclass(frozen=True)
class SetFigures:
    """One drafter on one set; chain: of whole blocks, from the same roots, None without blocks."""

    tau: float
    steps: int
    main_path: MainPathFigures
    chain: ChainFigures | None

    def as_json(self) -> dict[str, Any]:
        path, chain = self.main_path, self.chain
        return {
            "tau": self.tau,
            "steps": self.steps,
            "main_path": vars(path) | {"alpha": path.alpha},
            "chain": chain and {"alpha_mj": chain.alpha_mj, "positions": chain.positions},
        }


@dataclass(frozen=True)
class DrafterFigures:
    """One drafter on all sets; means weigh every set the same, as the paper's do."""

    sets: dict[str, SetFigures]

    @property
    def alpha(self) -> list[float | None]:
        """α_k, figure 5a."""
        return _means(figures.main_path.alpha for figures in self.sets.values())

    @property
    def alpha_mj(self) -> list[list[float | None]] | None:
        """[M][K], figure 5b; None for a drafter without blocks."""
        chains = [figures.chain.alpha_mj for figures in self.sets.values() if figures.chain]
        return [_means(blocks) for blocks in zip(*chains)] if chains else None

    def as_json(self) -> dict[str, Any]:
        return {
            "tau": fmean(figures.tau for figures in self.sets.values()),
            "alpha": self.alpha,
            "alpha_mj": self.alpha_mj,
            "sets": {name: figures.as_json() for name, figures in self.sets.items()},
        }


def _means(rows: Iterable[list[float | None]]) -> list[float | None]:
    known = [[value for value in column if value is not None] for column in zip(*rows)]
    return [fmean(values) if values else None for values in known]


def measure(drafter: LoadedDrafter, sequences: Iterable[EvalSequence], depth: int) -> SetFigures:
    """Draft along the greedy texts of one set.

    depth: of the deepest tree of all compared drafters: all end at the same place of a text.
    """
    steps, chains = [], []
    for sequence in sequences:
        found = list(steps_along(drafter.along(sequence), sequence, depth))
        steps += found
        if found and drafter.chain is not None:
            chain = drafter.chain(sequence)
            roots = torch.tensor([step.root for step in found]) - sequence.prompt
            chains.append(chain.of_roots(roots.to(chain.seen.device)))
    whole = Replay([step.accepted_length for step in steps], [step.nodes for step in steps])
    whole.check(depth)
    return SetFigures(
        whole.tau,
        len(steps),
        MainPathFigures.of(steps, drafter.depth),
        ChainFigures.of(chains, drafter.block_size) if chains else None,
    )
