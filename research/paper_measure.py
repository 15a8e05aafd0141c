"""Drafters along the target's own answers: τ, α_k and α_{m,j}, by set and in the mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from main_path import MainPathFigures

from vllm_specblock.train.eval.chain import ChainFigures
from vllm_specblock.train.eval.loaded import LoadedDrafter
from vllm_specblock.train.eval.steps import Replay, steps_along
from vllm_specblock.train.learner import EvalSequence


@dataclass(frozen=True)
class SetFigures:
    """One drafter on one set.

    Attributes:
        tau: mean tokens committed per step; steps: their number.
        main_path: α_k of the served tree's main path.
        chain: along chains of whole blocks, from the roots of the same steps; None for a drafter
            without blocks.
    """

    tau: float
    steps: int
    main_path: MainPathFigures
    chain: ChainFigures | None

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["main_path"]["alpha"] = self.main_path.alpha
        if self.chain is not None:
            chain = self.chain
            found["chain"] = {"alpha_mj": chain.alpha_mj, "positions": chain.positions}
        return found


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
    """Return the mean of each column, over the entries that are known."""
    known = [[value for value in column if value is not None] for column in zip(*rows)]
    return [fmean(values) if values else None for values in known]


def measure(drafter: LoadedDrafter, sequences: Iterable[EvalSequence], depth: int) -> SetFigures:
    """Draft along the greedy texts of one set.

    Args:
        sequences: with the states of the drafter's layers; each is read once.
        depth: of the deepest tree of all compared drafters, so that all of them take steps at the
            same places of a text's end.
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
