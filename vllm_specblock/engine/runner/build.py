"""Load the drafters of an engine, once its target is loaded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.models.interfaces_base import VllmModel

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config.resolved_config import ResolvedConfig
from vllm_specblock.engine.target_lora import embed_without_adapters
from vllm_specblock.engine.target_model import embedding_of


def load_drafters(
    config: VllmConfig, resolved: ResolvedConfig, target_model: VllmModel, device: torch.device
) -> list[Drafter]:
    """Load the drafters of an engine, with room for what they learn of each request slot."""
    target, combine = config.model_config, resolved.combine
    num_nodes = config.num_speculative_tokens
    if config.lora_config is None:
        embed = embedding_of(target_model, device)
    else:
        embed = embed_without_adapters(target_model)
    budgets: tuple[int, ...] = (num_nodes,)
    if combine is not None:
        budgets = combine.shares(num_nodes)
    drafters: list[Drafter] = []
    for each, budget in zip(resolved.drafters, budgets):
        kind, options = drafter_kind(each.kind), each.options
        given: list[Any] = [options, budget, target.max_model_len]
        if kind.checkpoint is not None:
            files = kind.load_checkpoint_module()
            model = files.load(each.folder, dtype=target.dtype, device=device).eval()
            if getattr(model, "wants_head", False):
                model.share_head(target_head_weight(target_model))
            process_after_loading(model, getattr(options, "quantization", None))
            columns = tuple(resolved.layers.index(layer) for layer in each.layers)
            # A request has N slots after its root for drafting.
            given = [model, embed, *given, num_nodes, columns]
        drafter = kind.load_class()(*given)
        if drafter.calibration is not None:
            drafter.calibration.make_room(config.scheduler_config.max_num_seqs + 1)
        drafters.append(drafter)
    return drafters


def target_head_weight(target_model: VllmModel) -> torch.Tensor:
    """Return the target's LM head [V, Ht]: its own memory, on several ranks a gathered copy.

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
            f"The drafter has no LM head, and the target's ({type(target_model).__name__}) is "
            "quantised or missing: use a checkpoint with lm_head.weight."
        )
    if head.tp_size > 1:
        weight = tensor_model_parallel_all_gather(weight.data, 0)
    return weight[: head.org_vocab_size]
