"""The trainer: one device, a frozen target beside the drafter, and a state that survives kills."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_specblock.draft import checkpoint
from vllm_specblock.draft.config import CheckpointError, default_layer_ids
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.train import data
from vllm_specblock.train.config import TrainConfig, TrainError
from vllm_specblock.train.features import first_line, load_target, load_tokenizer, teach
from vllm_specblock.train.objective import Objective, Unroll

BETAS = (0.9, 0.999)
STATE_DIR = "training"


def train(config: TrainConfig, resume: bool = True, progress: bool = True) -> Path:
    """Train a drafter and leave it in `config.out`, as vLLM loads it.

    The state lies in `config.out/training`. With `resume`, a run that was stopped at whatever
    point goes on from its last save and ends in the weights that an unbroken run ends in.

    Args:
        config: all options.
        resume: go on from a state that is there; otherwise start anew and replace it.
        progress: show a progress bar.

    Returns:
        config.out.

    Raises:
        TrainError: data, target, drafter or state cannot be used, or the loss is not finite.
    """
    run = Trainer(config)
    if resume:
        run.restore()
    with tqdm(
        total=config.steps, initial=run.step, desc="train", unit="step", disable=not progress
    ) as bar:
        while run.step < config.steps:
            run.update()
            bar.update()
            if run.step % config.log_every == 0 or run.step == config.steps:
                bar.set_postfix_str(describe(run.log()))
            if run.step % config.save_every == 0 or run.step == config.steps:
                run.save()
    return config.out


class Trainer:
    """Everything that one run holds. `step` counts the updates done."""

    def __init__(self, config: TrainConfig):
        self.config, self.device = config, usable_device(config.device)
        self.target = load_target(config.target, config.precision, self.device)
        self.embed = self.target.get_input_embeddings()
        # One past the context plus a whole block is the least that has a label at every k.
        self.windows = data.load(
            config.data,
            lambda: load_tokenizer(config.target),
            self.target.config.vocab_size,
            config.length,
            shortest=config.block_size + 2,
        )
        self.drafter = self._drafter().to(self.device, torch.float32).train()
        self.draft_ids = self.drafter.t2d.nonzero()[:, 0]
        self.layer_ids = self.drafter.config.target.layer_ids or default_layer_ids(
            self.target.config.num_hidden_layers
        )
        self.forward = (
            torch.compile(self.drafter.forward) if config.compiled else self.drafter.forward
        )
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=config.lr,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step, self.seconds, self.history = 0, 0.0, []
        self.cuts = torch.Generator().manual_seed(config.seed)  # its state is saved
        self._began = time.monotonic()
        self._clear_sums()

    def _drafter(self) -> SpecBlockDrafter:
        config, of_target = self.config, self.target.config
        try:
            if config.init is None:
                drafter = checkpoint.init(
                    config.target,
                    block_size=config.block_size,
                    num_layers=config.num_layers,
                    draft_vocab_size=min(config.draft_vocab_size, of_target.vocab_size),
                    layer_ids=config.layer_ids,
                    token_counts=self.windows.counts(of_target.vocab_size),
                    target_name=config.target_name,
                    seed=config.seed,
                )
                return self._with_target_head(drafter)
            drafter = checkpoint.load(config.init)
        except CheckpointError as error:
            raise TrainError(str(error)) from error
        for what in ("hidden_size", "vocab_size"):
            made_for, found = getattr(drafter.config.target, what), getattr(of_target, what)
            if made_for != found:
                raise TrainError(
                    f"The drafter in {config.init} is for a target whose {what} is {made_for}, "
                    f"but that of {config.target} is {found}."
                )
        return drafter

    @torch.no_grad()
    def _with_target_head(self, drafter: SpecBlockDrafter) -> SpecBlockDrafter:
        """Start from the target's LM head, its final norm folded in, not from noise.

        The drafter's last state then learns to be the target's, a task with far more signal
        than finding out anew which direction means which token.
        """
        rows = drafter.t2d.nonzero()[:, 0].to(self.device)
        head = self.target.get_output_embeddings().weight[rows].float()
        if head.shape == drafter.lm_head.weight.shape:
            drafter.lm_head.weight.copy_(head * self.target.get_decoder().norm.weight.float())
        return drafter

    def update(self) -> None:
        """One optimiser update."""
        config = self.config
        tokens = self.windows.batch(self.step, config.batch, config.seed).to(self.device)
        block_size = self.drafter.config.block_size
        cuts = torch.randint(
            1, block_size + 1, (config.num_blocks - 1,), generator=self.cuts
        ).tolist()
        with self._arithmetic():
            teaching = teach(self.target, tokens, self.layer_ids, self.draft_ids)
            unroll = Unroll(
                self.drafter,
                self.embed,
                tokens,
                teaching,
                mask_restart=config.mask_restart,
                loss_floor=config.loss_floor,
                forward=self.forward,
            )
            objective = unroll.objective(cuts, rank=self.step >= config.rank_from)
        objective.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)
        if not norm.isfinite():
            raise TrainError(
                f"The gradient of update {self.step} is not finite; lower the learning rate "
                f"({config.lr}) and go on from the last save."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._add(objective)

    def _arithmetic(self):
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def _clear_sums(self) -> None:
        shape = (self.config.num_blocks, self.drafter.config.block_size)
        self._rank = torch.zeros(2, device=self.device)  # rank loss, updates
        # Nats, hits, and positions on their path.
        self._sums = torch.zeros(3, *shape, device=self.device)

    @torch.no_grad()
    def _add(self, objective: Objective) -> None:
        for block, loss in enumerate(objective.blocks):
            self._rank[0] += loss.rank / len(objective.blocks)
            self._sums[:, block] += torch.stack([loss.nats, loss.hit.sum(0), loss.on_path.sum(0)])
        self._rank[1] += 1

    def log(self) -> dict:
        """Means since the last call, kept in the history and returned.

        Per block and position, over the positions on their path: `loss` in nats, and `accuracy`,
        the share at which the drafter's first choice was the text's token.
        """
        nats, hits, positions = self._sums
        rank, updates = self._rank.tolist()
        entry = {
            "step": self.step,
            "loss": (nats / positions.clamp(min=1)).tolist(),
            "accuracy": (hits / positions.clamp(min=1)).tolist(),
            "rank_loss": rank / max(1, updates),
            "learning_rate": learning_rate(self.config, self.step - 1),
            "seconds": self.seconds + time.monotonic() - self._began,
        }
        self._clear_sums()
        self.history.append(entry)
        return entry

    def save(self) -> None:
        """Write the drafter, then the state that goes with it. Every file is written aside and
        renamed: whatever kills the run, the last whole state stays."""
        folder = self.config.out / STATE_DIR
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save(_as_bf16(self.drafter), self.config.out)
        state = {
            "options": json.dumps(self.config.must_match()),
            "data": self._fingerprint(),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "cuts": self.cuts.get_state(),
            "sums": self._sums,
            "rank": self._rank,
            "history": json.dumps(self.history),
            "seconds": self.seconds + time.monotonic() - self._began,
        }
        partial = folder / "state.partial"
        torch.save(state, partial)
        partial.replace(folder / "state.pt")
        log = folder / "log.partial"
        log.write_text("".join(json.dumps(entry) + "\n" for entry in self.history))
        log.replace(folder / "log.jsonl")

    def restore(self) -> None:
        """Go on from the state in `config.out`, if there is one.

        Raises:
            TrainError: it belongs to other options or other data.
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
        if state["data"] != self._fingerprint():
            raise TrainError(
                f"{path} was trained on other data than {self.config.data}; give the same data, "
                "another --out, or --no-resume to start anew."
            )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.cuts.set_state(state["cuts"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._sums, self._rank = state["sums"].to(self.device), state["rank"].to(self.device)
        self.history = json.loads(state["history"])
        self._began = time.monotonic()

    def _fingerprint(self) -> str:
        return hashlib.sha256(self.windows.tokens.numpy().tobytes()).hexdigest()


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of update `step` (0-based): linear warm-up, then a cosine to 0."""
    warmup = math.ceil(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def describe(entry: dict) -> str:
    """A log entry as the progress bar shows it: block 1's loss, all blocks' accuracy."""
    accuracy = " | ".join(
        " ".join(f"{100 * share:.0f}" for share in block) for block in entry["accuracy"]
    )
    return f"nats {entry['loss'][0][0]:.2f} rank {entry['rank_loss']:.2f} right% {accuracy}"


def usable_device(name: str) -> torch.device:
    """The torch device called `name`; raises `TrainError` where this machine has none such."""
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise TrainError(f"The device {name} cannot be used: {first_line(error)}") from error


def _as_bf16(drafter: SpecBlockDrafter) -> SpecBlockDrafter:
    return copy.deepcopy(drafter).to("cpu", torch.bfloat16)
