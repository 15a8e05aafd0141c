"""Learners whose every row drafts K positions with one LM head.

Row i has the target's features of x_i and the token x_{i+1}, the root; its position k = 1..K
predicts x_{i+1+k}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import safetensors.torch
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from baselines.groups import draw_weights, shape_like
from vllm_specblock.drafters.common.checkpoint_files import CONFIG, WEIGHTS
from vllm_specblock.drafters.common.layers import DraftLM
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.drafters.registry import DRAFTERS
from vllm_specblock.train.data.shards import replace, write_json
from vllm_specblock.train.eval.drafting import ServedDraft
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    EvalSequence,
    Learner,
    LossOutput,
    TrainBatch,
    draft_labels,
)
from vllm_specblock.train.losses import head_loss

LAYER_KEYS = {
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("intermediate_size", "num_hidden_layers", "vocab_size", "rope_theta", "rope_scaling"),
}
"""Keys of any published drafter's config.json."""

DECAY = 0.8
"""Weight of a position's loss relative to the position before, in Medusa and in EAGLE-3."""


def served(
    kind: type[NetworkDrafter],
    network: nn.Module,
    nodes: int,
    sequence: EvalSequence,
    slots: int | None = None,
    layers: tuple[int, ...] = (0, 1, 2),
    **options: Any,
) -> ServedDraft:
    """Draft along a text with the drafter that serves, in trees of `nodes` nodes.

    slots: of the cache, after the root; layers: indices into the features; options: of the kind.
    """
    made = DRAFTERS[kind.kind].options(calibrate_drafts=False, **options)
    drafter = kind(network, sequence.embed, made, nodes, 1, slots, layers)
    return ServedDraft(drafter, sequence, slots=slots)


def write_folder(
    directory: Path, kind: str | None, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write config.json and model.safetensors, floating-point tensors in bf16.

    kind: None where the layout of config.json names the drafter by itself.
    """
    stored = {
        name: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().clone()
        for name, value in tensors.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    replace(
        directory / WEIGHTS,
        lambda aside: safetensors.torch.save_file(stored, aside, {"format": "pt"}),
    )
    named = {} if kind is None else {KIND: kind}
    write_json(directory / CONFIG, config | named | {"torch_dtype": "bfloat16"})


class Positions(DraftLM):
    """LM head over the draft vocabulary; `norm` is set by the network."""

    def __init__(self, hidden_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)
        # Until it is loaded: the first Vd target ids.
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))


class PositionsLearner(Learner):
    """First weights, and the loss of K positions; goes before the network among the base classes.

    Args:
        d2t: [Vd] int64, target id − draft id.
        t2d: [V] bool, whether a target id has a draft id.
        head: [Vd, H], first weights of the LM head; None: random.
        budget: N, nodes of a drafted tree.

    Attributes:
        config_class: of the network; defaults: its fields that are not as the target's.
    """

    config_class: type[BaseModel]
    defaults: ClassVar[dict[str, Any]] = {}
    lm_head: nn.Linear
    d2t: Tensor
    norm: Any

    def __init__(
        self, shape: Any, d2t: Tensor, t2d: Tensor, head: Tensor | None = None, budget: int = 60
    ) -> None:
        super().__init__(shape)
        self.budget = budget
        self.draw()
        self.register_buffer("t2d", t2d.clone())
        self.take_head(d2t, head)

    def draw(self) -> None:
        """Draw the first weights of everything but the LM head."""
        draw_weights(getattr(self, "trunk", self))

    def save(self, directory: Path) -> None:
        """Write what we serve."""
        name = type(self).__name__
        config = {"architectures": [name]} | self.config.model_dump(mode="json")
        write_folder(directory, name.lower(), config, self.state_dict())

    def take_head(self, d2t: Tensor, head: Tensor | None) -> None:
        """Set the draft vocabulary and the LM head's first weights."""
        self.d2t.copy_(d2t)
        weight = self.lm_head.weight
        if head is None:
            head = torch.randn(weight.shape) * weight.shape[1] ** -0.5
        weight.data.copy_(head)

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        budget: int = 60,
        **sizes: Any,
    ) -> Self:
        """Return a drafter for a target; the global generator is left alone.

        target_config: of transformers; seed: of the weights; sizes: fields of `config_class`.
        """
        shape = shape_like(cls.config_class, target_config, len(d2t), **cls.defaults | sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(shape, d2t, t2d, head, budget)

    def outcome(
        self, states: Tensor, train_batch: TrainBatch, weights: Sequence[float], blocks: int = 1
    ) -> LossOutput:
        """Cross-entropy to the target's law at every position, also after wrong ones.

        Args:
            states: [B, L − 1, K, H], of all rows but the last, which has no root.
            weights: of the K positions' means in the loss, which is their weighted mean.
            blocks: M, into which the K positions are split.

        Returns:
            nats, hits and seen as [M, K / M], of the rows whose earlier positions were right.
        """
        windows, length = train_batch.batch.tokens.shape
        target_probs = train_batch.target_outputs.target_probs.flatten(0, 1)
        place = torch.arange(windows * length, device=target_probs.device).view(windows, length)
        head = self.lm_head.weight.to(states.dtype)
        sums = []
        right = torch.ones_like(train_batch.batch.loss_mask[:, :-1])
        for k, (rows, loss_mask, wanted) in enumerate(self.positions(states, train_batch), 1):
            inside = loss_mask.shape[1]
            target_row = place[:, k : k + inside][loss_mask]
            total, ce_loss, best = loss_and_choice(self.norm(rows), head, target_probs, target_row)
            so_far = right[:, :inside][loss_mask]
            hit = so_far & (best == wanted)
            right = torch.zeros_like(right)
            right[:, :inside][loss_mask] = hit
            seen = so_far.sum(), hit.sum(), (ce_loss * so_far).sum()
            sums.append((total, loss_mask.sum(), *seen))
        total, count, seen, hits, ce_loss = (torch.stack(column) for column in zip(*sums))
        weight = torch.tensor(weights, device=total.device)
        loss = (train_batch.counts.mean(total, count) * weight).sum() / weight.sum()
        shown = (each.float().view(blocks, -1) for each in (ce_loss, hits, seen))
        return LossOutput(loss, *shown, loss.new_zeros(()))

    def positions(
        self, states: Tensor, train_batch: TrainBatch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each position k of states [B, L − 1, K, H] the rows whose label counts: their
        states [n, H], the rows [B, r] bool of those with position k in the window, labels [n]."""
        batch = train_batch.batch
        label = draft_labels(self.t2d, batch)
        length = label.shape[1]
        row = torch.arange(length - 1, device=label.device).expand(len(label), -1)
        # The target drew a row's root itself: serving drafts from no other row.
        live = batch.at(batch.loss_mask, row, row + 1, False)
        for k in range(1, states.shape[2] + 1):
            inside = max(0, length - 1 - k)
            wanted = batch.at(label, row, row + 1 + k, IGNORE_INDEX)[:, :inside]
            loss_mask = live[:, :inside] & (wanted != IGNORE_INDEX)
            yield states[:, :inside, k - 1][loss_mask], loss_mask, wanted[loss_mask]


def loss_and_choice(
    normed: Tensor, head: Tensor, target_probs: Tensor, target_row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `head_loss` (sum [] fp32, rows [n] fp32), and the drafter's choices [n] int64."""
    best = torch.empty_like(target_row)

    def look(rows: slice, logits: Tensor) -> None:
        best[rows] = logits.argmax(-1)

    return *head_loss(normed, head.to(normed.dtype), target_probs, target_row, look), best
