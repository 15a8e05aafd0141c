"""What an engine drafts with: its drafters, their node budgets and cache layers, the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.attention.draft_attention_layer import DraftAttentionLayer
from vllm_specblock.engine.config.resolved_config import ResolvedDrafter
from vllm_specblock.engine.runner.draft_policy import (
    DraftPolicy,
    MergedDrafters,
    RoutedDrafters,
    SingleDrafter,
)
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters
from vllm_specblock.feedback.controller import Controller

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


def load_drafter(
    resolved: ResolvedDrafter,
    layers: tuple[int, ...],
    embed: Callable[[torch.Tensor], torch.Tensor],
    num_nodes: int,
    lookahead_slots: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    head: Callable[[], torch.Tensor] | None = None,
) -> Drafter:
    """Load one drafter.

    Args:
        layers: the target's layers whose states a step hands out.
        embed: [n] target token ids → [n, H], the target's own embedding.
        num_nodes: nodes of each of its trees.
        lookahead_slots: cache slots reserved after a request's root.
        max_model_len: tokens of the longest request.
        head: → [V, H], the target's LM head, for a checkpoint without one.
    """
    kind, options = drafter_kind(resolved.kind), resolved.options
    make = kind.load_class()
    if kind.checkpoint is None:
        return make(options, num_nodes, max_model_len)
    files = kind.load_checkpoint_module()
    model = files.load(resolved.folder, dtype=dtype, device=device).eval()
    if getattr(model, "wants_head", False):
        assert head is not None  # an engine has a target
        model.share_head(head())
    process_after_loading(model, getattr(options, "quantization", None))
    columns = tuple(layers.index(layer) for layer in resolved.layers)
    return make(model, embed, options, num_nodes, max_model_len, lookahead_slots, columns)


def target_head_weight(target_model: VllmModel) -> torch.Tensor:
    """[V, Ht], the target's own memory; among several ranks a copy of what all of them hold.

    Raises:
        ValueError: the LM head is quantised, or there is none.
    """
    inner: Any = target_model
    if hasattr(inner, "get_language_model"):
        inner = inner.get_language_model()
    head: Any = getattr(inner, "lm_head", None)
    head = getattr(head, "base_layer", head)  # under a LoRA
    weight: torch.Tensor | None = getattr(head, "weight", None)
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"The drafter has no LM head of its own, and that of {type(target_model).__name__} is "
            "quantised or not to be found: use a drafter whose checkpoint holds lm_head.weight."
        )
    if head.tp_size > 1:
        weight = tensor_model_parallel_all_gather(weight.data, 0)
    return weight[: head.org_vocab_size]


def register_layers(vllm_config: VllmConfig, drafters: list[Drafter]) -> list[list[str]]:
    """Give every layer of every drafter its place in vLLM's cache; returns their names per
    drafter."""
    # Numbered on from the target's layers, as vLLM's own drafters are.
    number = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    names = []
    for drafter in drafters:
        of_drafter = []
        for layer in drafter.cache_layers():
            name = f"specblock.layers.{number}.attn"
            DraftAttentionLayer(
                vllm_config, name, layer.num_kv_heads, layer.head_dim, layer.entries_per_token
            )
            of_drafter.append(name)
            number += 1
        names.append(of_drafter)
    return names


def make_draft_policy(
    drafters: list[Drafter],
    options: CombineConfig | None,
    num_nodes: int,
    num_slots: int,
    device: torch.device,
    controller: Controller,
) -> DraftPolicy:
    """The policy of `options`; None with a single drafter."""
    if options is None:
        return SingleDrafter(drafters[0])
    if options.draft_policy == "merge" and options.skip_drafter:
        return SkippingMergedDrafters(drafters, options, num_nodes, num_slots, device, controller)
    if options.draft_policy == "merge":
        return MergedDrafters(drafters, options, num_nodes, device)
    return RoutedDrafters(drafters, options, device)
