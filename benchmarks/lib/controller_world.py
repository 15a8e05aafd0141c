"""A made-up server for the controller: what a step takes, and which nodes are accepted.

Everything random is drawn by the number of the step, so all policies meet the same load and text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Step(NamedTuple):
    """What the controller is to know of a step."""

    requests: int
    rows: int
    trees: bool
    drafted: bool
    tokens: int
    seconds: float
    draft_seconds: float


class Machine(NamedTuple):
    """Times in milliseconds of one target and drafter; `rows` and `step` are points of a line."""

    rows: tuple[int, ...]
    step: tuple[float, ...]
    per_request: float
    per_context: float  # of a request, per 1,000 tokens
    overhead: float  # of a step with trees
    draft: tuple[float, float]  # alone, and per request
    nodes: int
    costly: bool  # the drafter has weights

    def step_ms(self, rows: Any, requests: Any, context: Any = 300, slope: Any = 1.0) -> Any:
        """Return the time of a target step; slope: factor on what further rows cost."""
        beyond = (self.step[-1] - self.step[-2]) / (self.rows[-1] - self.rows[-2])
        ms = np.interp(rows, self.rows, self.step)
        ms = ms + beyond * np.maximum(np.subtract(rows, self.rows[-1]), 0)
        attention = requests * (self.per_request + self.per_context * context / 1000)
        return self.step[0] + slope * (ms - self.step[0]) + attention

    def draft_ms(self, requests: Any) -> Any:
        return self.draft[0] + self.draft[1] * requests


_CPU = ((1, 8, 13, 26, 52), (10.05, 12.2, 14.4, 18.5, 29.7), 0.05, 0.15, 0.4)
_AMX = ((1, 16, 17, 32, 33, 48, 49, 64), (8.0, 8.4, 9.3, 9.6, 10.8, 11.2, 12.4, 12.8))
_GPU = ((1, 64, 128, 256), (6.0, 6.2, 8.5, 14.0), 0.005, 0.01, 0.25)

MACHINES = {
    "CPU, n-gram": Machine(*_CPU, draft=(0.2, 0.01), nodes=12, costly=False),
    "CPU, SpecBlock": Machine(*_CPU, draft=(3.0, 0.2), nodes=12, costly=True),
    "AMX, SpecBlock": Machine(*_AMX, 0.05, 0.1, 0.4, draft=(2.5, 0.1), nodes=12, costly=True),
    "GPU, n-gram": Machine(*_GPU, draft=(0.15, 0.0), nodes=24, costly=False),
    "GPU, SpecBlock": Machine(*_GPU, draft=(1.2, 0.01), nodes=24, costly=True),
}

TEXTS = {"good": (0.3, 0.65), "sampled": (0.12, 0.4), "bad": (0.03, 0.15), "random": (0.0, 0.01)}
"""Share of requests with an n-gram match; survival of SpecBlock's likeliest node."""

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6)
FIXED_NODES = (1, 2, 4, 8, 12, 16, 24)


class Phase(NamedTuple):
    steps: int
    requests: int = 4
    text: str | float = "good"
    load: tuple[float, float] = (1.0, 1.0)  # factor on all times, first and last step
    slope: float = 1.0
    context: tuple[float, float] = (300.0, 300.0)


class Trace(NamedTuple):
    """Phases of a server's life.

    noise: σ of the log of a step's time.
    bursts: share of steps that take three times as long, a few to 60 in a row.
    startup: start-up figures are off by up to this factor, some of them.
    bias: estimated over true survival, also once calibrated.
    gain: set the text so that the best fixed choice is this much faster than plain.
    """

    phases: tuple[Phase, ...]
    noise: float = 0.05
    bursts: float = 0.0
    startup: float = 1.2
    bias: float = 1.0
    gain: float | None = None


def traces(length: int = 3000) -> dict[str, Trace]:
    """Return the traces by name; length: steps of a phase."""

    def phases(*changes: dict[str, Any]) -> tuple[Phase, ...]:
        return tuple(Phase(**{"steps": length} | change) for change in changes)

    burst = {"steps": 40, "load": (3.0, 3.0)}
    walk = [{"steps": max(length // 8, 64), "requests": n} for n in range(16, 0, -1)]
    busy = {"load": (2.5, 2.5), "slope": 1.6}
    found = {f"quiet, batch {n}": Trace(phases({"requests": n})) for n in (1, 4, 8, 16)}
    return found | {
        "noise of factor 3": Trace(phases({}, {"requests": 1}), noise=0.1, bursts=0.2),
        "bursts": Trace(phases(*([{}, burst] * 3), {}, burst, {"requests": 1}, burst, {})),
        "wrong start-up figures": Trace(phases({"requests": 1}, {}), startup=100.0),
        "start under load": Trace(
            phases({"steps": 200, "load": (4.0, 2.0)}, {"requests": 1}), startup=100.0, noise=0.2
        ),
        "batch 1, 16, 1": Trace(phases({"requests": 1}, {"requests": 16}, {"requests": 1})),
        "batch 16 down to 1": Trace(phases(*walk, *walk)),
        "text repeats, then not": Trace(phases({}, {"text": "bad"}, {}, {"text": "random"}, {})),
        "sampling on and off": Trace(phases({}, {"text": "sampled"}, {}, {"text": "sampled"})),
        "long contexts": Trace(phases({"context": (300, 16000)}, {"context": (16000, 16000)})),
        "slow neighbour": Trace(phases({}, busy, {}, {"requests": 1}, busy | {"requests": 1})),
        "machine drifts by 3": Trace(phases({"load": (1, 3)}, {"load": (3, 1)}, {"load": (1, 3)})),
        "estimates stay too high": Trace(phases({}, {"text": "sampled"}), bias=1.3),
        "plain is best, batch 1": Trace(phases({"text": "random", "requests": 1}), noise=0.1),
        "plain is best, batch 4": Trace(phases({"text": "random"}), noise=0.1),
        "plain is best, bursts": Trace(phases({"text": "random"}), noise=0.1, bursts=0.2),
        **{f"drafting gains {gain}": Trace(phases({}), gain=gain) for gain in (0.9, 1.02, 1.1)},
    }


class World:
    """One trace on one machine, with everything drawn.

    Attributes (T steps, R requests at most, N nodes):
        phase, requests, load, slope, context: [T].
        survival: [T, R, N], probability that a node is on the accepted path, descending.
        tokens, seconds: [C, T], of each fixed choice in `choices`; plain is the first.
    """

    def __init__(self, machine: Machine, trace: Trace, seed: int = 0) -> None:
        self.machine, self.trace, self.seed = machine, trace, seed
        level = None
        if trace.gain is not None:  # bisection, all draws being equal
            low, high = 0.0, 1.0
            for _ in range(12):
                level = (low + high) / 2
                self._draw(level)
                speed = self.tokens.sum(1) / self.seconds.sum(1)
                low, high = (
                    (low, level) if speed[1:].max() > trace.gain * speed[0] else (level, high)
                )
        self._draw(level)

    def _draw(self, level: float | None) -> None:
        machine, trace, phases = self.machine, self.trace, self.trace.phases
        rng = self.rng = np.random.default_rng(self.seed)
        steps = [phase.steps for phase in phases]
        total, most = sum(steps), max(phase.requests for phase in phases)
        self.phase = np.repeat(np.arange(len(phases)), steps)
        self.requests = np.array([phase.requests for phase in phases])[self.phase]
        self.slope = np.array([phase.slope for phase in phases])[self.phase]
        self.context = np.concatenate([np.linspace(*p.context, p.steps) for p in phases])
        self.load = np.concatenate([np.geomspace(*p.load, p.steps) for p in phases])
        self.load *= rng.lognormal(0, trace.noise, total)
        # A burst of each length from 3 to 60 begins so often that they take this share.
        begins = rng.random(total) < trace.bursts / 31.5
        since = np.arange(total) - np.maximum.accumulate(np.where(begins, np.arange(total), -99))
        self.load[since < _held(rng, total, 1, begins[:, None]).ravel() * 57 + 3] *= 3
        levels = [
            TEXTS[p.text][machine.costly] if isinstance(p.text, str) else p.text for p in phases
        ]
        levels = np.array(levels if level is None else [level] * len(phases))[self.phase, None]
        draw = _specblock if machine.costly else _ngram
        self.survival = draw(rng, levels, most, machine.nodes)
        before = np.concatenate(([0], self.requests[:-1]))
        # A request has a tree from its second step on.
        self.survival[np.arange(most) >= np.minimum(before, self.requests)[:, None]] = 0
        self.verdicts = rng.random((total, most))
        self._try_fixed()

    def _try_fixed(self) -> None:
        """Set tokens and seconds of each fixed choice, with calibrated estimates."""
        nodes = np.arange(self.machine.nodes)
        verified = {"plain": self.survival > np.inf}
        for count in FIXED_NODES:
            if count <= len(nodes):
                verified[f"{count} nodes"] = (self.survival > 0) & (nodes < count)
        for threshold in THRESHOLDS:
            verified[f"survival > {threshold}"] = self.survival > threshold
        self.choices = list(verified)
        masks = [verified[name] for name in self.choices]
        self.tokens = np.array([self.requests + (self.survival * m).sum((1, 2)) for m in masks])
        rows = np.array([self.requests + mask.sum((1, 2)) for mask in masks])
        self.seconds = self._seconds(slice(None), rows, True, True)
        self.seconds[0] = self._seconds(slice(None), rows[0], False, False)

    def _seconds(self, at: Any, rows: Any, trees: bool, drafts: bool) -> Any:
        requests = self.requests[at]
        ms = self.machine.step_ms(rows, requests, self.context[at], self.slope[at])
        ms = ms + trees * self.machine.overhead + drafts * self.machine.draft_ms(requests)
        return ms * self.load[at] / 1000

    def startup(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return start-up figures, as `Controller.measured` takes them."""
        most, rng = int(self.requests.max()), np.random.default_rng(self.seed + 1)
        powers = 2 ** np.arange(20)
        rows = powers[powers <= 2 * most * (self.machine.nodes + 1)]
        counts = powers[powers <= max(most, 2)]
        wrong = np.log(self.trace.startup)

        def off(n: int) -> np.ndarray:  # a third of the figures, by any factor
            return np.exp(
                np.where(rng.random(n) < 1 / 3, rng.random(n) * wrong, rng.random(n) / 20)
            )

        verify = self.machine.step_ms(rows, np.minimum(rows, most)) / 1000 * off(len(rows))
        draft = self.machine.draft_ms(counts) / 1000 * off(len(counts))
        return dict(zip(rows.tolist(), verify.tolist())), dict(zip(counts.tolist(), draft.tolist()))


def _held(rng: np.random.Generator, steps: int, requests: int, change: np.ndarray) -> np.ndarray:
    """Return [T, R] uniform numbers that stay until the next change."""
    at = np.maximum.accumulate(np.where(change, np.arange(steps)[:, None], 0))
    return np.take_along_axis(rng.random((steps, requests)), at, 0)


def _specblock(rng: np.random.Generator, level: np.ndarray, requests: int, n: int) -> np.ndarray:
    """Return survival where each tree is filled, and requests are easier or harder for a while."""
    shape = (1 + 0.45 * np.arange(n)) ** -1.3
    mood = _held(rng, len(level), requests, rng.random((len(level), requests)) < 0.05)
    hardness = np.exp(0.8 * (mood - 0.5))[..., None]
    return (level[..., None] * shape) ** hardness


def _ngram(rng: np.random.Generator, level: np.ndarray, requests: int, n: int) -> np.ndarray:
    """Return survival where few requests have a good match, a quarter a poor one, most none."""
    change = rng.random((len(level), requests)) < 0.2
    drawn, length = (_held(rng, len(level), requests, change)[..., None] for _ in range(2))
    node, level = np.arange(n), level[..., None]
    good = np.where(node < 5 + 6 * length, 0.9 ** (node + 1.0), 0)
    poor = np.where(node < 3, (0.02 + 0.4 * level) ** (node + 1.0), 0)
    return np.where(drawn < level, good, np.where(drawn > 0.75, poor, 0))


class Fixed:
    """A policy that verifies every node above a survival; 1: plain decoding."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def measured(self, verify: dict[int, float], draft: dict[int, float]) -> None: ...

    def observe(self, step: Step) -> None: ...

    def budget(self, survival: np.ndarray, requests: int, rows: int) -> int:
        return int((survival > self.threshold).sum())

    def drafts(self, requests: int) -> bool:
        return self.threshold < 1


@dataclass
class Run:
    """What a policy did: [T] each. Tokens are expected ones, to compare with less noise."""

    tokens: np.ndarray
    seconds: np.ndarray
    drafted: np.ndarray


def simulate(world: World, controller: Any) -> Run:
    """Serve a trace."""
    total, machine = len(world.phase), world.machine
    run = Run(np.zeros(total), np.zeros(total), np.zeros(total, dtype=bool))
    wobble = np.random.default_rng(world.seed + 2).lognormal(0, 0.1, world.survival.shape)
    trees, calibrated, text = False, 0, -1
    controller.measured(*world.startup())
    for at in range(total):
        requests = int(world.requests[at])
        if world.trace.phases[world.phase[at]].text != text:  # scores mean something else now
            text, calibrated = world.trace.phases[world.phase[at]].text, calibrated // 2
        nodes = accepted = 0
        if trees:
            survival = world.survival[at, :requests]
            exponent = 1 - 0.5 * np.exp(-calibrated / 40)  # sure of itself at first
            estimate = world.trace.bias * survival**exponent * wobble[at, :requests]
            estimate = np.minimum.accumulate(np.minimum(estimate, 0.99), axis=1)
            limit = int((survival > 0).sum())
            nodes = min(int(controller.budget(estimate, requests, requests)), limit)
            chosen = np.argsort(-estimate, axis=None, kind="stable")[:nodes]
            run.tokens[at] = survival.ravel()[chosen].sum()
            reached = world.verdicts[at, chosen // machine.nodes] < survival.ravel()[chosen]
            accepted = int(reached.sum())
            calibrated += nodes > 0
        drafts = bool(controller.drafts(requests))
        run.tokens[at] += requests
        run.seconds[at] = world._seconds(at, requests + nodes, trees, drafts)
        run.drafted[at] = drafts
        controller.observe(
            Step(
                requests=requests,
                rows=requests + nodes,
                trees=trees,
                drafted=drafts,
                tokens=requests + accepted,
                seconds=float(run.seconds[at]),
                draft_seconds=drafts * machine.draft_ms(requests) * world.load[at] / 1000,
            )
        )
        trees = drafts
    return run


def figures(world: World, run: Run, settled: int = 64, first: int = 400) -> dict[str, Any]:
    """Compare a run with the best fixed choice of each phase, and with plain decoding.

    Returns:
        regret: share of the tokens that the best choices would have committed in the same time.
        loss: the same against plain, in phases where that is best, from their step `settled` on;
            None: there are none.
        first: speed in the first steps over plain decoding.
        back: most steps until drafting is back at the begin of a phase where it pays.
    """
    won = lost_to_plain = in_plain = 0.0
    best, back = [], []
    count = np.arange(len(world.phase)) >= settled
    for phase in range(len(world.trace.phases)):
        here = world.phase == phase
        late = here & count if (here & count).any() else here
        speed = world.tokens[:, late].sum(1) / world.seconds[:, late].sum(1)
        top = int(speed.argmax())
        gain = float(speed[top] / speed[0])
        late = here & count
        won += speed[top] * run.seconds[late].sum()
        seen = run.tokens[late].sum() / max(run.seconds[late].sum(), 1e-9)
        best.append({"choice": world.choices[top], "gain": gain, "seen": float(seen / speed[0])})
        if top == 0:
            steady = np.flatnonzero(here)[settled:]
            could = world.tokens[0, steady].sum() / max(world.seconds[0, steady].sum(), 1e-9)
            in_plain += could * run.seconds[steady].sum()
            lost_to_plain += could * run.seconds[steady].sum() - run.tokens[steady].sum()
        if gain >= 1.05 and here.sum() >= 128 and world.trace.phases[phase].load[0] <= 1:
            ahead = np.convolve(run.drafted[here], np.ones(32) / 32, "valid") >= 0.75
            back.append(int(ahead.argmax()) if ahead.any() else int(here.sum()))
    plain = world.tokens[0, :first].sum() / world.seconds[0, :first].sum()
    return {
        "regret": float(1 - run.tokens[count].sum() / won),
        "loss": float(lost_to_plain / in_plain) if in_plain else None,
        "first": float(run.tokens[:first].sum() / run.seconds[:first].sum() / plain),
        "back": max(back) if back else None,
        "drafted": float(run.drafted.mean()),
        "phases": best,
    }
