"""Checks of the target's layers, after construction and before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import EagleModelMixin, supports_eagle3
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu import attn_utils

from vllm_specblock.engine.config.ours import extracts_features, is_ours
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.engine.target_states import add_interface
from vllm_specblock.options import TargetError


def install() -> None:
    """Check SpecBlock's targets as they are built, and add a missing EAGLE-3 interface."""

    @replaces(BaseModelLoader, "create_model")
    def create_model(
        original: Function,
        self: BaseModelLoader,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        model = original(self, vllm_config, model_config, *args, **kwargs)
        speculative = vllm_config.speculative_config
        known = is_ours(speculative) or extracts_features(speculative)
        if not known or model_config is speculative.draft_model_config:
            return model
        if is_ours(speculative):
            check_target_model(model, vllm_config)
        wanted = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        if wanted and not hands_out_states(model, wanted):
            add_interface(model, vllm_config)
        return model

    @replaces(attn_utils, "add_kv_sharing_layers_to_kv_cache_groups")
    def name_shared_specs(
        original: Function,
        shared_kv_cache_layers: dict[str, str],
        kv_cache_groups: list[Any],
        *args: Any,
    ) -> None:
        """Beside a drafter, vLLM looks up each layer's own spec, which a sharing layer lacks."""
        original(shared_kv_cache_layers, kv_cache_groups, *args)
        for group in kv_cache_groups:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            for name, owner in shared_kv_cache_layers.items():
                if owner in specs:
                    specs[name] = specs[owner]


def hands_out_states(model: nn.Module, wanted: Sequence[int]) -> bool:
    """Whether `model` has vLLM's EAGLE-3 interface and its forward implements it for `wanted`.

    MiMo inherits the interface but overrides the forward. Not every class has a state before its
    first layer: DeepSeek V2 and the Transformers backend do not.
    """
    if 0 in wanted:
        return False
    holders = (type(each) for each in model.modules() if isinstance(each, EagleModelMixin))
    codes = (holder.forward.__code__ for holder in holders)
    names = (" ".join((*code.co_names, *code.co_varnames)) for code in codes)
    return supports_eagle3(model) and all("aux_hidden" in x or "super" in x for x in names)


def embedding_of(model: nn.Module, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from [n] token ids to [n, H]; EXAONE 3's own method is broken.

    Raises:
        TargetError: its own method fails, and it has not exactly one embedding layer.
    """
    embed: Any = model.embed_input_ids
    try:
        embed(torch.zeros(1, dtype=torch.int64, device=device))
    except AttributeError:
        found = [each for each in model.modules() if type(each) is VocabParallelEmbedding]
        if len(found) != 1:
            raise TargetError("no embedding that a drafter could use") from None
        embed = found[0]
    return embed


def check_target_model(model: nn.Module, config: VllmConfig) -> None:
    """Raise TargetError for a target that ignores the tree mask.

    That is a custom model state, or a layer that is neither vLLM's `Attention` with our backend and
    equal key and value sizes nor a recurrent one; also an fp8 cache that cannot be packed.
    """
    if hasattr(model, "get_model_state_cls"):
        raise TargetError(f"its own model state ({type(model).__name__})")
    layers = config.compilation_config.static_forward_context
    names = [name for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)]
    if config.model_config.is_hybrid:
        # vLLM's recurrent layers load kernels for a GPU on import.
        from vllm_specblock.engine.recurrent.layers import recurrent_kind

        names = [name for name in names if recurrent_kind(layers[name]) is None]
    for name in names:
        layer = layers[name]
        backend = layer.get_attn_backend()
        if (
            backend is not AttentionBackendEnum.CUSTOM.get_class()
            or type(layer) is not Attention  # subclasses may mask or store differently
            or layer.head_size_v != layer.head_size
        ):
            raise TargetError(f"{type(layer).__name__} layers ({name}, {backend.__name__})")
        if layer.impl.fp8 and current_platform.is_cpu() and layer.head_size % 32:
            raise TargetError(f"an fp8 KV cache with head size {layer.head_size} ({name})")
