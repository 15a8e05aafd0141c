"""Where the time of an engine's steps goes: nested sections, each without those inside it.

`step_parts.py` starts this file as an engine's process:
`vllm_specblock/engine/offline/answering.py`, whose answers also say what each section took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_specblock.engine.offline.answering import Answering, main

STEP, RUNNER, MODEL, ATTENTION = (
    "scheduler, engine",
    "runner",
    "linears, rest of model",
    "attention",
)
HEAD, SAMPLING, COMMIT, DRAFTING = "LM head", "sampling, verification", "commit", "drafting"
PROPOSAL, SIZES = "proposal around drafting", "how much to verify"
ORDER = (MODEL, ATTENTION, HEAD, SAMPLING, COMMIT, DRAFTING, PROPOSAL, SIZES, RUNNER, STEP)


class Sections:
    """Exclusive wall and processor time of sections that call each other.

    Attributes:
        spent: by section, seconds by the clock and of the process, all its threads'.
    """

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None):
        self.now = now or (lambda: (time.perf_counter(), time.process_time()))
        self.spent: dict[str, list[float]] = {}
        self._open: list[str] = []
        self._mark = (0.0, 0.0)

    def wrap(self, owner: Any, name: str, section: str) -> None:
        """Count what `owner.name` takes to `section`, if there is such a method."""
        original = getattr(owner, name, None)
        if original is None:
            return

        def timed(*args, **kwargs):
            self._turn()
            self._open.append(section)
            try:
                return original(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, name, timed)

    def _turn(self) -> None:
        """What has passed since the last turn belongs to the section that is open."""
        now = self.now()
        if self._open:
            spent = self.spent.setdefault(self._open[-1], [0.0, 0.0])
            spent[0] += now[0] - self._mark[0]
            spent[1] += now[1] - self._mark[1]
        self._mark = now

    def take(self) -> dict[str, list[float]]:
        """What was spent since the last call."""
        spent, self.spent = self.spent, {}
        return spent


class Sectioned(Answering):
    """Answering that says how long every section of its steps took, and how many steps there were.

    In one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), or the engine's insides are out of reach.
    """

    def __init__(self, arguments: dict[str, Any]):
        super().__init__(arguments)
        self.sections, self.steps = Sections(), 0
        engine = self.llm.llm_engine
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        wrap = self.sections.wrap
        for owner, name, section in (
            (engine, "step", STEP),
            (runner, "execute_model", RUNNER),
            (runner, "sample_tokens", RUNNER),
            (runner.model, "forward", MODEL),
            (runner.model, "compute_logits", HEAD),
            (runner, "sample", SAMPLING),  # Model Runner V2
            (runner, "_sample", SAMPLING),  # the default one
        ):
            wrap(owner, name, section)
        for layer in self.config.compilation_config.static_forward_context.values():
            for name in ("forward", "do_kv_cache_update"):
                wrap(getattr(layer, "impl", None), name, ATTENTION)
        speculator = getattr(runner, "speculator", None)
        if speculator is not None:
            wrap(speculator, "propose", PROPOSAL)
            wrap(speculator, "settle", COMMIT)
            wrap(speculator.draft_policy, "advance", DRAFTING)
            wrap(speculator.draft_policy, "combine", DRAFTING)
            for owner, names in (
                (speculator.adaptive, ("learn", "write_survival", "catch_up", "pause")),
                (
                    runner.adaptive_verification,
                    (
                        "get_num_tokens",
                        "compact_batch",
                        "reallocate_drafts",
                        "record_confidences",
                    ),
                ),
            ):
                for name in names:
                    wrap(owner, name, SIZES)
        step = engine.step

        def counted():
            self.steps += 1
            return step()

        engine.step = counted

    def answer(self, job: dict[str, Any], said: Any = None) -> dict[str, Any]:
        self.sections.take()
        before = self.steps
        found = super().answer(job, said)
        return found | {"sections": self.sections.take(), "steps": self.steps - before}


if __name__ == "__main__":
    main(Sectioned)
