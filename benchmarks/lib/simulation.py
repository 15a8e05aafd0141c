"""A served stream without an engine: the real updates, judge and policy, τ by replay.

The text does not depend on the drafter, so the target writes every text once, and each policy is
held against the same ones. Time is what a cost model says: no clock is read, and the same seed
gives the same result.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from lib.results_store import markdown_table
from lib.streams import Stream
from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS, ROWS, RecordTeacher
from vllm_specblock.adapt.learning.update import AdaptationConfig
from vllm_specblock.adapt.policy.actions import put, trains
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest, Policy
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.eval.steps import steps_along
from vllm_specblock.train.learner import EvalSequence

WINDOW = 64
"""Requests that a point of τ over the stream is taken over."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step; those that an update and the copy of a version take from serving, of the
    heads and of all weights."""

    step: float = 0.025
    update: tuple[float, float] = (0.1, 0.2)
    swap: tuple[float, float] = (0.0003, 0.0014)


@dataclass(frozen=True)
class SimulationConfig(AdaptationConfig):
    """What all policies share; nodes: budget of the trees, 0: serving's own."""

    cost: CostModel = field(default_factory=CostModel)
    nodes: int = 0


@dataclass(frozen=True)
class Served:
    """One request of a simulated stream.

    Attributes:
        seconds: by the cost model, with `training`, what training took before it.
        version: number of the version that served.
    """

    phase: str
    steps: int
    tokens: int
    seconds: float
    training: float
    version: int


class Simulation:
    """One policy over one stream: what a trainer does, and serving by replay.

    Args:
        drafter: θ_0, float32; it is copied.
        teacher: the target's embedding and head rows, for the batches.

    Attributes:
        requests: those that were served.
        noted: what the adaptation counted.
        swaps: versions that came to serve, returns included.
        books: what became of the records, by `Book.counts`.
    """

    def __init__(
        self,
        drafter: SpecBlockModel,
        teacher: RecordTeacher,
        policy: Policy,
        config: SimulationConfig | None = None,
    ) -> None:
        config = config or SimulationConfig()
        nodes = {"nodes": config.nodes} if config.nodes else {}
        self.shape = serving_shape(drafter, **nodes)
        # As an engine does: what is served is what is learned.
        self.config = replace(config, num_blocks=self.shape.num_blocks)
        self.adaptation = Adaptation(
            drafter, teacher, policy, self.config, self._note, self._seconds_lost
        )
        self.pool = self.adaptation.pool
        self.serving = copy.deepcopy(drafter).requires_grad_(False)
        self.served = self.pool.origin
        self.calibration = DraftCalibration(drafter.lm_head.weight.device, num_slots=1)
        self.noted: Counter[str] = Counter()
        self.requests: list[Served] = []
        self.books = self.adaptation.book.counts
        self.swaps = 0
        self.stall = 0.0  # seconds of training and swaps that the next request waits for

    @property
    def updates(self) -> dict[str, int]:
        """By arm, of those that were drawn."""
        counts = {str(action): self.noted[f"updates_{action}"] for action in sorted(Action)}
        return {arm: count for arm, count in counts.items() if count}

    @property
    def refused(self) -> int:
        """Versions that were offered and not found better."""
        return self.noted["versions_refused_not_better"]

    def serve(self, phase: str, sequence: EvalSequence) -> None:
        """Serve one text, then let the policy act on it; skip one that is too short for a step."""
        draft = draft_trees(self.serving, sequence, self.shape, self.calibration)
        steps = list(steps_along(draft, sequence, self.shape.max_depth))
        if not steps:
            return
        tokens = sum(1 + step.accepted_length for step in steps)
        stall, self.stall = self.stall, 0.0
        seconds = stall + self.config.cost.step * len(steps)
        served = Served(phase, len(steps), tokens, seconds, stall, self.pool.current.number)
        # s of eq. 8 as the device counts it, with r = 0: a step is a miss where its path ends at a
        # node that has a child. Where it ends at a leaf nothing was rejected.
        misses = float(sum(step.accepted[-1] in step.parent for step in steps))
        request = FinishedRequest(misses, len(steps), tokens, seconds)
        self.requests.append(served)
        name = f"request {len(self.requests)}"
        self.adaptation.finish(record_of(name, sequence, request.tau), request)
        if self.pool.current is not self.served:  # without an update: one that was refused before
            self.stall += self._swap()

    def _note(self, name: str, by: int) -> None:
        """What the adaptation counts; an earlier version that comes back is a swap."""
        self.noted[name] += by
        if name == "rollbacks":
            self.stall += self._swap()

    def _seconds_lost(self, action: Action, _: float) -> float:
        lost = self.config.cost.update[action == Action.FULL]
        if self.pool.current is not self.served:
            lost += self._swap()
        self.stall += lost
        return lost

    def _swap(self) -> float:
        """Seconds of the copy: of all weights, unless the trunk is the one that served."""
        before, self.served = self.served, self.pool.current
        put(self.serving, self.served.tensors)
        self.swaps += 1
        # A version shares the tensors that it has in common with its parent.
        whole = any(
            tensor is not before.tensors[name] and not trains(Action.HEADS, name)
            for name, tensor in self.served.tensors.items()
        )
        return self.config.cost.swap[whole]


def simulate(
    simulation: Simulation,
    stream: Stream,
    texts: Sequence[Sequence[EvalSequence]],
    progress: Callable[[], object] = lambda: None,
) -> Simulation:
    """Serve a stream; texts: by domain; progress: called after every request."""
    for place in stream:
        simulation.serve(place.phase, texts[place.domain][place.text])
        progress()
    return simulation


def record_of(request: str, sequence: EvalSequence, tau: float = 0.0) -> Record:
    """The record that serving would leave of a text of at least two tokens: up to `PROMPT_ROWS` of
    its prompt's end, then its answer, `ROWS` in all."""
    begin = max(0, sequence.prompt - PROMPT_ROWS)
    end = min(begin + ROWS, len(sequence.tokens) - 1)
    number = torch.arange(begin, end) + 1  # of the token that each row predicts from
    return Record(
        request,
        sequence.hidden[begin:end],
        sequence.last[begin:end],
        sequence.tokens[begin + 1 : end + 1],
        number >= sequence.prompt,
        tau,
    )


def tau_of(served: Sequence[Served]) -> float | None:
    """Tokens per step over some requests; None over none."""
    steps = sum(each.steps for each in served)
    return sum(each.tokens for each in served) / steps if steps else None


def figures(found: Simulation) -> dict[str, Any]:
    """Return the figures of one policy on one stream."""
    served, phases = found.requests, dict.fromkeys(each.phase for each in found.requests)
    of = {phase: [each for each in served if each.phase == phase] for phase in phases}
    seconds = sum(each.seconds for each in served)
    return {
        "requests": len(served),
        "tau": tau_of(served),
        "tau_by_phase": {phase: tau_of(each) for phase, each in of.items()},
        "tau_of_last_quarter": {
            phase: tau_of(each[-max(1, len(each) // 4) :]) for phase, each in of.items()
        },
        "tau_by_window": [tau_of(served[n : n + WINDOW]) for n in range(0, len(served), WINDOW)],
        "tokens_per_second": sum(each.tokens for each in served) / seconds,
        "training_share": sum(each.training for each in served) / seconds,
        "updates": found.updates,
        "swaps": found.swaps,
        "refused": found.refused,
        "returns": found.pool.returns,
        "records": dict(sorted(found.books.items())),
    }


def table(results: Mapping[str, dict[str, Any]]) -> str:
    """Return a row per stream and policy: means over the seeds, and for tokens/s their range.

    Args:
        results: figures by "STREAM, seed N: POLICY".
    """
    rows = [["stream", "policy", "τ", "by phase (last quarter)", "tokens/s", "× frozen"]]
    rows[0] += ["training", "updates (heads, full)", "swaps", "refused", "returns"]
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, found in results.items():
        place, _, policy = key.partition(": ")
        stream, _, seed = place.partition(", seed ")
        cells.setdefault((stream, policy), {})[seed] = found
    for (stream, policy), seeds in cells.items():
        frozen, found = cells.get((stream, "frozen"), {}), list(seeds.values())
        speeds = {seed: each["tokens_per_second"] for seed, each in seeds.items()}
        times = [speeds[n] / frozen[n]["tokens_per_second"] for n in speeds if n in frozen]

        def mean(*names: str, found: list[dict[str, Any]] = found) -> float:
            values = found
            for name in names:
                values = [each.get(name, 0) for each in values]
            return fmean(len(each) if isinstance(each, list) else each for each in values)

        phases = [
            f"{phase} {mean('tau_by_phase', phase):.2f} ({mean('tau_of_last_quarter', phase):.2f})"
            for phase in found[0]["tau_by_phase"]
        ]
        least, most = min(speeds.values()), max(speeds.values())
        rows.append(
            [
                *(stream, policy, f"{mean('tau'):.3f}", ", ".join(phases)),
                f"{fmean(speeds.values()):.1f} ({least:.1f} – {most:.1f})",
                f"{fmean(times):.3f}" if times else "–",
                f"{100 * mean('training_share'):.1f} %",
                ", ".join(f"{mean('updates', arm):.1f}" for arm in ("heads", "full")),
                *(f"{mean(name):.1f}" for name in ("swaps", "refused", "returns")),
            ]
        )
    return markdown_table(rows)
