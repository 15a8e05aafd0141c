"""Answers side by side as they stream: draft tokens tinted, speed and τ below."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_specblock.bench.process import EngineProcess, shared_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE = 0.15
"""Seconds of one engine's turn."""
TINT = "black on #a8dda8"
"""Accepted draft tokens."""


class Answer:
    """One answer as it streams.

    Attributes:
        ids: its tokens; steps: how many of them each step emitted.
        seconds: running time of its engine.
        joined: parts of the stream span several steps, as a server's: τ is `reported_tau`, if any.
    """

    def __init__(self, name: str, decode: Callable[[list[int]], str], joined: bool = False) -> None:
        self.name, self.decode, self.joined = name, decode, joined
        self.ids: list[int] = []
        self.steps: list[int] = []
        self.seconds = 0.0
        self.reported_tau: float | None = None
        self.text = Text()
        self._shown = 0

    def hear(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a step: all but the last one were drafted and accepted."""
        if not tokens:
            return
        self.steps.append(len(tokens))
        for part, style in ((tokens[:-1], TINT), (tokens[-1:], "")):
            self.ids += part
            whole = self.decode(self.ids)
            if not whole.endswith("\ufffd"):  # else a letter lacks some of its bytes
                self.text.append(whole[self._shown :], style)
                self._shown = len(whole)

    @property
    def tau(self) -> float | None:
        """Tokens per decode step; the first token comes with the prompt. None: unknown."""
        if self.joined:
            return self.reported_tau
        later = self.steps[1:]
        return sum(later) / len(later) if later else 1.0

    @property
    def speed(self) -> float:
        return len(self.ids) / self.seconds if self.seconds else 0.0

    def figures(self) -> str:
        tau = "" if self.tau is None else f", τ {self.tau:.2f}"
        return f"{len(self.ids)} tokens, {self.speed:.1f} tokens/s{tau}"


@contextmanager
def shown(console: Console, question: str, answers: Sequence[Answer]) -> Iterator[None]:
    """Show the answers while they grow; in a pipe, as plain lines once complete."""
    if console.is_terminal:

        def draw() -> Group:
            table = Table.grid(*(Column(ratio=1) for _ in answers), expand=True)
            table.add_row(*(Panel(a.text, title=a.name, subtitle=a.figures()) for a in answers))
            return Group(Text(question, style="bold"), table)

        with Live(
            console=console,
            get_renderable=draw,
            refresh_per_second=12,
            vertical_overflow="visible",
        ):
            yield
        return
    console.print(f"\n> {question}", markup=False, soft_wrap=True)
    yield
    same = len({tuple(answer.ids) for answer in answers}) == 1
    for answer in answers[-1:] if same else answers:
        console.print(answer.text.plain, markup=False, soft_wrap=True)
    for answer in answers:
        console.print(f"[{answer.name}: {answer.figures()}]", markup=False, soft_wrap=True)


def start_engines(
    engines: list[EngineProcess],
    target: Path,
    methods: Mapping[str, dict[str, Any] | None],
    folder: Path,
    dtype: str,
    eager: bool = False,
    length: int = 4096,
) -> int:
    """Append a ready and paused engine per method; raises EngineFailed.

    Args:
        methods: `speculative_config` by name; None: plain vLLM.
        folder: for their logs.
        length: maximum tokens of a request. Returned: that, or what the target allows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = shared_arguments(target, dtype, length, 1) | {"enforce_eager": eager}
    env: dict[str, str | None] = {
        "VLLM_USE_V2_MODEL_RUNNER": None,  # plain vLLM as it comes
        "VLLM_LOGGING_LEVEL": "ERROR",
        # In one process, a second thread of torch only spins beside vLLM's own.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TRITON_F32_DEFAULT": "ieee",  # else Triton's kernels round float32 to TF32
    }
    for name, speculative in methods.items():
        given = arguments | {"speculative_config": speculative}
        engines.append(EngineProcess(name, given, env, folder / f"{name}.log"))
    for engine in reversed(engines):  # wrong options of drafts come before plain vLLM is ready
        engine.wait()
    return arguments["max_model_len"]


def ask_together(
    engines: Sequence[EngineProcess], job: Mapping[str, Any], answers: Sequence[Answer]
) -> None:
    """Let engines answer one prompt in time slices, so that the answers grow side by side.

    An engine is stopped between its slices; only its running time counts. Raises EngineFailed.
    """
    turns = deque(
        (engine, answer, engine.stream(job))
        for engine, answer in zip(engines, answers, strict=True)
    )
    while turns:
        engine, answer, steps = turns.popleft()
        engine.resume()
        began = time.perf_counter()
        for tokens in steps:
            answer.hear(tokens)
            if time.perf_counter() - began > SLICE:
                turns.append((engine, answer, steps))
                break
        engine.pause()
        answer.seconds += time.perf_counter() - began
