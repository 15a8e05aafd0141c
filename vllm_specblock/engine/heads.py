"""From a plan to heads with their weights, and to their layers in vLLM's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig

from vllm_specblock.draft.baselines.falcon import FalconHead
from vllm_specblock.draft.baselines.medusa import MedusaHead
from vllm_specblock.draft.baselines.parallelspec import ParallelSpecHead
from vllm_specblock.draft.baselines.sps import SpSHead
from vllm_specblock.draft.eagle3.head import Eagle3Head
from vllm_specblock.draft.head import Head
from vllm_specblock.draft.ngram import NGramHead
from vllm_specblock.draft.serving import prepare
from vllm_specblock.draft.specblock import SpecBlockHead
from vllm_specblock.engine.kv import DrafterAttention
from vllm_specblock.engine.plan import HeadPlan, files_of

HEAD_OF: dict[str, Callable[..., Head]] = {
    head.kind: head
    for head in (SpecBlockHead, Eagle3Head, MedusaHead, ParallelSpecHead, FalconHead, SpSHead)
}
"""Heads with weights, by kind; all are made of the same arguments."""


def build_head(
    plan: HeadPlan,
    layers: tuple[int, ...],
    embed: Callable[[torch.Tensor], torch.Tensor],
    num_nodes: int,
    spare_slots: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Head:
    """Load one head.

    Args:
        layers: the target's layers whose states a step hands out.
        embed: [n] target token ids → [n, H], the target's own embedding.
        num_nodes: nodes of each of its trees.
        spare_slots: cache slots reserved after a request's root.
        max_model_len: tokens of the longest request.
    """
    if plan.kind == "ngram":
        return NGramHead(plan.options, num_nodes, max_model_len)
    drafter = files_of(plan.kind).load(plan.folder, dtype=dtype, device=device).eval()
    prepare(drafter, plan.options.quantization)
    columns = tuple(layers.index(layer) for layer in plan.layers)
    return HEAD_OF[plan.kind](
        drafter, embed, plan.options, num_nodes, max_model_len, spare_slots, columns
    )


def register_layers(vllm_config: VllmConfig, heads: list[Head]) -> list[list[str]]:
    """Give every layer of every head its place in vLLM's cache; returns their names per head."""
    # Numbered on from the target's layers, as vLLM's own drafters are.
    number = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    names = []
    for head in heads:
        of_head = []
        for layer in head.cache_layers():
            name = f"specblock.layers.{number}.attn"
            DrafterAttention(
                vllm_config, name, layer.num_kv_heads, layer.head_dim, layer.entries_per_token
            )
            of_head.append(name)
            number += 1
        names.append(of_head)
    return names
