"""Load the drafters of an engine, once its target is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.runner.draft_policy import DraftPolicy, SingleDrafter, TwoDrafters
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters
from vllm_specblock.engine.target_lora import embed_without_adapters
from vllm_specblock.engine.target_model import embedding_of
from vllm_specblock.feedback.controller import Controller

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


def widen_texts(states: RequestState, num_slots: int, resolved: ResolvedConfig) -> None:
    """Give the requests' texts a slot for padding rows, and keep them where drafters read them.

    vLLM keeps token ids in host memory unless its own n-gram method reads them.
    """
    texts = states.all_token_ids
    on_device = any(drafter_kind(drafter.kind).reads_text for drafter in resolved.drafters)
    states.all_token_ids = StagedWriteTensor(
        (num_slots, texts.gpu.shape[1]),
        dtype=texts.dtype,
        device=states.device,
        uva_instead_of_gpu=not on_device,
    )


def load_drafters(
    config: VllmConfig, resolved: ResolvedConfig, target_model: VllmModel, device: torch.device
) -> list[Drafter]:
    """Load the drafters of an engine, with room for what they learn of each request slot."""
    if config.lora_config is None:
        embed = embedding_of(target_model, device)
    else:
        embed = embed_without_adapters(target_model)
    combine = resolved.combine
    budgets: tuple[int, ...] = (config.num_speculative_tokens,)
    if combine is not None:
        budgets = combine.shares(config.num_speculative_tokens)
    head = partial(target_head_weight, target_model)
    drafters: list[Drafter] = [
        load_drafter(config, each, resolved.layers, budget, embed, head, device)
        for each, budget in zip(resolved.drafters, budgets)
    ]
    for drafter in drafters:
        if drafter.calibration is not None:
            drafter.calibration.make_room(config.scheduler_config.max_num_seqs + 1)
    return drafters


def load_drafter(
    config: VllmConfig,
    resolved: ResolvedDrafter,
    layers: tuple[int, ...],
    num_nodes: int,
    embed: Callable[[torch.Tensor], torch.Tensor],
    head: Callable[[], torch.Tensor],
    device: torch.device,
) -> Drafter:
    """Load one drafter.

    Args:
        layers: the target's layers whose states a step returns.
        num_nodes: nodes of each of its trees.
        embed: [n] target token ids → [n, H], the target's own embedding.
        head: → [V, H], the target's LM head, for a checkpoint without one.
    """
    kind, options, target = drafter_kind(resolved.kind), resolved.options, config.model_config
    make, length = kind.load_class(), target.max_model_len
    if kind.checkpoint is None:
        return make(options, num_nodes, length)
    files = kind.load_checkpoint_module()
    model = files.load(resolved.folder, dtype=target.dtype, device=device).eval()
    if getattr(model, "wants_head", False):
        model.share_head(head())
    process_after_loading(model, getattr(options, "quantization", None))
    columns = tuple(layers.index(layer) for layer in resolved.layers)
    # A request has N slots after its root for drafting.
    slots = config.num_speculative_tokens
    return make(model, embed, options, num_nodes, length, slots, columns)


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


def make_draft_policy(
    drafters: list[Drafter],
    options: CombineConfig | None,
    num_nodes: int,
    num_slots: int,
    device: torch.device,
    controller: Controller,
) -> DraftPolicy:
    """Return the policy of `options`, which is None with a single drafter."""
    if options is None:
        return SingleDrafter(drafters[0])
    if options.skip_drafter:
        return SkippingMergedDrafters(drafters, options, num_nodes, num_slots, device, controller)
    return TwoDrafters(drafters, options, num_nodes, device)
