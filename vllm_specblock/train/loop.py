"""The training loop: one pass over the frozen target's features, one or several learners.

Several learners see the same data in the same order and pay for the target once; `specblock
train` has one. The state on disk survives a kill at any point.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from vllm_specblock.train import provenance
from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.distributed import world
from vllm_specblock.train.journal import Journal, Tracker, describe
from vllm_specblock.train.judge.replay import mean_tau
from vllm_specblock.train.learner import Learner, Lesson, Script
from vllm_specblock.train.parallel import Spread
from vllm_specblock.train.teacher.features import Teacher
from vllm_specblock.train.text.shards import replace
from vllm_specblock.train.text.windows import Windows

BETAS = (0.9, 0.999)
STATE_DIR = "training"
BEST_DIR = "best"
JUDGED_DEPTH = 8
"""Tokens that a step along a text must have before it, the same for every learner."""


class Student:
    """A learner with its optimiser and its log, spread over the ranks."""

    def __init__(self, learner: Learner, config: RunConfig):
        self.spread = Spread(learner, config.parallel)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.spread.parameters if p.requires_grad],
            lr=config.lr,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.journal = Journal()
        self.best_tau = 0.0

    def learn(self, lesson: Lesson, share: float, more_to_come: bool) -> None:
        """Add up the gradients of one micro-batch, which is `share` of the batch."""
        with self.spread.adding_up(more_to_come):
            outcome = self.spread.module(lesson)
            (outcome.loss * share).backward()
        self.journal.add(outcome)

    def step(self, rate: float, clip: float) -> bool:
        """Update the weights; False, and no update, if the gradient is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self.spread.parameters, clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not norm.isfinite():
            return False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def state(self) -> dict[str, Any]:
        return {
            **self.spread.state(self.optimizer),
            "journal": self.journal.state(),
            "best_tau": self.best_tau,
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        self.spread.load_state(self.optimizer, state)
        self.journal.load_state(state["journal"], device)
        self.best_tau = state["best_tau"]


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
                    bar.write(f"Stopped after {config.minutes:g} minutes, at update {self.step}.")
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
        batch = self.windows.batch(self.step, config.batch, config.seed)
        rounds = config.batch // (self.micro * self.ranks)
        for turn in range(rounds):
            first = (turn * self.ranks + self.rank) * self.micro
            mine = batch[slice(first, first + self.micro)].to(self.device)
            with self._arithmetic():
                lesson = Lesson(
                    mine,
                    self.teacher.teach(mine),
                    self.teacher.embed,
                    self.step,
                    seed=(config.seed * 1_000_003 + self.step) * 1_009 + turn,
                )
                for student in self.students.values():
                    student.learn(lesson, 1 / rounds, more_to_come=turn < rounds - 1)
        rate = learning_rate(config, self.step, self.steps)
        for name, student in self.students.items():
            if not student.step(rate, config.clip):
                raise TrainError(
                    f"The gradient of {name} at update {self.step} is not finite; lower the "
                    f"learning rate ({config.lr}) and go on from the last save."
                )
        self.step += 1

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
            "data": self.windows.fingerprint(),
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
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise TrainError(f"{path} is no training state: {error}.") from None
        before, now = json.loads(state["options"]), self.config.must_match()
        for name, value in now.items():
            if before.get(name) != value:
                raise TrainError(
                    f"{path} was trained with {name} = {before.get(name)}, not {value}; "
                    "give the same options, another --out, or --no-resume to start anew."
                )
        if state["data"] != self.windows.fingerprint():
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
