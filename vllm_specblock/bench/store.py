"""Results in a folder that grows unit by unit: a killed run resumes.

run.json      the settings, where the results come from, facts of each engine
units.jsonl   a line per unit: the answers of all engines that took turns, and their cost
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.schedule import Unit
from vllm_specblock.train.data.shards import replace
from vllm_specblock.train.provenance import provenance, revision

RUN, UNITS = "run.json", "units.jsonl"
_GROWING = ("methods", "sets")
"""Settings by name: a later call may add some and leave some out."""


@dataclass(frozen=True)
class Answer:
    """One engine's answer to a unit, and its cost.

    Attributes:
        tokens: generated, of all questions of the unit.
        wall, cpu: seconds.
        steps: decode steps of all questions, see `engine/metrics/acceptance.py`.
        draft_ns, draft_steps: time of the drafters, and the steps that it covers.
        digests: per question, of its token ids.
        texts: per question, where another turn follows; else empty.
        ids: per question, its token ids, where it is greedy; else empty.
    """

    tokens: int
    wall: float
    cpu: float
    steps: int
    draft_ns: int
    draft_steps: int
    digests: list[str]
    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """Answers of engines that took turns, by method; `unit` is `Unit.key`."""

    unit: str
    round: int
    temperature: float
    set: str
    answers: dict[str, Answer]


class Store:
    """All records of a folder.

    Args:
        folder: created, or resumed.
        settings: what all results have in common; JSON's types only.
        fresh: delete the results in the folder.

    Raises:
        BenchError: the folder has results of other settings, another revision of the code or other
            versions of its dependencies.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self._known: dict[tuple[str, str], Answer] = {}
        self._together: dict[str, list[set[str]]] = {}
        facts = provenance()
        self.head: dict[str, Any] = {
            "settings": json.loads(json.dumps(settings)),  # as it is read back
            "provenance": facts,
            "commands": [],
            "engines": {},
            # New files do not count: the results may lie in the repository.
            "revision": revision(Path(__file__).parent, new_files=False),
        }
        if fresh and (folder / RUN).exists():
            for path in (folder / RUN, folder / UNITS):
                path.unlink(missing_ok=True)
            shutil.rmtree(folder / "logs", ignore_errors=True)
        if (folder / RUN).exists():
            known = json.loads((folder / RUN).read_text(encoding="utf-8"))
            self._refuse_others(known)
            for key in _GROWING:
                known["settings"][key] |= self.head["settings"][key]
            self.head = known
            self._read()
        self.head["commands"] = [*dict.fromkeys([*self.head["commands"], facts["command"]])]
        folder.mkdir(parents=True, exist_ok=True)
        self._write_head()

    def _refuse_others(self, known: dict[str, Any]) -> None:
        now, then = _circumstances(self.head), _circumstances(known)
        other = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
        for key in _GROWING:
            ours, theirs = self.head["settings"][key], known["settings"][key]
            both = ours.keys() & theirs.keys()
            other |= {f"{key}: {name}" for name in both if ours[name] != theirs[name]}
        if other:
            raise BenchError(
                f"{self.folder} has results with other {', '.join(sorted(other))}: give another "
                "--out, or --fresh to delete them."
            )

    def _read(self) -> None:
        path = self.folder / UNITS
        if not path.exists():
            return
        whole = path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):  # a kill left a part of a line
            os.truncate(path, len(kept))
        for line in kept.splitlines():
            raw = json.loads(line)
            answers = {name: Answer(**each) for name, each in raw.pop("answers").items()}
            self._take(Record(**raw, answers=answers))

    def _take(self, record: Record) -> None:
        self.records.append(record)
        self._together.setdefault(record.unit, []).append({*record.answers})
        for name, answer in record.answers.items():
            self._known[record.unit, name] = answer

    def _write_head(self) -> None:
        text = json.dumps(self.head, indent=1, ensure_ascii=False) + "\n"
        replace(self.folder / RUN, lambda aside: aside.write_text(text, encoding="utf-8"))

    def note_engine(self, name: str, facts: dict[str, Any]) -> None:
        """Keep the facts of an engine."""
        self.head["engines"][name] = facts
        self._write_head()

    def add(self, unit: Unit, answers: dict[str, Answer]) -> None:
        """Keep the answers to a unit; they are on the disk when this returns."""
        record = Record(unit.key(), unit.round, unit.temperature, unit.set, answers)
        raw = {**vars(record), "answers": {name: vars(each) for name, each in answers.items()}}
        with (self.folder / UNITS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(raw, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(record)

    def missing(self, unit: Unit, methods: Iterable[str], plain: Iterable[str]) -> list[str]:
        """Return those of `methods` that have not answered `unit` in turns with all of `plain`."""
        together = [those for those in self._together.get(unit.key(), []) if those >= {*plain}]
        return [name for name in methods if not any(name in those for those in together)]

    def ids(self, unit: Unit, name: str, place: int) -> list[int]:
        """Return the tokens of the method's last greedy answer to a question of `unit`."""
        return self._known[unit.key(), name].ids[place]

    def answers_before(self, unit: Unit, name: str) -> list[list[str]]:
        """Return, per question of `unit`, the method's answers to the turns before."""
        turns = [self._known[unit.key(turn), name].texts for turn in range(unit.turn)]
        return [[texts[place] for texts in turns] for place in range(len(unit.questions))]


def _circumstances(head: dict[str, Any]) -> dict[str, Any]:
    """Return all that has to be equal for results to be compared."""
    settings = {k: v for k, v in head["settings"].items() if k not in _GROWING}
    return {**settings, "revision": head["revision"], "versions": head["provenance"]["versions"]}
