"""Other weights twice in every step of a running engine: before a tree is drafted, and after.

Some are trained, some noise, some a hundred times too large, some of the heads alone; some hold
NaN, and have to be refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.refresh import HEADS, RefreshError, prepare, refresh, swap_in

Versions = Mapping[str, dict[str, torch.Tensor]]
WHOLE = ("trained", "trained on other texts", "noise", "too large")
NAN = "NaN"
TRAINED_SHARE = 0.7
"""Of the trees that trained weights draft, at least: of noise alone nothing would be accepted."""


def make_versions(trained: Path, other: Path) -> Versions:
    """Return weights by name; trained, other: folders of two SpecBlock drafters of one shape."""
    weights, draw = _weights(trained), torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(each.shape, generator=draw) * each.std() for name, each in weights.items()
    }
    return {
        "trained": weights,
        "trained on other texts": _weights(other),
        "noise": noise,
        "too large": {name: 100 * each for name, each in weights.items()},
        "noise in the heads": {
            name: each for name, each in noise.items() if name.startswith(HEADS)
        },
        NAN: weights | {"rank_head.2.weight": weights["rank_head.2.weight"] * float("nan")},
    }


class Swaps:
    """Refreshes the SpecBlock drafters `heads` of an engine around every step that proposes;
    count: swaps by version, of which those of NaN were refused."""

    def __init__(
        self, speculator: Any, versions: Versions, heads: Sequence[int] = (0,), seed: int = 0
    ) -> None:
        self.speculator, self.versions = speculator, versions
        self.drafters = [speculator.draft_policy.drafters[head] for head in heads]
        # Prepared once: hundreds of them are written.
        self.staged = [
            {name: prepare(each.model, versions[name]) for name in WHOLE} for each in self.drafters
        ]
        self.draw, self.count = random.Random(seed), Counter[str]()
        self._accepted_before = self._accepted()

    def around(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """A speculator's `propose` with a swap before and another behind it."""

        def swapping(*args: Any, **kwargs: Any) -> Any:
            self.swap("trained" if self.draw.random() < TRAINED_SHARE else None)
            tokens = propose(*args, **kwargs)
            self.swap()
            return tokens

        return swapping

    def swap(self, name: str | None = None) -> None:
        """Give one of the drafters a version; None: any."""
        which = self.draw.randrange(len(self.drafters))
        name = name or self.draw.choice(sorted(self.versions))
        self.count[name] += 1
        if name in WHOLE:
            swap_in(self.drafters[which].model, self.staged[which][name])
            return
        try:
            refresh(self.drafters[which].model, self.versions[name])
        except RefreshError:
            if name != NAN:
                raise
        else:
            assert name != NAN, "a drafter took weights that hold NaN"

    @property
    def accepted(self) -> int:
        """Tokens that were drafted since, by any weights, and accepted."""
        return self._accepted() - self._accepted_before

    def require(self, swaps: int, accepted: int) -> None:
        assert self.count.keys() == self.versions.keys(), f"not all versions: {self.count}"
        assert self.count.total() >= swaps, f"{self.count.total()} swaps, not {swaps}"
        assert self.accepted >= accepted, f"{self.accepted} drafts accepted, not {accepted}"

    def _accepted(self) -> int:
        counts = self.speculator.counters.as_dict()
        return sum(n for (name, _), n in counts.items() if name == "accepted_nodes")


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    weights = checkpoint.load(directory, torch.float32).named_parameters()
    return {name: each.detach() for name, each in weights}
