"""The training loop: one pass over the frozen target's features, one or several learners.

Several learners see the same data in the same order and pay for the target once; `specblock
train` has one. The state on disk survives a kill at any point.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from vllm_specblock.train import provenance
from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.distributed import BatchCounts, world
from vllm_specblock.train.journal import Tracker, describe
from vllm_specblock.train.judge.replay import mean_tau
from vllm_specblock.train.learner import Learner, Lesson, Script
from vllm_specblock.train.student import Student
from vllm_specblock.train.teacher.features import Teacher
from vllm_specblock.train.text.shards import replace
from vllm_specblock.train.text.windows import Windows

STATE_DIR = "training"
BEST_DIR = "best"
JUDGED_DEPTH = 8
"""Tokens that a step along a text must have before it, the same for every learner."""

_LOST_IN_A_ROW = 20
"""Updates without a finite gradient after which a run is given up: its weights are broken."""


class Trainer:
    """One run. `step` counts the updates done.

    Args:
        config: what every learner shares.
        learners: by name, on `device`, float32. One alone is written to `config.out` itself,
            several to a folder each.
        teacher: the frozen target.
        windows: training text.
        scripts: the held-out texts, to draft along; only the first rank needs them.
        device: this rank's.
        facts: what is written beside each checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        learners: Mapping[str, Learner],
        teacher: Teacher,
        windows: Windows,
        scripts: list[Script],
        device: torch.device,
        facts: dict[str, Any],
    ):
        self.config, self.teacher, self.windows = config, teacher, windows
        self.scripts, self.device, self.facts = scripts, device, facts
        self.rank, self.ranks = world()
        self.micro = config.micro_batch or max(1, config.batch // self.ranks)
        if config.batch % (self.micro * self.ranks):
            raise TrainError(
                f"A batch of {config.batch} windows cannot be shared by {self.ranks} devices that "
                f"take {self.micro} at once: make batch a multiple of {self.micro * self.ranks}."
            )
        self.students = {name: Student(learner, config) for name, learner in learners.items()}
        if scripts and not any(s.prompt + JUDGED_DEPTH + 1 < len(s.tokens) for s in scripts):
            raise TrainError(
                f"None of the {config.hold_out} held-out texts goes on for {JUDGED_DEPTH + 2} "
                "tokens after its prompt: hold out more, or none."
            )
        self.steps = config.num_steps(len(windows))
        self.step, self.seconds = 0, 0.0
        self._began = time.monotonic()

    def run(self, progress: bool = True) -> None:
        """Train to the end, saving on the way."""
        config = self.config
        folder = config.out / STATE_DIR
        tracker = Tracker(config.track, folder, config.model_dump(mode="json"))
        hidden = not progress or self.rank != 0
        with tqdm(total=self.steps, initial=self.step, unit="step", disable=hidden) as bar:
            while self.step < self.steps:
                if self._out_of_time():
                    self.save()
                    if self.rank == 0:
                        bar.write(
                            f"Stopped after {config.minutes:g} minutes, at update {self.step} of "
                            f"{self.steps}: the same call goes on."
                        )
                    return
                self.update()
                bar.update()
                last = self.step == self.steps
                if last or self.step % config.log_every == 0:
                    for name, entry in self.log().items():
                        bar.set_postfix_str(describe(entry))
                        tracker.log(name, entry)
                if config.hold_out and (last or self.step % config.eval_every == 0):
                    for name, entry in self.judge().items():
                        bar.write(f"step {self.step} {name}: τ {entry['tau']:.3f}")
                        tracker.log(name, entry)
                if last or self.step % config.save_every == 0:
                    self.save()

    def _out_of_time(self) -> bool:
        """Whether to stop now, decided by the first rank."""
        if self.config.minutes is None:
            return False
        late = torch.tensor(float(self._this_call() > 60 * self.config.minutes))
        if self.ranks > 1:
            late = late.to(self.device)
            dist.broadcast(late, 0)
        return bool(late)

    def update(self) -> None:
        """One optimiser update of every learner."""
        config = self.config
        rounds = config.batch // (self.micro * self.ranks)
        if rounds > 1:
            self._learn_in_parts(rounds)
        else:
            with self._arithmetic():
                lesson = self._lesson(0)
                for student in self.students.values():
                    student.learn(lesson, None, more_to_come=False)
        rate = learning_rate(config, self.step, self.steps)
        for name, student in self.students.items():
            student.step(rate, config.clip)
            if student.lost == _LOST_IN_A_ROW:
                raise TrainError(
                    f"The gradient of {name} has not been finite for {student.lost} updates, to "
                    f"number {self.step}: start anew (--no-resume) with a learning rate below "
                    f"{config.lr}."
                )
        self.step += 1

    def _lesson(self, turn: int) -> Lesson:
        """Micro-batch number `turn` of this rank's share of the update to come."""
        config = self.config
        batch = self.windows.batch(self.step, config.batch, config.seed)
        first = (turn * self.ranks + self.rank) * self.micro
        mine = batch[slice(first, first + self.micro)].to(self.device)
        return Lesson(
            mine,
            self.teacher.teach(mine),
            self.teacher.embed,
            self.step,
            seed=config.seed * 1_000_003 + self.step,  # one cut for the whole batch
        )

    def _learn_in_parts(self, rounds: int) -> None:
        """Count all micro-batches, then learn from them: see `BatchCounts`.

        Features are kept in between, p* is not: it would take far more memory than time.
        """
        counts = {name: BatchCounts(rounds) for name in self.students}
        lessons = []
        with self._arithmetic():
            for turn in range(rounds):
                lesson = self._lesson(turn)
                for name, student in self.students.items():
                    student.count(lesson, counts[name])
                bare = lesson.teaching._replace(law=torch.empty(0))
                lessons.append(dataclasses.replace(lesson, teaching=bare))
        for count in counts.values():
            count.finish()
        # Another context: autocast would take the weights that it cast without a gradient.
        with self._arithmetic():
            for turn, lesson in enumerate(lessons):
                law = self.teacher.law(lesson.teaching.last)
                whole = dataclasses.replace(lesson, teaching=lesson.teaching._replace(law=law))
                for name, student in self.students.items():
                    student.learn(whole, counts[name], more_to_come=turn < rounds - 1)

    def _arithmetic(self):
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def log(self) -> dict[str, dict[str, Any]]:
        """A log entry of every learner."""
        about = {
            "step": self.step,
            "learning_rate": learning_rate(self.config, self.step - 1, self.steps),
            "seconds": round(self._elapsed(), 3),
        }
        return {name: student.journal.entry(**about) for name, student in self.students.items()}

    def judge(self) -> dict[str, dict[str, Any]]:
        """Replay every learner; keep those that are better than ever in OUT/best."""
        found = {}
        for name, student in self.students.items():
            learner = student.spread.whole()
            if self.rank == 0:
                tau, _ = mean_tau(learner.draft_along, self.scripts, JUDGED_DEPTH)
                found[name] = {"step": self.step, "tau": round(tau, 4)}
                student.journal.entries.append(found[name])
                if tau > student.best_tau:
                    student.best_tau = tau
                    self._keep(learner, self.folder(name) / BEST_DIR)
        if self.ranks > 1:
            dist.barrier()
        return found

    def folder(self, name: str) -> Path:
        """Where the learner `name` is written."""
        return self.config.out if len(self.students) == 1 else self.config.out / name

    def save(self) -> None:
        """Write the drafters, then the state that goes with them. Every file is written aside
        and renamed: whatever kills the run, the last whole state stays."""
        folder = self.config.out / STATE_DIR
        self.keep()
        students = {name: student.state() for name, student in self.students.items()}
        if self.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name, student in self.students.items():
            log = f"{name}.jsonl" if len(self.students) > 1 else "log.jsonl"
            student.journal.write(folder / log)
        state = {
            "options": json.dumps(self.config.must_match()),
            "data": self.windows.fingerprint,
            "step": self.step,
            "seconds": self._elapsed(),
            "students": students,
        }
        replace(folder / "state.pt", lambda aside: torch.save(state, aside))

    def keep(self) -> None:
        """Write the drafters as they are."""
        for name, student in self.students.items():
            learner = student.spread.whole()
            if self.rank == 0:
                self._keep(learner, self.folder(name))

    def _keep(self, learner: Learner, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        learner.save(folder)
        provenance.write(folder, self.facts | {"step": self.step, "seconds": self._elapsed()})

    def restore(self) -> None:
        """Go on from the state in `config.out`, if there is one.

        Raises:
            TrainError: it belongs to other options, other data or other learners.
        """
        path = self.config.out / STATE_DIR / "state.pt"
        self._agree(path.exists(), path)
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise TrainError(f"{path} is no training state: {error}.") from None
        if not isinstance(state, dict) or "options" not in state:
            raise TrainError(f"{path} is no training state of this version; give another --out.")
        before, now = json.loads(state["options"]), self.config.must_match()
        for name, value in now.items():
            # An option that is newer than the state had no other value than its default.
            then = before.get(name, type(self.config).model_fields[name].default)
            if then != value:
                raise TrainError(
                    f"{path} was trained with {name} = {then}, not {value}; "
                    "give the same options, another --out, or --no-resume to start anew."
                )
        if state["data"] != self.windows.fingerprint:
            raise TrainError(
                f"{path} was trained on other data than {self.config.data}; give the same data, "
                "another --out, or --no-resume to start anew."
            )
        if state["students"].keys() != self.students.keys():
            raise TrainError(
                f"{path} holds {', '.join(state['students'])}, not {', '.join(self.students)}; "
                "give another --out, or --no-resume to start anew."
            )
        for name, student in self.students.items():
            student.load_state(state["students"][name], self.device)
        self.step, self.seconds = state["step"], state["seconds"]
        self._began = time.monotonic()

    def _agree(self, found: bool, path: Path) -> None:
        """Every rank reads the state: hosts must share the folder that it lies in."""
        if self.ranks == 1:
            return
        answers: list[bool] = [False] * self.ranks
        dist.all_gather_object(answers, found)
        if len(set(answers)) > 1:
            raise TrainError(
                f"Only some ranks see {path}: --out must be on a folder that all share."
            )

    def forget(self) -> None:
        """Take away what an earlier run left that this one could be taken for."""
        if self.rank == 0:
            (self.config.out / STATE_DIR / "state.pt").unlink(missing_ok=True)
            for name in self.students:
                shutil.rmtree(self.folder(name) / BEST_DIR, ignore_errors=True)

    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds + self._this_call()

    def _this_call(self) -> float:
        return time.monotonic() - self._began


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Rate of update `step` (0-based) of `steps`: linear warm-up, then a cosine to 0."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
