"""Target outputs: hidden states and next-token probabilities of the frozen target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TargetOutputs(NamedTuple):
    """One target forward over B windows of L columns; documents do not see each other.

    hidden: [B, L, 3·Ht], un-normed residual stream of the low, mid and high layer (eq. 1's input).
    last: [B, L, Ht], what the target's LM head reads: after the last layer and the final norm.
    target_probs: [B, L, Vd] fp32, p*: the target's next-token probabilities after each token,
        restricted to the draft vocabulary and renormalised (eq. 6).
    """

    hidden: Tensor
    last: Tensor
    target_probs: Tensor


class Teacher(Protocol):
    """Where a batch's `TargetOutputs` comes from: a forward of the target, or the disk."""

    def teach(self, batch: Batch) -> TargetOutputs: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [...] int64 -> the target's own embeddings [..., Ht]."""
        ...

    def target_probs(self, last: Tensor) -> Tensor:
        """`TargetOutputs.target_probs` of `TargetOutputs.last`."""
        ...


class OnlineTeacher:
    """Runs the frozen target over each batch.

    Args:
        target: a transformers causal LM.
        layer_ids: indices into transformers' `hidden_states` (0 = embeddings).
        draft_ids: [Vd] int64, the target ids of the draft vocabulary.
    """

    def __init__(
        self, target: PreTrainedModel, layer_ids: tuple[int, ...], draft_ids: Tensor
    ) -> None:
        self.decoder, self.layer_ids = target.get_decoder(), layer_ids
        self.embedding = target.get_input_embeddings()
        # Only the rows that the distribution is restricted to: no logits over the whole vocabulary.
        self.head = target.get_output_embeddings().weight[draft_ids]

    @torch.no_grad()
    def teach(self, batch: Batch) -> TargetOutputs:
        # transformers keeps documents apart where positions start anew.
        output = self.decoder(
            input_ids=batch.tokens.clamp(min=0),
            position_ids=batch.position,
            output_hidden_states=True,
            use_cache=False,
        )
        hidden = torch.cat([output.hidden_states[layer] for layer in self.layer_ids], dim=-1)
        last = output.last_hidden_state
        return TargetOutputs(hidden, last, self.target_probs(last))

    @torch.no_grad()
    def target_probs(self, last: Tensor) -> Tensor:
        return target_probs_of(last, self.head)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def target_probs_of(last: Tensor, head: Tensor) -> Tensor:
    """p* over the draft vocabulary. last [..., Ht], head [Vd, Ht] -> [..., Vd] fp32."""
    return linear(last, head.to(last.dtype)).float().softmax(-1)


def load_target(path: Path, precision: str, device: torch.device) -> PreTrainedModel:
    """The frozen target, a transformers causal LM.

    Raises:
        TrainError: there is no such model.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    try:
        target = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    except (OSError, ValueError) as error:
        raise TrainError(f"The target {path} cannot be loaded: {first_line(error)}") from error
    return target.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer; raises `TrainError` where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise TrainError(f"The target {path} has no tokenizer: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of another library says first; the rest is for its own readers."""
    return str(error).strip().split("\n")[0]
