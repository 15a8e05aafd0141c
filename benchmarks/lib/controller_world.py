"""A simulated server for the controller: what a step takes, and which nodes are accepted.

Everything random is drawn by the number of the step, so all policies meet the same load and text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_specblock.feedback.controller import PLAIN, Controller, Step
from vllm_specblock.feedback.step_cost import BRIEF, WHOLE

RECORDED = Path(__file__).parents[1] / "results/controller_traces.npz"
"""SmolLM2 on a busy machine, batch 4, 12 nodes of each tree verified: estimates, verdicts, load."""


class Machine(NamedTuple):
    """Times in milliseconds of one target and drafter; `rows` and `step` are points of a line."""

    rows: tuple[int, ...]
    step: tuple[float, ...]
    per_request: float
    per_context: float  # of a request, per 1,000 tokens
    overhead: float  # of a step with trees
    draft: tuple[float, float] = (0.2, 0.01)  # alone, and per request
    brief: tuple[float, float] | None = None  # of the first block, if it can be drafted alone
    nodes: int = 12
    costly: bool = True  # the drafter has weights
    on_host: bool = True  # it knows a step's drafts at its end
    tile: int = 1  # steps of more than 16 rows are filled up to a multiple of it

    def padded(self, rows: Any) -> Any:
        return np.where(rows > 16, -(-rows // self.tile) * self.tile, rows)

    def step_ms(self, rows: Any, requests: Any, context: Any = 300, slope: Any = 1.0) -> Any:
        """Return the time of a target step; slope: factor on what further rows cost."""
        ms = np.interp(self.padded(rows), self.rows, self.step)
        attention = requests * (self.per_request + self.per_context * context / 1000)
        return self.step[0] + slope * (ms - self.step[0]) + attention

    def draft_ms(self, requests: Any, brief: bool = False) -> Any:
        alone, each = (self.brief if brief else None) or self.draft
        return alone + each * requests


_CPU = Machine((1, 8, 13, 26, 52, 520), (10.05, 12.2, 14.4, 18.5, 29.7, 231), 0.05, 0.15, 0.4)
_AMX_LINE = (1, 16, 17, 32, 33, 48, 49, 64, 520), (8, 8.4, 9.3, 9.6, 10.8, 11.2, 12.4, 13, 58)
_AMX = Machine(*_AMX_LINE, 0, 0.1, 0.4, tile=16)
# One H200, Llama-3.1-8B's shapes (`results/h200_end_to_end.json`).
_GPU_LINE = (1, 25, 61, 104, 204, 416, 488, 1024), (4.87, 5.2, 5.4, 5.6, 6.9, 12.0, 12.7, 26.0)
_GPU = Machine(*_GPU_LINE, 0.01, 0.035, 0.3, nodes=24, on_host=False)
MACHINES = {
    "CPU, n-gram": _CPU._replace(costly=False),
    "CPU, SpecBlock": _CPU._replace(draft=(3.0, 0.2), brief=(1.5, 0.07)),
    "AMX, SpecBlock": _AMX._replace(draft=(2.5, 0.1), brief=(1.3, 0.03)),
    "GPU, n-gram": _GPU._replace(draft=(0.15, 0.0), costly=False),
    "GPU, SpecBlock": _GPU._replace(draft=(0.95, 0.14), brief=(0.5, 0.04)),
}

TEXTS = {"good": (0.3, 0.65), "sampled": (0.12, 0.4), "bad": (0.03, 0.15), "random": (0.0, 0.01)}
"""Share of requests with an n-gram match; survival of SpecBlock's likeliest node."""

FIXED_NODES = (1, 2, 4, 8, 12, 16, 24)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6)


class Phase(NamedTuple):
    steps: int
    requests: int = 4
    text: str = "good"
    load: tuple[float, float] = (1.0, 1.0)  # factor on all times, first and last step
    slope: float = 1.0  # factor on the cost of further rows
    context: tuple[float, float] = (300.0, 300.0)


class Trace(NamedTuple):
    """Phases of a server's life."""

    phases: tuple[Phase, ...]
    noise: float = 0.05  # σ of the log of a step's time
    bursts: float = 0.0  # share of steps that take three times as long, 3 to 60 in a row
    startup: float = 1.2  # half of the start-up figures are off by up to this factor
    bias: float = 1.0  # estimated over true survival, also once calibrated
    gain: float | None = None  # set the text so that the best fixed choice is so much over plain
    recorded: bool = False  # replay recorded texts and load


def traces(length: int = 3000) -> dict[str, Trace]:
    """Return the traces by name; length: steps of a phase."""

    def made(*changes: dict[str, Any], **options: Any) -> Trace:
        return Trace(tuple(Phase(**{"steps": length} | change) for change in changes), **options)

    one, many = {"requests": 1}, {"requests": 16}
    sampled, bad, random = ({"text": name} for name in ("sampled", "bad", "random"))
    burst, busy = {"steps": 40, "load": (3, 3)}, {"load": (2.5, 2.5), "slope": 1.6}
    walk = [{"steps": max(length // 8, 64), "requests": n} for n in range(16, 0, -1)]
    start = {"steps": 200, "load": (4, 2)}
    up, down = {"load": (1, 3)}, {"load": (3, 1)}
    return {
        **{f"quiet, batch {n}": made({"requests": n}) for n in (1, 4, 8, 16)},
        "noise of factor 3": made({}, one, noise=0.1, bursts=0.2),
        "bursts": made({}, burst, {}, burst, {}, burst, one, burst, {}),
        "wrong start-up figures": made(one, {}, startup=100),
        "start under load": made(start, one, {}, startup=100, noise=0.2),
        "batch 1, 16, 1": made(one, many, one),
        "batch 16 down to 1": made(*walk, *walk),
        "text repeats, then not": made({}, bad, {}, random, {}),
        "sampling on and off": made({}, sampled, {}, sampled),
        "long contexts": made({"context": (300, 16000)}, {"context": (16000, 16000)}),
        "slow neighbour": made({}, busy, {}, one, one | busy),
        "machine drifts by 3": made(up, down, up),
        "estimates stay too high": made({}, sampled, bias=1.3),
        "recorded": made(one, {}, sampled, one | sampled, many, recorded=True),
        **{f"plain is best, batch {n}": made(random | {"requests": n}, noise=0.1) for n in (1, 8)},
        "plain is best, bursts": made(random, noise=0.1, bursts=0.2),
        **{f"drafting gains {gain}": made({}, gain=gain) for gain in (0.9, 1.02, 1.1)},
    }


class World:
    """One trace on one machine, with everything drawn.

    Attributes (T steps, R requests at most, N nodes):
        phase, requests, load, slope, context: [T].
        survival: [T, R, N], probability that a node is on the accepted path; 0 or 1 if recorded.
        estimate: [T, R, N], calibrated estimate of it, descending.
        later: [N] bool, nodes of later blocks.
        choices: names of the fixed choices; plain is the first.
        tokens, seconds: [choices, T].
    """

    def __init__(self, machine: Machine, trace: Trace, seed: int = 0) -> None:
        self.machine, self.trace, self.seed = machine, trace, seed
        level, low, high = None, 0.0, 1.0
        for _ in range(12 if trace.gain else 0):  # bisection, all draws being equal
            level = (low + high) / 2
            self._draw(level)
            speed = self.tokens.sum(1) / self.seconds.sum(1)
            low, high = (low, level) if speed[1:].max() > trace.gain * speed[0] else (level, high)
        self._draw(level)

    def _draw(self, level: float | None) -> None:
        trace, phases, rng = self.trace, self.trace.phases, np.random.default_rng(self.seed)
        self.phase = np.repeat(np.arange(len(phases)), [phase.steps for phase in phases])
        self.requests = np.array([phase.requests for phase in phases])[self.phase]
        self.slope = np.array([phase.slope for phase in phases])[self.phase]
        self.context = np.concatenate([np.linspace(*p.context, p.steps) for p in phases])
        self.load = np.concatenate([np.geomspace(*p.load, p.steps) for p in phases])
        total, most, n = len(self.phase), int(self.requests.max()), self.machine.nodes
        self.load *= rng.lognormal(0, trace.noise, total)
        slow = np.zeros(total, dtype=bool)
        for begin in np.flatnonzero(rng.random(total) < trace.bursts / 30):
            slow[begin : begin + rng.integers(3, 60)] = True
        self.load[slow] *= 3
        if trace.recorded:
            greedy = np.array([phase.text == "good" for phase in phases])[self.phase]
            self.survival, self.estimate = _replayed(greedy, most, n, self.machine.costly)
            self.load *= np.resize(np.load(RECORDED)["load"], total)
        else:
            levels = [TEXTS[phase.text][self.machine.costly] for phase in phases]
            levels = np.array(levels if level is None else [level] * len(phases))[self.phase]
            draw = _specblock if self.machine.costly else _ngram
            self.survival = self.estimate = draw(rng, levels[:, None, None], most, n)
        # A request has a tree from its second step on.
        before = np.concatenate(([0], self.requests[:-1]))
        absent = np.arange(most) >= np.minimum(before, self.requests)[:, None]
        self.survival[absent] = self.estimate[absent] = 0
        self.verdicts = rng.random((total, most))

        verified, node = {"plain": self.estimate > np.inf}, np.arange(n)
        self.later = (node % 3 == 2) & (node > 3) & (self.machine.brief is not None)
        for block in ("", ", first block")[: 1 + self.later.any()]:
            of_block = (self.estimate > 0) & ~(self.later & bool(block))
            for count in FIXED_NODES:
                if count <= n:
                    verified[f"{count} nodes{block}"] = of_block & (of_block.cumsum(-1) <= count)
            for threshold in THRESHOLDS:
                verified[f"survival > {threshold}{block}"] = of_block & (self.estimate > threshold)
        self.choices, self.tokens, self.seconds = list(verified), [], []
        for name, mask in verified.items():
            self.tokens.append(self.requests + (self.survival * mask).sum((1, 2)))
            rows, drafts = self.requests + mask.sum((1, 2)), name != "plain"
            step = slice(None), rows, drafts, drafts, "first" in name
            self.seconds.append(self.step_seconds(*step))
        self.tokens, self.seconds = np.array(self.tokens), np.array(self.seconds)

    def step_seconds(
        self, at: Any, rows: Any, trees: bool, drafts: bool, brief: bool = False
    ) -> Any:
        requests = self.requests[at]
        ms = self.machine.step_ms(rows, requests, self.context[at], self.slope[at])
        ms = ms + trees * self.machine.overhead + drafts * self.machine.draft_ms(requests, brief)
        return ms * self.load[at] / 1000

    def startup(self) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Return start-up figures, as `Controller.measured` takes them."""
        most, rng = int(self.requests.max()), np.random.default_rng(self.seed + 1)
        sizes = 2 ** np.arange(20)
        rows = sizes[sizes <= 2 * most * (self.machine.nodes + 1)]

        def figures(sizes: np.ndarray, ms: np.ndarray) -> dict[int, float]:
            wrong = self.trace.startup ** rng.random(len(sizes))
            seconds = ms / 1000 * np.where(rng.random(len(sizes)) < 0.5, wrong, 1.03)
            return dict(zip(sizes.tolist(), seconds.tolist()))

        verify = figures(rows, self.machine.step_ms(rows, np.minimum(rows, most)))
        counts = sizes[sizes <= most]
        drafts = [figures(counts, self.machine.draft_ms(counts, brief)) for brief in (False, True)]
        return verify, *drafts


def _held(rng: np.random.Generator, shape: tuple[int, int], change: float) -> np.ndarray:
    """Return [T, R, 1] uniform numbers that change with this probability in a step."""
    changes = rng.random(shape) < change
    at = np.maximum.accumulate(np.where(changes, np.arange(shape[0])[:, None], 0))
    return np.take_along_axis(rng.random(shape), at, 0)[..., None]


def _specblock(rng: np.random.Generator, level: np.ndarray, requests: int, n: int) -> np.ndarray:
    """Return survival of full trees of requests that are easier or harder for a while."""
    hardness = np.exp(0.8 * (_held(rng, (len(level), requests), 0.05) - 0.5))
    return (level * (1 + 0.45 * np.arange(n)) ** -1.3) ** hardness


def _ngram(rng: np.random.Generator, level: np.ndarray, requests: int, n: int) -> np.ndarray:
    """Return survival where some requests have a good match, a quarter a poor one, others none."""
    drawn, length = (_held(rng, (len(level), requests), 0.2) for _ in range(2))
    node = np.arange(n)
    good = np.where(node < 5 + 6 * length, 0.9 ** (node + 1.0), 0)
    poor = np.where(node < 3, (0.02 + 0.4 * level) ** (node + 1.0), 0)
    return np.where(drawn < level, good, np.where(drawn > 0.75, poor, 0))


def _replayed(greedy: np.ndarray, requests: int, n: int, costly: bool) -> np.ndarray:
    """Return [2, T, R, N], verdicts and estimates; the fifth request replays a later part."""
    found, drafter = np.load(RECORDED), "specblock" if costly else "ngram"
    replayed, request = np.zeros((2, len(greedy), requests, n)), np.arange(requests)
    for temperature, here in ((0, greedy), (0.8, ~greedy)):
        values = found[f"{drafter} {temperature}"]
        at = np.flatnonzero(here)[:, None] + 97 * (request // 4)
        values = values[at % len(values), request % 4]
        replayed[:, here, :, : values.shape[-1]] = values // 128, values % 128 / 127
    return replayed


class Run(NamedTuple):
    """What a policy did in each step: [T]. Tokens are expected ones, which are less noisy."""

    tokens: np.ndarray
    seconds: np.ndarray
    drafted: np.ndarray


def simulate(world: World, controller: Controller) -> Run:
    """Serve a trace."""
    total, machine, phases = len(world.phase), world.machine, world.trace.phases
    run = Run(np.zeros(total), np.zeros(total), np.zeros(total, dtype=bool))
    wobble = np.random.default_rng(world.seed + 2).lognormal(0, 0.1, world.survival.shape)
    trees, brief, calibrated, text = False, False, 0, ""
    controller.cost.measured(*world.startup())
    controller.selective = machine.on_host
    for at in range(total):
        requests, accepted = int(world.requests[at]), 0
        sampling = phases[world.phase[at]].text == "sampled"
        if phases[world.phase[at]].text != text:  # scores mean something else now
            text, calibrated = phases[world.phase[at]].text, calibrated // 2
        chosen = np.zeros(0, dtype=int)
        if trees:
            survival, estimate = world.survival[at, :requests], world.estimate[at, :requests]
            estimate = np.where(brief & world.later, 0, estimate)
            if not world.trace.recorded:  # drafters are sure of themselves at first
                estimate = estimate ** (1 - 0.4 * np.exp(-calibrated / 15)) * wobble[at, :requests]
            estimate = np.minimum(world.trace.bias * estimate, 0.99)
            there = estimate > 0
            estimate = np.minimum.accumulate(np.where(there, estimate, 1), axis=1) * there
            later = np.broadcast_to(world.later, estimate.shape) if world.later.any() else None
            given = estimate, requests, requests, None, sampling, machine.padded, later
            budget = controller.budget(*given)
            trees, nodes = budget != PLAIN, min(max(budget, 0), int(there.sum()))
            chosen = np.argsort(-estimate, axis=None, kind="stable")[:nodes]
            likely = survival.ravel()[chosen]
            run.tokens[at] = likely.sum()
            accepted = int((world.verdicts[at, chosen // machine.nodes] < likely).sum())
            calibrated += nodes > 0
        drafts = bool(controller.drafts(requests, sampling))
        brief = drafts and machine.brief is not None and controller.brief(requests, sampling)
        rows, by = requests + len(chosen), BRIEF if brief else WHOLE
        run.tokens[at] += requests
        run.seconds[at] = seconds = float(world.step_seconds(at, rows, trees, drafts, brief))
        run.drafted[at] = drafts
        drafting = float(drafts * machine.draft_ms(requests, brief) * world.load[at] / 1000)
        step = Step(requests, rows, trees, drafts, accepted, seconds, drafting, by)
        controller.observe(step, sampling)
        trees = drafts
    return run


def figures(world: World, run: Run, settled: int = 64, first: int = 400) -> dict[str, Any]:
    """Compare a run with the best fixed choice of each phase, and with plain decoding.

    Returns:
        regret: share of the tokens that the best choices would have committed in the same time.
        loss: the same against plain where that is best, from a phase's step `settled` on; or None.
        first: speed in the first steps over plain decoding.
        back: most steps until drafting is back in a phase where it pays; or None.
        phases: the best choice of each, its speed over plain, and the run's.
    """
    best, back = [], []
    won = steady = lost = 0.0
    late = np.arange(len(world.phase)) >= settled
    for number, phase in enumerate(world.trace.phases):
        here = world.phase == number
        counted = np.flatnonzero(here & late)
        tokens, seconds = run.tokens[counted].sum(), run.seconds[counted].sum()
        speed = world.tokens[:, counted].sum(1) / world.seconds[:, counted].sum(1)
        top, seen = int(speed.argmax()), float(tokens / seconds / speed[0])
        won += speed[top] * seconds
        gain = float(speed[top] / speed[0])
        best.append({"best": world.choices[top], "gain": gain, "seen": seen})
        if top == 0:
            counted = np.flatnonzero(here)[settled:]
            plain = world.tokens[0, counted].sum() / world.seconds[0, counted].sum()
            steady += plain * run.seconds[counted].sum()
            lost += plain * run.seconds[counted].sum() - run.tokens[counted].sum()
        elif gain >= 1.05 and phase.steps > 64 and phase.load[0] <= 1:
            drafted = np.convolve(run.drafted[here], np.ones(32) / 32, "valid") >= 0.75
            back.append(int(drafted.argmax()) if drafted.any() else phase.steps)
    plain = world.tokens[0, :first].sum() / world.seconds[0, :first].sum()
    return {
        "regret": float(1 - run.tokens[late].sum() / won),
        "loss": lost / steady if steady else None,
        "first": float(run.tokens[:first].sum() / run.seconds[:first].sum() / plain),
        "back": max(back, default=None),
        "drafted": float(run.drafted.mean()),
        "phases": best,
    }
