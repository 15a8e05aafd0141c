"""Results in a folder that grows unit by unit: a killed run resumes.

run.json      the settings, where the results come from, facts of each engine
units.jsonl   a line per unit: the answers of all engines that took turns, and their cost
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Unit
from vllm_specblock.train.data.shards import write_json
from vllm_specblock.train.provenance import provenance, revision

RUN, UNITS = "run.json", "units.jsonl"
_GROWING = ("method ", "drafter ", "set ")
"""Settings of which a later call may add some and leave some out."""


@dataclass(frozen=True)
class Answer:
    """One engine's answers to a unit, and their cost.

    Attributes:
        ids: the token ids of every turn of every question.
        wall, cpu: seconds.
        steps: decode steps of all questions, see `engine/metrics/acceptance.py`.
        draft_ns, draft_steps: time of the drafters, and the steps that it covers.
    """

    ids: list[list[list[int]]]
    wall: float
    cpu: float
    steps: int
    draft_ns: int
    draft_steps: int

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(each) for turns in self.ids for each in turns)

    @property
    def outputs(self) -> int:
        """Number of answers."""
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class Record:
    """Answers of engines that took turns, by method."""

    unit: Unit
    answers: dict[str, Answer]


class Store:
    """All records of a run; those of other units stay in the folder, which is created or resumed.

    All results share `settings` (JSON types only), but for those of `_GROWING`. Raises BenchError
    if the results are damaged, or of other settings, code or dependencies.
    """

    def __init__(self, folder: Path, units: Iterable[Unit], settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.units = {unit.key: unit for unit in units}
        self.records: list[Record] = []
        facts = provenance()
        # New files do not count: the results may lie in the repository.
        commit = revision(Path(__file__).parent, new_files=False)
        now = {**settings, "revision": commit, "versions": facts["versions"]}
        self.head: dict[str, Any] = {
            "settings": json.loads(json.dumps(now)),  # as it is read back
            "provenance": facts,
            "commands": [],
            "engines": {},
        }
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RUN).exists():
            self._resume()
        self.head["commands"] = [*dict.fromkeys([*self.head["commands"], facts["command"]])]
        write_json(folder / RUN, self.head)

    def _resume(self) -> None:
        try:
            known = json.loads((self.folder / RUN).read_bytes())
            now, then = self.head["settings"], {**known["settings"]}
            self._read_units()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BenchError(f"{self.folder} has damaged results: give another --out.") from None
        other = {key for key in now.keys() & then.keys() if now[key] != then[key]}
        other |= {key for key in now.keys() ^ then.keys() if not key.startswith(_GROWING)}
        if other:
            raise BenchError(
                f"{self.folder} has results with other {', '.join(sorted(other))}: give another "
                "--out, or delete the folder."
            )
        self.head |= known | {"settings": then | now}

    def _read_units(self) -> None:
        path = self.folder / UNITS
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):  # incomplete line of a killed run
            os.truncate(path, len(kept))
        for line in kept.splitlines():
            raw = json.loads(line)
            answers = {name: Answer(**each) for name, each in raw["answers"].items()}
            if unit := self.units.get(raw["unit"]):
                self.records.append(Record(unit, answers))

    def note_engine(self, name: str, facts: dict[str, Any]) -> None:
        """Store the facts of an engine."""
        self.head["engines"][name] = facts
        write_json(self.folder / RUN, self.head)

    def add(self, unit: Unit, answers: dict[str, Answer]) -> None:
        """Write the answers to a unit to disk."""
        raw = {"unit": unit.key, "answers": {name: asdict(each) for name, each in answers.items()}}
        with (self.folder / UNITS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(raw, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(Record(unit, answers))

    def missing(self, unit: Unit, methods: Iterable[str], plain: Iterable[str]) -> list[str]:
        """Return the `methods` that have not answered `unit` in turns with all of `plain`."""
        beside, done = {*plain}, set[str]()
        for record in self.records:
            if record.unit == unit and record.answers.keys() >= beside:
                done |= record.answers.keys()
        return [name for name in methods if name not in done]
