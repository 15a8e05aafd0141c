"""Setup of a tree speculator: drafters, their caches, tree tensors, graphs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.combine.budget import shares
from vllm_specblock.config import OptionError
from vllm_specblock.drafters.common.backlog import Backlog
from vllm_specblock.drafters.common.cache_holes import CacheHoles
from vllm_specblock.drafters.common.synthetic import SyntheticDrafter
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.engine import deep_sleep
from vllm_specblock.engine.adaptive.trees import AdaptiveTrees
from vllm_specblock.engine.config.vllm_args import read_back
from vllm_specblock.engine.cpu import lora
from vllm_specblock.engine.cpu.warm_up import compile_loops, without_made_up_requests
from vllm_specblock.engine.metrics.counters import DrafterCounters
from vllm_specblock.engine.metrics.draft_clock import DraftClock
from vllm_specblock.engine.metrics.exporter import make_sink
from vllm_specblock.engine.recurrent.layers import recurrent_kind
from vllm_specblock.engine.runner.adaptation import make_recorder
from vllm_specblock.engine.runner.chain_fallback import ChainFallback
from vllm_specblock.engine.runner.draft_policy import DraftPolicy
from vllm_specblock.engine.runner.drafter_loader import (
    load_drafter,
    make_draft_policy,
    register_layers,
    target_head_weight,
)
from vllm_specblock.engine.runner.dummy import bind_null_caches
from vllm_specblock.engine.runner.graphs import ProposalGraphs
from vllm_specblock.engine.runner.model_state import TreeModelState
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.engine.runner.warm_up import compile_kernels
from vllm_specblock.engine.target_lora import embed_without_adapters
from vllm_specblock.engine.target_model import check_target_model, embedding_of
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet
from vllm_specblock.verify.synthetic_acceptance import SyntheticAcceptance

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


def caches_of(
    context: dict[str, Any], names: list[str], group_of: dict[str, int]
) -> list[tuple[int, KVCacheSet]]:
    """Group the layers' caches by cache group and geometry; list a shared cache once."""
    alike: dict[tuple[Any, ...], dict[int, Any]] = {}
    for name in names:
        layer = context[name]
        cache = layer.kv_cache
        form = group_of[name], cache.shape, cache.stride(), cache.dtype
        alike.setdefault(form, {}).setdefault(cache.data_ptr(), layer)
    found = []
    for form, layers in alike.items():
        caches = [layer.kv_cache for layer in layers.values()]
        packing = next(iter(layers.values())).impl.packing(caches[0])
        found.append((form[0], KVCacheSet(caches, packing)))
    return found


class SpeculatorSetup(DraftModelSpeculator):
    """Start-up of `TreeSpeculator`, in the order in which vLLM calls it."""

    draft_policy: DraftPolicy
    target_caches: list[tuple[int, KVCacheSet]]
    """(cache group, caches)."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device)
        if vllm_config.model_config.enable_sleep_mode:
            deep_sleep.install()
        self.req_states = req_states
        self.resolved = read_back(vllm_config.additional_config)
        # An extra slot for padding rows.
        self.scratch_idx = self.max_num_reqs
        self.num_slots = self.max_num_reqs + 1
        texts = req_states.all_token_ids
        req_states.all_token_ids = StagedWriteTensor(
            (self.num_slots, texts.gpu.shape[1]),
            dtype=texts.dtype,
            device=device,
            # vLLM keeps token ids in host memory unless its own n-gram method reads them.
            uva_instead_of_gpu=not any(
                drafter_kind(drafter.kind).reads_text for drafter in self.resolved.drafters
            ),
        )
        depth = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.num_layers = len(self.resolved.layers)
        self.num_inner = sum(layer < depth for layer in self.resolved.layers)
        self.reads_last = self.num_inner < self.num_layers or self.resolved.adapting is not None
        self.num_nodes = self.num_speculative_steps
        self.pad_rows = device.type != "cpu"
        self.enable_adaptive_verification = self.resolved.adaptive
        self.use_acceptance_estimator = False  # vLLM's, for chains
        self.adaptive: AdaptiveTrees | None = None
        self.temperature = torch.zeros(self.num_slots, device=device)
        self.chains = ChainFallback(self.num_slots)
        self.undrafted = np.zeros(self.num_slots, dtype=bool)
        self.masks = torch.zeros(2, self.max_num_reqs, dtype=torch.int64, device=device)
        self.holes: CacheHoles | None = None
        self.blind: torch.Tensor | None = None  # [R] bool, see `CacheHoles.mask`

    def load_draft_model(
        self, target_model: VllmModel, target_attn_layer_names: set[str]
    ) -> nn.Module:
        layers = self.vllm_config.compilation_config.static_forward_context
        kinds = {name: recurrent_kind(layers[name]) for name in sorted(target_attn_layer_names)}
        self.target_layers = [name for name, kind in kinds.items() if kind is None]
        self.recurrent = [kind(layers[name]) for name, kind in kinds.items() if kind is not None]
        if self.vllm_config.lora_config is None:
            embed = embedding_of(target_model, self.device)
        else:
            lora.install()
            embed = embed_without_adapters(target_model)
        combine = self.resolved.combine
        budgets: tuple[int, ...] = (self.num_nodes,)
        if combine is not None:
            budgets = shares(self.num_nodes, combine.draft_policy, combine.budget)
        drafters: list[Drafter] = [
            load_drafter(
                each,
                self.resolved.layers,
                embed,
                num_nodes,
                self.num_nodes,
                self.max_model_len,
                self.dtype,
                self.device,
                partial(target_head_weight, target_model),
            )
            for each, num_nodes in zip(self.resolved.drafters, budgets)
        ]
        for drafter in drafters:
            if drafter.calibration is not None:
                drafter.calibration.make_room(self.num_slots)
        self.drafter_layers = register_layers(self.vllm_config, drafters)
        weights = [drafter.model for drafter in drafters if drafter.model is not None]
        rates = self.speculative_config.synthetic_acceptance_rates
        if rates is not None:  # benchmarks only, with one drafter
            best = unconditional_to_conditional_rates(rates)
            (single,) = drafters
            assert isinstance(single, SpecBlockDrafter)  # checked by `check_acceptance`
            drafters = [SyntheticDrafter(single, best, self.device)]
        controller = Controller(self.num_nodes)
        self.draft_policy = make_draft_policy(
            drafters, combine, self.num_nodes, self.num_slots, self.device, controller
        )
        self.max_depth = self.draft_policy.max_depth
        self.tree_states = TreeStates(self.num_slots, self.num_nodes, self.max_depth, self.device)
        if rates is not None:
            self.tree_states.synthetic_acceptance = SyntheticAcceptance(
                self.num_slots, self.num_nodes, self.device
            )
        on_host, follow = self.device.type == "cpu", any(each.cache_layers() for each in drafters)
        self.backlog = Backlog() if follow and on_host else None
        self.can_resume = on_host or not follow
        # Later requests may reuse the blocks of a request without drafts.
        self.follows = follow and self.vllm_config.cache_config.enable_prefix_caching
        if self.resolved.adaptive:
            self.adaptive = AdaptiveTrees(
                controller,
                follow,
                self.backlog,
                self.req_states,
                self.tree_states,
                self.draft_token_confidence_probs,
                self.device,
            )
        self.counters = DrafterCounters(
            len(drafters),
            self.num_nodes,
            self.max_depth,
            self.device,
            make_sink(self.vllm_config, get_tensor_model_parallel_rank()),
        )
        self.clock = DraftClock(self.device)
        self.recorder = make_recorder(
            self.vllm_config, self.resolved, drafters, self.tree_states.parent, self.max_depth
        )
        self.reads_rows = bool(follow or self.num_layers or self.recorder is not None)
        return nn.ModuleList(weights)

    def load_model(self, target_model: VllmModel) -> None:
        check_target_model(target_model, self.vllm_config)  # not all loaders call `create_model`
        super().load_model(target_model)
        if self.device.type == "cpu":
            compile_loops(self.dtype)
            without_made_up_requests()
        # vLLM builds this class without our arguments, hence one class per engine.
        kinds: tuple[type, ...] = (TreeModelState,)
        if self.recurrent:
            kinds = TreeModelState, MambaHybridModelState
        state = type("TreeModelState", kinds, {"speculator": self})
        target_model.get_model_state_cls = lambda: state

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        # Release the caches that vLLM profiled graphs with; it allocates the real ones next.
        self.target_caches = []
        self._bind_null_caches()
        groups = self.kv_cache_config.kv_cache_groups
        self.group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        self.layer_of = {i: name for name, i in self.group_of.items()}  # any layer of each group
        drafters = {self.group_of[name] for names in self.drafter_layers for name in names}
        missing = [name for name in self.target_layers if name not in self.group_of]
        if missing or len(drafters) > 1:
            given = f"{missing[0]} no block table" if missing else "drafters several block tables"
            raise OptionError(
                f"vLLM gave {given}, but SpecBlock needs exactly one: run this target without "
                "speculative_config."
            )
        self.group = min(drafters, default=self.group_of[self.target_layers[0]])

    def _bind_null_caches(self) -> None:
        # With `max_model_len` "auto", vLLM lowers the limit after the drafters are built.
        self.max_model_len = self.vllm_config.model_config.max_model_len
        for drafter in self.draft_policy.drafters:
            drafter.max_model_len = self.max_model_len
        size = self.vllm_config.cache_config.block_size
        bind_null_caches(self.draft_policy.drafters, size, self.dtype, self.device)

    def bind_caches(self) -> None:
        """Bind the allocated KV caches to the commit and the drafters."""
        context = self.vllm_config.compilation_config.static_forward_context
        self.target_caches = caches_of(context, self.target_layers, self.group_of)
        for drafter, names in zip(self.draft_policy.drafters, self.drafter_layers):
            drafter.bind([context[name].kv_cache for name in names])
        if any(self.drafter_layers):
            size, masks = self.block_tables.block_sizes[self.group], self.masks
            skips = isinstance(self.draft_policy, SkippingMergedDrafters)
            masks = torch.zeros_like(masks) if skips else masks
            self.holes = CacheHoles(self.kv_cache_config.num_blocks, size, masks)
            self.draft_policy.holes = self.holes if skips else None
        # Otherwise `capture` compiles them.
        if self.device.type == "cpu" or self.vllm_config.model_config.enforce_eager:
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        compile_kernels(
            self.vllm_config,
            self.target_layers,
            self.draft_policy.drafters,
            self.num_nodes,
            self.block_tables.input_block_tables[self.group],
            self.target_caches,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        self.graphs = ProposalGraphs(
            self.vllm_config,
            self.device,
            CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
            self.enable_adaptive_verification,
            self.tree_states,
            self.num_inner + self.reads_last,
            self.target_input_buffers,
            self.block_tables,
            self.group,
            self.masks,
        )

    def forget_warm_up(self) -> None:
        """Reset the counters and estimates after vLLM's warm-up requests."""
        self.counters.total.zero_()
        self.clock.total.zero_()
        self.draft_policy.forget()
        if self.adaptive is not None:
            self.adaptive.acceptance.forget()
