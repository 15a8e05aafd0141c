"""Initialisation of a SpecBlock drafter for a target (paper, section 3.1)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from vllm_specblock.drafters.common.config import CheckpointError, checked, layers_of
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.target.target_info import describe_target, read_target

_QK_NORM = {"llama": False, "qwen3": True}
"""Target `model_type` → whether its attention norms queries and keys."""

_DRAFT_VOCAB_SIZE = 32000


def init(
    target_dir: str | os.PathLike[str],
    *,
    num_layers: int = 2,
    draft_vocab_size: int | None = None,
    layer_ids: tuple[int, int, int] | None = None,
    token_counts: Tensor | None = None,
    target_name: str | None = None,
    seed: int = 0,
    **choices: Any,
) -> SpecBlockModel:
    """Return an untrained float32 drafter on the CPU, with decoder layers like the target's.

    Its width is the target's, since it uses the target's embedding.

    Args:
        target_dir: Hugging Face directory of a Llama- or Qwen3-like target; only its
            config.json is read.
        draft_vocab_size: Vd (default: 32000, or all of a smaller vocabulary).
        token_counts: [V], frequencies: the draft vocabulary is then the Vd most frequent tokens,
            else the first Vd ids.
        seed: of the weights; the global generator is left alone.
        choices: further keys of DrafterConfig, such as `block_size`; None: as the target.

    Raises:
        CheckpointError: no target there, or one of another architecture; sizes or layers that
            do not fit it.
    """
    raw = read_target(target_dir)
    where = f"The target in {target_dir}"
    family = raw.get("model_type")
    if family not in _QK_NORM or raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{where} has model_type {family!r} and activation {raw.get('hidden_act')!r}, but "
            f"drafters can be trained for {' and '.join(_QK_NORM)} with 'silu' only."
        )
    target = describe_target(target_dir, target_name, layer_ids)
    size = raw["hidden_size"]
    if draft_vocab_size is None:
        draft_vocab_size = min(_DRAFT_VOCAB_SIZE, target.vocab_size)
    config = checked(
        f"A drafter for the target in {target_dir}",
        {
            "hidden_size": size,
            "target_hidden_size": size,
            "num_attention_heads": raw["num_attention_heads"],
            **layers_of(raw, where),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": num_layers,
            "block_size": 4,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "qk_norm": _QK_NORM[family],
            "target": target,
            **{key: value for key, value in choices.items() if value is not None},
        },
        DrafterConfig,
    )
    with torch.random.fork_rng(devices=[]):  # torch's own initial weights, overwritten below
        drafter = SpecBlockModel(config)
    _draw_weights(drafter, torch.Generator().manual_seed(seed))
    if token_counts is not None:
        d2t, t2d = most_frequent(token_counts, draft_vocab_size)
        drafter.d2t.copy_(d2t)
        drafter.t2d.copy_(t2d)
    return drafter


@torch.no_grad()
def _draw_weights(drafter: SpecBlockModel, generator: torch.Generator) -> None:
    for name, weight in drafter.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)  # a norm
        elif name.startswith("shift_proj."):
            # [I, 0]: no shift initially.
            torch.nn.init.eye_(weight)
        else:
            # Inputs are normalised; scaling by the fan-in keeps outputs at unit size.
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)


def most_frequent(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the draft vocabulary of the `size` most frequent ids by counts [V] int64; ties go to
    the lower id. Draft ids ascend with their target ids: d2t [size] int64 is what a draft id lacks
    to its target id, and t2d [V] bool whether a target id has a draft id."""
    order = counts.cpu().sort(descending=True, stable=True).indices
    named = order[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[named] = True
    return named - torch.arange(len(named)), t2d
