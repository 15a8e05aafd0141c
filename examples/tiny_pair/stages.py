"""Work in stages: each runs once, and a call may end within one when its time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


class OutOfTime(Exception):
    """The call's time is over and its work is saved; the next call resumes."""


class Deadline:
    """End of a call: `minutes` from now, or never (None)."""

    def __init__(self, minutes: float | None):
        self._at = None if minutes is None else time.monotonic() + 60 * minutes

    def minutes_left(self) -> float | None:
        """Return the minutes left, at least 0; None without an end."""
        return None if self._at is None else max(0.0, (self._at - time.monotonic()) / 60)

    def passed(self) -> bool:
        return self.minutes_left() == 0.0

    def check(self) -> None:
        """Raise `OutOfTime` if the end has passed."""
        if self.passed():
            raise OutOfTime


class Stages:
    """Runs each stage once, and keeps its result and time in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.begun = json.loads(path.read_text()) if path.exists() else {}

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time per stage over all calls, without calls that were killed."""
        return {name: round(stage["seconds"], 1) for name, stage in self.begun.items()}

    def run(self, name: str, options: dict, stage: Callable[[], dict]) -> dict:
        """Return the result of `stage`, from the file if it has finished before.

        Raises:
            SystemExit: it was run or begun with other options.
            OutOfTime: raised by `stage`.
        """
        before = self.begun.get(name, {"options": options, "seconds": 0.0})
        if before["options"] != options:
            raise SystemExit(
                f"The stage {name!r} below {self.path.parent} was run with "
                f"{before['options']}, not {options}; give another --work."
            )
        if "figures" in before:
            return before["figures"]
        began = time.monotonic()

        def remember(**figures: dict) -> None:
            seconds = before["seconds"] + time.monotonic() - began
            self.begun[name] = {"options": options, **figures, "seconds": seconds}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_suffix(".partial")
            aside.write_text(json.dumps(self.begun))
            aside.replace(self.path)

        try:
            figures = stage()
        except OutOfTime:
            remember()
            raise
        remember(figures=figures)
        return figures
