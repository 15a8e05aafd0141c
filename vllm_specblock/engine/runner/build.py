"""Build what an engine drafts with, once its target is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.combine.budget import shares
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.common.synthetic import SyntheticDrafter
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.engine.adaptive.trees import AdaptiveTrees
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.cpu import lora
from vllm_specblock.engine.metrics.counters import DrafterCounters
from vllm_specblock.engine.metrics.draft_clock import DraftClock
from vllm_specblock.engine.metrics.exporter import make_sink
from vllm_specblock.engine.runner.caches import EngineCaches
from vllm_specblock.engine.runner.draft_policy import (
    DraftPolicy,
    MergedDrafters,
    RoutedDrafters,
    SingleDrafter,
)
from vllm_specblock.engine.runner.skipped_steps import SkippedSteps
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.engine.step_observer import StepObserver, make_observer
from vllm_specblock.engine.target_lora import embed_without_adapters
from vllm_specblock.engine.target_model import embedding_of
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.verify.synthetic_acceptance import SyntheticAcceptance

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel

    from vllm_specblock.engine.runner.speculator import TreeSpeculator


class Parts(NamedTuple):
    """What an engine drafts with."""

    drafters: list[Drafter]
    follow: bool  # a drafter has a cache and reads every committed row
    caches: EngineCaches
    draft_policy: DraftPolicy
    tree_states: TreeStates
    skipped: SkippedSteps
    adaptive: AdaptiveTrees | None
    recorder: StepObserver | None
    counters: DrafterCounters
    clock: DraftClock


def build(engine: TreeSpeculator, target_model: VllmModel, target_layers: list[str]) -> Parts:
    """Load the drafters and build what belongs to them.

    Args:
        target_layers: names of the target's attention layers.
    """
    config, resolved, device = engine.vllm_config, engine.resolved, engine.device
    num_speculative_tokens, num_slots = config.num_speculative_tokens, engine.num_slots
    drafters = load_drafters(config, resolved, target_model, device)
    controller = Controller(num_speculative_tokens)
    policy = make_draft_policy(
        drafters, resolved.combine, num_speculative_tokens, num_slots, device, controller
    )
    tree_states = TreeStates(num_slots, num_speculative_tokens, policy.max_depth, device)
    if engine.speculative_config.synthetic_acceptance_rates is not None:
        tree_states.synthetic_acceptance = SyntheticAcceptance(
            num_slots, num_speculative_tokens, device
        )
    follow = any(drafter.cache_layers() for drafter in drafters)
    skipped = SkippedSteps(config, follow, tree_states, device)
    if resolved.adaptive:
        skipped.adaptive = AdaptiveTrees(
            controller,
            follow,
            skipped.backlog,
            engine.req_states,
            tree_states,
            engine.draft_token_confidence_probs,
            device,
        )
    sink = make_sink(config, get_tensor_model_parallel_rank())
    counters = DrafterCounters(len(drafters), device, sink)
    clock = DraftClock(device)
    counters.sources = [
        clock.counts,
        lambda: {} if engine.recorder is None else engine.recorder.counts(),
    ]
    return Parts(
        drafters,
        follow,
        EngineCaches(config, target_layers, drafters, device),
        policy,
        tree_states,
        skipped,
        skipped.adaptive,
        make_observer(config, resolved, drafters, tree_states.parent, policy.max_depth),
        counters,
        clock,
    )


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
        lora.install()
        embed = embed_without_adapters(target_model)
    combine = resolved.combine
    budgets: tuple[int, ...] = (config.num_speculative_tokens,)
    if combine is not None:
        budgets = shares(config.num_speculative_tokens, combine.draft_policy, combine.budget)
    head = partial(target_head_weight, target_model)
    drafters: list[Drafter] = [
        load_drafter(config, each, resolved.layers, budget, embed, head, device)
        for each, budget in zip(resolved.drafters, budgets)
    ]
    for drafter in drafters:
        if drafter.calibration is not None:
            drafter.calibration.make_room(config.scheduler_config.max_num_seqs + 1)
    assert config.speculative_config is not None
    rates = config.speculative_config.synthetic_acceptance_rates
    if rates is not None:  # benchmarks only, with one drafter
        (single,) = drafters
        assert isinstance(single, SpecBlockDrafter)  # checked by `check_acceptance`
        imposed = SyntheticDrafter(single, unconditional_to_conditional_rates(rates), device)
        imposed.model = single.model
        return [imposed]
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
        layers: the target's layers whose states a step hands out.
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
            f"The drafter has no LM head of its own, and that of {type(target_model).__name__} is "
            "quantised or not to be found: use a drafter whose checkpoint holds lm_head.weight."
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
    if options.draft_policy == "merge" and options.skip_drafter:
        return SkippingMergedDrafters(drafters, options, num_nodes, num_slots, device, controller)
    if options.draft_policy == "merge":
        return MergedDrafters(drafters, options, num_nodes, device)
    return RoutedDrafters(drafters, options, device)
