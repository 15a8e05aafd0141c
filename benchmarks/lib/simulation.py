"""A served stream without an engine: the real updates, judge and policy, τ by replay.

The text does not depend on the drafter, so the target writes every text once, and each policy is
held against the same ones. Time is what a cost model says: no clock is read, and the same seed
gives the same result.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from lib.streams import Stream
from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS, ROWS, RecordTeacher
from vllm_specblock.adapt.learning.update import AdaptationConfig
from vllm_specblock.adapt.policy.actions import put, trains
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest, Policy
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.drafting import ServedDraft, draft_trees, serving_shape
from vllm_specblock.train.eval.steps import Step, steps_along
from vllm_specblock.train.learner import EvalSequence


@dataclass(frozen=True)
class CostModel:
    """Seconds that serving spends: of heads, and of all weights.

    Attributes:
        step: of a target step with its drafts.
        update: that one update takes from serving.
        swap: of the copy of a new version over the serving weights.
    """

    step: float = 0.025
    update: tuple[float, float] = (0.1, 0.2)
    swap: tuple[float, float] = (0.0003, 0.0014)


@dataclass(frozen=True)
class SimulationConfig(AdaptationConfig):
    """What all policies share.

    Attributes:
        cost: see `CostModel`.
        nodes: budget of the trees; 0: serving's own.
    """

    cost: CostModel = field(default_factory=CostModel)
    nodes: int = 0


@dataclass(frozen=True)
class Served:
    """One request of a simulated stream.

    Attributes:
        phase: of the stream.
        steps, tokens: target steps, and tokens committed in them.
        seconds: by the cost model, with what training took before it.
        training: that share of `seconds`.
        version: number of the version that served.
    """

    phase: str
    steps: int
    tokens: int
    seconds: float
    training: float
    version: int


@dataclass(frozen=True)
class Simulated:
    """What one policy made of a stream.

    Attributes:
        served: every request, in order.
        updates: by arm.
        swaps: versions that came to serve, returns included.
        refused: versions that were offered and not found better.
        returns: numbers of the versions gone back to.
        books: what became of the records, by `Book.counts`.
    """

    served: list[Served]
    updates: dict[str, int]
    swaps: int
    refused: int
    returns: list[int]
    books: dict[str, int]


class Simulation:
    """One policy over one stream: what a trainer does, and serving by replay.

    Args:
        drafter: θ_0, float32; it is copied.
        teacher: the target's embedding and head rows, for the batches.
        policy: see `Policy`.
        config: see there.
    """

    def __init__(
        self,
        drafter: SpecBlockModel,
        teacher: RecordTeacher,
        policy: Policy,
        config: SimulationConfig | None = None,
    ) -> None:
        config = config or SimulationConfig()
        self.shape = _shape(drafter, config.nodes)
        # As an engine does: what is served is what is learned.
        recipe = replace(config.recipe, num_blocks=self.shape.num_blocks)
        config = replace(config, recipe=recipe)
        self.policy, self.config = policy, config
        self.adaptation = Adaptation(
            drafter, teacher, policy, self.config, self._note, self._seconds_lost
        )
        self.pool, self.updater = self.adaptation.pool, self.adaptation.updater
        self.serving = copy.deepcopy(drafter).requires_grad_(False)
        self.served = self.pool.origin
        self.calibration = DraftCalibration(drafter.lm_head.weight.device, num_slots=1)
        self.noted: Counter[str] = Counter()
        self.swaps = self.count = 0
        self.stall = 0.0  # seconds of training and swaps that the next request waits for

    def serve(self, phase: str, sequence: EvalSequence) -> Served | None:
        """Serve one text, then let the policy act on it; None where it is too short for a step."""
        steps = list(steps_along(self._draft(sequence), sequence, self.shape.max_depth))
        if not steps:
            return None
        tokens = sum(1 + step.accepted_length for step in steps)
        stall, self.stall = self.stall, 0.0
        seconds = stall + self.config.cost.step * len(steps)
        served = Served(phase, len(steps), tokens, seconds, stall, self.pool.current.number)
        request = FinishedRequest(misses_of(steps), len(steps), tokens, seconds)
        record = self._record(sequence, request)
        self.adaptation.finish(record, request)
        if self.pool.current is not self.served:  # without an update: one that was refused before
            self.stall += self._swap()
        return served

    def _draft(self, sequence: EvalSequence) -> ServedDraft:
        return draft_trees(self.serving, sequence, self.shape, self.calibration)

    def _record(self, sequence: EvalSequence, request: FinishedRequest) -> Record:
        self.count += 1
        name = f"request {self.count}"
        return record_of(name, sequence, request.tau)

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
) -> Simulated:
    """Serve a stream.

    Args:
        simulation: at its beginning.
        texts: by domain.
        progress: called after every request.
    """
    served = []
    for place in stream:
        served.append(simulation.serve(place.phase, texts[place.domain][place.text]))
        progress()
    return Simulated(
        [each for each in served if each is not None],
        {
            str(action): simulation.noted[f"updates_{action}"]
            for action in sorted(Action)
            if simulation.noted[f"updates_{action}"]
        },
        simulation.swaps,
        simulation.noted["versions_refused_not_better"],
        simulation.pool.returns,
        dict(sorted(simulation.adaptation.book.counts.items())),
    )


def misses_of(steps: Sequence[Step]) -> float:
    """s of eq. 8 as the device counts it, with r = 0: a step is a miss where its path ends at a
    node that has a child. Where it ends at a leaf nothing was rejected."""
    return float(sum(step.accepted[-1] in step.parent for step in steps))


def _shape(drafter: SpecBlockModel, nodes: int) -> TreeShape:
    return serving_shape(drafter, nodes=nodes) if nodes else serving_shape(drafter)


def record_of(request: str, sequence: EvalSequence, tau: float = 0.0) -> Record:
    """The record that serving would leave of a text: up to `PROMPT_ROWS` of its prompt's end, then
    its answer, `ROWS` in all.

    Args:
        request: id.
        sequence: of at least two tokens.
        tau: see `Record`.
    """
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
