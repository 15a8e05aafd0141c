"""Training loop of a drafter; the state on disk survives a kill at any point."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.data.packed_dataset import PackedDataset
from vllm_specblock.train.data.shards import replace
from vllm_specblock.train.distributed import BatchCounts, sum_over_ranks, world
from vllm_specblock.train.eval import model_card
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.learner import EvalSequence, Learner, TrainBatch
from vllm_specblock.train.optimizers import learning_rate
from vllm_specblock.train.target.features import Teacher
from vllm_specblock.train.train_state import TrainState, describe, read_state

STATE_DIR = "training"
BEST_DIR = "best"
JUDGED_DEPTH = 8
"""Minimum tokens before a step along a text, equal for every drafter."""

_LOST_IN_A_ROW = 20
"""Consecutive updates without a finite gradient after which a run is aborted."""


class Trainer:
    """One run. `step` counts the updates done.

    Args:
        learner: on `device`, float32; its drafter is written to `config.out`.
        windows: training text.
        sequences: held-out texts to draft along; only the first rank needs them.
        facts: written beside each checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        teacher: Teacher,
        windows: PackedDataset,
        sequences: list[EvalSequence],
        device: torch.device,
        facts: dict[str, Any],
    ) -> None:
        self.config, self.teacher, self.windows = config, teacher, windows
        self.sequences, self.device, self.facts = sequences, device, facts
        self.rank, self.ranks = world()
        self.micro = config.micro_batch or max(1, config.batch // self.ranks)
        if config.batch % (self.micro * self.ranks):
            raise TrainError(
                f"A batch of {config.batch} windows cannot be shared by {self.ranks} devices that "
                f"take {self.micro} at once: make batch a multiple of {self.micro * self.ranks}."
            )
        self.train_state = TrainState(learner, config)
        self._state_file = config.out / STATE_DIR / "state.pt"
        if sequences and not any(s.prompt + JUDGED_DEPTH + 1 < len(s.tokens) for s in sequences):
            raise TrainError(
                f"None of the {config.hold_out} held-out texts has {JUDGED_DEPTH + 2} "
                "tokens after its prompt: hold out more, or none."
            )
        self.steps = config.num_steps(len(windows))
        self.step, self._began = 0, time.monotonic()
        self._until = self._began + 60 * (config.minutes or math.inf)

    def run(self, progress: bool = True) -> None:
        """Train to the end, with checkpoints."""
        config = self.config
        hidden = not progress or self.rank != 0
        with tqdm(total=self.steps, initial=self.step, unit="step", disable=hidden) as bar:
            while self.step < self.steps:
                if self._out_of_time():
                    self.save()
                    if self.rank == 0:
                        bar.write(
                            f"Stopped after {config.minutes:g} minutes, at update {self.step} of "
                            f"{self.steps}: the same command resumes."
                        )
                    return
                self.update()
                bar.update()
                last = self.step == self.steps
                if last or self.step % config.log_every == 0:
                    bar.set_postfix_str(describe(self.log()))
                if config.hold_out and (last or self.step % config.eval_every == 0):
                    tau = self.judge()
                    if self.rank == 0:
                        bar.write(f"step {self.step}: τ {tau:.3f}")
                if last or self.step % config.save_every == 0:
                    self.save()

    def _out_of_time(self) -> bool:
        """Return whether to stop now: as soon as any rank is late."""
        if self.config.minutes is None:
            return False
        late = torch.tensor(float(time.monotonic() > self._until), device=self.device)
        return bool(sum_over_ranks(late))

    def update(self) -> None:
        """One optimiser update."""
        config, train_state = self.config, self.train_state
        rounds = config.batch // (self.micro * self.ranks)
        counts = BatchCounts(rounds)
        with self._arithmetic():
            train_batches = [self._train_batch(turn, counts) for turn in range(rounds)]
            for train_batch in train_batches if rounds > 1 else ():
                train_state.count(train_batch)
        counts.finish()
        # A new context, or autocast would reuse weights cast without a gradient.
        with self._arithmetic():
            for turn, train_batch in enumerate(train_batches, start=1):
                train_state.learn(train_batch, more_to_come=turn < rounds)
        train_state.step(learning_rate(config, self.step, self.steps), config.clip)
        if train_state.lost == _LOST_IN_A_ROW:
            raise TrainError(
                f"The gradient has not been finite for {train_state.lost} updates, to number "
                f"{self.step}: start anew (--no-resume) with a learning rate below {config.lr}."
            )
        self.step += 1

    def _train_batch(self, turn: int, counts: BatchCounts) -> TrainBatch:
        """Return micro-batch `turn` of this rank for the next update."""
        config = self.config
        number = (self.step * counts.rounds + turn) * self.ranks + self.rank
        batch = self.windows.batch(number, self.micro, config.seed).to(self.device)
        return TrainBatch(
            batch,
            self.teacher.teach(batch),
            self.teacher.embed,
            self.step,
            config.seed * 1_000_003 + self.step,  # the same cuts for the whole batch
            counts,
        )

    def _arithmetic(self) -> torch.autocast:
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def log(self) -> dict[str, Any]:
        """Add an entry to the log and return it."""
        return self.train_state.metrics_log.entry(
            step=self.step,
            learning_rate=learning_rate(self.config, self.step - 1, self.steps),
            seconds=round(self.seconds, 3),
        )

    def judge(self) -> float:
        """Replay the drafter, and write it to OUT/best if it is the best so far.

        Returns τ; NaN on all ranks but the first, which replays.
        """
        train_state, tau = self.train_state, math.nan
        learner = train_state.whole()
        if self.rank == 0:
            tau = replay(learner.draft_along, self.sequences, JUDGED_DEPTH).tau
            entry = {"step": self.step, "tau": round(tau, 4)}
            train_state.metrics_log.entries.append(entry)
            if tau > train_state.best_tau:
                train_state.best_tau = tau
                self._keep(learner, self.config.out / BEST_DIR, tau)
        if self.ranks > 1:
            dist.barrier()
        return tau

    def save(self) -> None:
        """Write the drafter, then the state; after a kill, the previous one is intact."""
        self.keep()
        learner = self.train_state.state()
        if self.rank != 0:
            return
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        self.train_state.metrics_log.write(self._state_file.with_name("log.jsonl"))
        state = {
            "options": json.dumps(self.config.must_match()),
            "data": self.windows.fingerprint,
            "step": self.step,
            "seconds": self.seconds,
            "learners": {"drafter": learner},
        }
        replace(self._state_file, lambda aside: torch.save(state, aside))

    def keep(self) -> None:
        """Write the current drafter."""
        learner = self.train_state.whole()
        if self.rank == 0:
            tau = self.train_state.metrics_log.tau_at(self.step)
            self._keep(learner, self.config.out, tau)

    def _keep(self, learner: Learner, folder: Path, tau: float | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        learner.save(folder)
        model_card.write(folder, self.facts | {"step": self.step, "seconds": self.seconds}, tau)

    def restore(self) -> None:
        """Resume from the state in `config.out`, if any; raises `TrainError` for another run's, or
        if only some ranks see it."""
        path = self._state_file
        found = torch.tensor(float(path.exists()), device=self.device)
        if float(sum_over_ranks(found)) not in (0.0, self.ranks):
            raise TrainError(
                f"Only some ranks see {path}: --out must be on a folder that all share."
            )
        if not found:
            return
        state = read_state(path, self.config, self.windows.fingerprint)
        self.train_state.load_state(state["learners"]["drafter"], self.device)
        self.step, self._began = state["step"], time.monotonic() - state["seconds"]

    def forget(self) -> None:
        """Delete the state and the best drafter of an earlier run."""
        if self.rank == 0:
            self._state_file.unlink(missing_ok=True)
            shutil.rmtree(self.config.out / BEST_DIR, ignore_errors=True)

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a resume."""
        return time.monotonic() - self._began
