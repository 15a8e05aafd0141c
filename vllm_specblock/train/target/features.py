"""Target outputs: hidden states and next-token probabilities of the frozen target, from a forward
or from the features on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.batch import NO_TOKEN, Batch
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.target.feature_store import FeatureStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TargetOutputs(NamedTuple):
    """One target forward over B windows of L columns; documents do not see each other.

    hidden: [B, L, 3·Ht], un-normed residual stream of the low, mid and high layer (eq. 1's input).
    last: [B, L, Ht], what the target's LM head reads: after the last layer and the final norm.
    head: [Vd, Ht], the target's LM head over the draft vocabulary.
    target_probs: [B, L, Vd] fp32, p*: the target's next-token probabilities after each token,
        restricted to the draft vocabulary and renormalised (eq. 6). Computed anew at each access,
        to save memory.
    """

    hidden: Tensor
    last: Tensor
    head: Tensor

    @property
    @torch.no_grad()
    def target_probs(self) -> Tensor:
        return linear(self.last, self.head.to(self.last.dtype)).float().softmax(-1)


class Teacher(ABC):
    """Source of `TargetOutputs`. embed: target ids [...] -> rows of the target's table."""

    embed: Callable[[Tensor], Tensor]

    @abstractmethod
    def teach(self, batch: Batch) -> TargetOutputs:
        """Return the outputs over a batch; zeros past each window's last document are allowed."""


class OnlineTeacher(Teacher):
    """Runs the frozen target over each batch. layer_ids: indices into transformers'
    `hidden_states` (0 = embeddings); draft_ids: [Vd] int64, target ids of the draft vocabulary."""

    def __init__(
        self, target: PreTrainedModel, layer_ids: tuple[int, ...], draft_ids: Tensor
    ) -> None:
        self.decoder, self.layer_ids = target.get_decoder(), layer_ids
        self.embed = partial(embedding, weight=target.get_input_embeddings().weight)
        # Only rows of the draft vocabulary, to avoid logits over the whole vocabulary.
        self.head = target.get_output_embeddings().weight[draft_ids]

    @torch.no_grad()
    def teach(self, batch: Batch) -> TargetOutputs:
        # transformers separates documents where positions restart.
        output = self.decoder(
            input_ids=batch.tokens.clamp(min=0),
            position_ids=batch.position,
            output_hidden_states=True,
            use_cache=False,
        )
        hidden = torch.cat([output.hidden_states[layer] for layer in self.layer_ids], dim=-1)
        return TargetOutputs(hidden, output.last_hidden_state, self.head)


class StoredTeacher(Teacher):
    """Reads the outputs of `OnlineTeacher` from features that `specblock features` wrote.

    Of the target it loads the embedding and the rows of the LM head that p* needs.

    Args:
        draft_ids: [Vd] int64, the target ids of the draft vocabulary.
        device, dtype: of all outputs but p*, which is fp32.
        expected: `layer_ids`, `length`, `data` (`feature_store.fingerprint` of the sequences) of
            the features; `TrainError` where they differ.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        draft_ids: Tensor,
        device: torch.device | str,
        dtype: torch.dtype,
        **expected: Any,
    ) -> None:
        self.store = FeatureStore(folder, target=target_rows.fingerprint(target), **expected)
        self.device, self.dtype = device, dtype
        self.head = target_rows.head_rows(target, draft_ids).to(self.device, dtype)
        rows = target_rows.embedding_rows(target).to(self.device, dtype)
        self.embed = partial(embedding, weight=rows)

    @torch.no_grad()
    def teach(self, batch: Batch) -> TargetOutputs:
        """Features of a batch on any device; zeros past each window's last document. Raises
        `TrainError` where a piece is not on disk, or has other tokens there."""
        shape, width = batch.tokens.shape, self.head.shape[1]
        hidden = torch.zeros(*shape, 3 * width, dtype=self.dtype)
        last = torch.zeros(*shape, width, dtype=self.dtype)
        tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32)
        for window, segments in enumerate(batch.segments):
            column = 0
            for segment in segments:
                here = slice(column, column + segment.length)
                features, tokens[window, here] = self.store.read(segment)
                hidden[window, here], last[window, here] = features
                column += segment.length
        if not torch.equal(tokens, batch.tokens.int().cpu()):
            raise TrainError(
                f"The features in {self.store.folder} are of other data: tokens of this batch "
                "differ from those that the target has seen."
            )
        return TargetOutputs(hidden.to(self.device), last.to(self.device), self.head)


def load_target(path: Path, precision: str, device: torch.device) -> PreTrainedModel:
    """Return the frozen target, a transformers causal LM; raises `TrainError` if missing."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    target = loaded(AutoModelForCausalLM, path, "cannot be loaded", dtype=dtype)
    return target.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; raises `TrainError` if it has none."""
    from transformers import AutoTokenizer

    return loaded(AutoTokenizer, path, "has no tokenizer")


def loaded(kind: Any, path: Path, fault: str, **options: Any) -> Any:
    """Load the target's files by transformers' class `kind`; raises `TrainError` with `fault`."""
    try:
        return kind.from_pretrained(str(path), **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip()
        # A line that ends in a colon introduces a list, which does not fit into a sentence.
        why = "." if reason.endswith(":") else f": {reason}"
        raise TrainError(f"The target {path} {fault}{why}") from error
