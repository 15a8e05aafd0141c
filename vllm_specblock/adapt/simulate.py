"""A served stream without an engine: the real updates, judge and policy, τ by replay.

The text does not depend on the drafter, so the target writes every text once, and each policy is
held against the same ones. Time is what a cost model says: no clock is read, and the same seed
gives the same result.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_specblock.adapt.actions import held, put, trains
from vllm_specblock.adapt.book import Book
from vllm_specblock.adapt.evidence import FallDetector
from vllm_specblock.adapt.judge import Judge
from vllm_specblock.adapt.lessons import RecordTeacher, batches, record_of
from vllm_specblock.adapt.policy import EVERY, Action, FinishedRequest, Policy
from vllm_specblock.adapt.pool import Pool, Version
from vllm_specblock.adapt.streams import Stream
from vllm_specblock.adapt.update import UpdateConfig, Updater
from vllm_specblock.draft.expand import Shape
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.draft.sharpness import Sharpness
from vllm_specblock.train.judge.drafting import SpecBlockDraft, serving_shape
from vllm_specblock.train.judge.replay import Replay, replay
from vllm_specblock.train.judge.steps import Step, steps_along
from vllm_specblock.train.learner import Script


@dataclass(frozen=True)
class CostModel:
    """Seconds that serving spends.

    Attributes:
        step: of a target step with its drafts.
        update: that one update of each arm takes from serving.
        swap: of the copy of a new version over the serving weights, by arm.
    """

    step: float = 0.025
    update: dict[Action, float] = field(
        default_factory=lambda: {Action.HEADS: 0.1, Action.FULL: 0.2}
    )
    swap: dict[Action, float] = field(
        default_factory=lambda: {Action.HEADS: 0.0003, Action.FULL: 0.0014}
    )

    @classmethod
    def of(
        cls,
        step: float,
        update: tuple[float, float],
        swap: tuple[float, float] = (0.0003, 0.0014),
    ) -> CostModel:
        """Pairs are of heads and full."""
        arms = (Action.HEADS, Action.FULL)
        return cls(step, dict(zip(arms, update)), dict(zip(arms, swap)))


@dataclass(frozen=True)
class SimulationConfig:
    """What all policies share.

    Attributes:
        cost: see `CostModel`.
        update: how updates learn.
        memory: of the book, MiB.
        batch: records of a batch, half of them new.
        rehearsal: the other half is from the reservoir; False: there is no other half.
        nodes: budget of the trees; 0: serving's own.
        seed: of the book's samples and the batches' choices.
    """

    cost: CostModel = field(default_factory=CostModel)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    memory: float = 512
    batch: int = 8
    rehearsal: bool = True
    nodes: int = 0
    seed: int = 0


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
        held_out: τ on texts of no stream in the end, by domain.
    """

    served: list[Served]
    updates: dict[str, int]
    swaps: int
    refused: int
    returns: list[int]
    books: dict[str, int]
    held_out: list[float]


class Simulation:
    """One policy over one stream.

    Args:
        drafter: θ_0, float32; it is copied.
        teacher: the target's embedding and head rows, for the lessons.
        policy: see `Policy`.
        config: see there.
    """

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        teacher: RecordTeacher,
        policy: Policy,
        config: SimulationConfig | None = None,
    ):
        self.policy, self.teacher, self.config = policy, teacher, config or SimulationConfig()
        self.serving = copy.deepcopy(drafter).requires_grad_(False)
        self.updater = Updater(copy.deepcopy(drafter), self.config.update)
        self.shape = _shape(drafter, self.config.nodes)
        self.sharpness = Sharpness(drafter.lm_head.weight.device, num_slots=1)
        self.book = Book(self.config.memory, seed=self.config.seed)
        origin = Version(0, held(self.serving, Action.FULL))
        self.pool, self.served, self.training = Pool(origin), origin, origin
        self.judge = Judge(drafter, teacher)
        self.falls = FallDetector()
        self.updates: Counter[str] = Counter()
        self.swaps = self.refused = self.count = 0
        self.stall = 0.0  # seconds of training and swaps that the next request waits for

    def serve(self, phase: str, script: Script) -> Served | None:
        """Serve one text, then let the policy act on it; None where it is too short for a step."""
        steps = list(steps_along(self._draft(script), script, self.shape.max_depth))
        if not steps:
            return None
        tokens = sum(1 + step.accepted_length for step in steps)
        stall, self.stall = self.stall, 0.0
        seconds = stall + self.config.cost.step * len(steps)
        served = Served(phase, len(steps), tokens, seconds, stall, self.pool.current.number)
        request = FinishedRequest(misses_of(steps), len(steps), tokens, seconds)
        if self.policy.records:
            self._record(script, request)
        # Not begun anew with every version: they come sooner than it learns mean and spread.
        if self.falls.add(request.tau):
            self._fell()
        self._act(request)
        return served

    def tau(self, scripts: Sequence[Script]) -> float:
        """τ of the serving drafter over some texts; nothing is learned of them."""
        depth = self.shape.max_depth
        before = copy.deepcopy(self.sharpness)
        found = Replay.join(replay(self._draft(script), script, depth) for script in scripts)
        self.sharpness = before
        return found.tau

    def _draft(self, script: Script) -> SpecBlockDraft:
        return SpecBlockDraft(self.serving, script, self.shape, self.sharpness)

    def _record(self, script: Script, request: FinishedRequest) -> None:
        self.count += 1
        record = record_of(
            f"request {self.count}", script, request.misses, request.steps, request.tokens
        )
        # Judged before anything is trained on it.
        if self.book.add(record) and self.policy.gated:
            back = self.pool.judge(self.judge.depths(self.pool.kept, record))
            if back is not None:
                self._follow(back)

    def _fell(self) -> None:
        self.falls.reset()
        self.policy.alarm()
        if self.policy.gated and (back := self.pool.roll_back()):
            self._follow(back)

    def _act(self, request: FinishedRequest) -> None:
        decision = self.policy.decide(request)
        if decision.good:
            self.pool.call_good()
        if decision.roll_back and (back := self.pool.roll_back()):
            self._follow(back)
        if decision.update:
            self._update(decision.push)

    def _update(self, action: Action) -> None:
        config, before = self.config, self.training
        found = batches(self.book, EVERY, config.batch, config.rehearsal)
        if not found:
            return
        steps = self.updater.steps
        lessons = [
            self.teacher.lesson(records, steps + number, config.seed * 1_000_003 + steps + number)
            for number, records in enumerate(found)
        ]
        report = self.updater.update(action, lessons)
        self.updates[action] += 1
        lost = config.cost.update[action]
        if report.losses:
            number = sum(self.updates.values())
            tensors = held(self.updater.drafter, action, before.tensors)
            self.training = Version(number, tensors, action, before.number)
        if self._is_better():
            self.pool.offer(self.training)
            lost += self._swap(self.training)
        elif report.losses:
            self.refused += 1
        gain = 0.0
        if self.policy.gated and report.losses:
            gain = self.judge.gain(self.training, before, self.book)
        self.policy.reward(action, 0.0 if gain != gain else gain, lost)
        self.stall += lost

    def _is_better(self) -> bool:
        if self.training is self.pool.current:
            return False
        if not self.policy.gated:
            return True
        return self.judge.difference(self.training, self.pool.current, self.book) > 0

    def _follow(self, version: Version) -> None:
        """An earlier version serves again, and training goes on from it."""
        self.stall += self._swap(version)
        put(self.updater.drafter, version.tensors)
        self.updater.forget()
        self.training = version

    def _swap(self, version: Version) -> float:
        """Seconds of the copy: of all weights, unless the trunk is the one that served."""
        before, self.served = self.served, version
        put(self.serving, version.tensors)
        self.swaps += 1
        same_trunk = all(
            tensor is before.tensors[name] or trains(Action.HEADS, name)
            for name, tensor in version.tensors.items()
        )
        return self.config.cost.swap[Action.HEADS if same_trunk else Action.FULL]


def simulate(
    simulation: Simulation,
    stream: Stream,
    texts: Sequence[Sequence[Script]],
    held_out: Sequence[Sequence[Script]] = (),
    progress: Callable[[], None] = lambda: None,
) -> Simulated:
    """Serve a stream.

    Args:
        simulation: at its beginning.
        texts: by domain.
        held_out: by domain, texts of no stream.
        progress: called after every request.
    """
    served = []
    for place in stream:
        served.append(simulation.serve(place.phase, texts[place.domain][place.text]))
        progress()
    return Simulated(
        [each for each in served if each is not None],
        dict(sorted(simulation.updates.items())),
        simulation.swaps,
        simulation.refused,
        simulation.pool.returns,
        dict(sorted(simulation.book.counts.items())),
        [simulation.tau(scripts) for scripts in held_out],
    )


def misses_of(steps: Sequence[Step]) -> float:
    """s of eq. 8 as the device counts it, with r = 0: a step is a miss where its path ends at a
    node that has a child. Where it ends at a leaf nothing was rejected."""
    return float(sum(step.accepted[-1] in step.parent for step in steps))


def _shape(drafter: SpecBlockDrafter, nodes: int) -> Shape:
    return serving_shape(drafter, nodes=nodes) if nodes else serving_shape(drafter)
