"""What the frozen target tells the drafter: its hidden states and its next-token law."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError


class Teaching(NamedTuple):
    """One target forward over B windows of L tokens.

    hidden: [B, L, 3·Ht], un-normed residual stream of the low, mid and high layer (eq. 1's input).
    law: [B, L, Vd] fp32, p*: the target's next-token probabilities after each token, restricted
        to the draft vocabulary and renormalised (eq. 6).
    """

    hidden: Tensor
    law: Tensor


@torch.no_grad()
def teach(
    target: torch.nn.Module, tokens: Tensor, layer_ids: tuple[int, int, int], draft_ids: Tensor
) -> Teaching:
    """Run the frozen target over `tokens`.

    Args:
        target: a transformers causal LM.
        tokens: [B, L] int64; padding (negative) may only follow a window's last token, where
            causal attention keeps it from mattering.
        layer_ids: indices into transformers' `hidden_states` (0 = embeddings).
        draft_ids: [Vd] int64, the target ids of the draft vocabulary.
    """
    output = target(input_ids=tokens.clamp(min=0), output_hidden_states=True, use_cache=False)
    hidden = torch.cat([output.hidden_states[layer] for layer in layer_ids], dim=-1)
    return Teaching(hidden, output.logits[..., draft_ids].float().softmax(-1))


def load_target(path: Path, precision: str, device: torch.device) -> torch.nn.Module:
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


def load_tokenizer(path: Path):
    """The target's tokenizer; raises `TrainError` where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise TrainError(f"The target {path} has no tokenizer: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of another library says first; the rest is for its own readers."""
    return str(error).strip().split("\n")[0]
