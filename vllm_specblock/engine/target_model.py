"""The target: checks of its layers before weights are loaded, its hidden states and embedding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import EagleModelMixin, supports_eagle3
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu import attn_utils

from vllm_specblock.engine.config.ours import extracts_features, is_ours
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.options import TargetError


def install() -> None:
    """Check SpecBlock's targets as they are built, and add a missing EAGLE-3 interface."""

    @replaces(BaseModelLoader, "create_model")
    def create_model(
        original: Function, self: Any, vllm_config: VllmConfig, model_config: Any, **more: Any
    ) -> nn.Module:
        speculative = vllm_config.speculative_config
        ours = is_ours(speculative)
        known = ours or extracts_features(speculative)
        if not known or model_config is speculative.draft_model_config:
            return original(self, vllm_config, model_config, **more)
        if ours:
            device = device_of(torch.device(vllm_config.device_config.device_type))
            backend = device.mla if model_config.use_mla else device.attention
            register_backend(AttentionBackendEnum.CUSTOM, backend)
        model = original(self, vllm_config, model_config, **more)
        if ours:
            check_target_model(model, vllm_config)
        wanted = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        if wanted and not hands_out_states(model, wanted):
            add_interface(model, vllm_config)
        return model

    @replaces(attn_utils, "add_kv_sharing_layers_to_kv_cache_groups")
    def name_shared_specs(
        original: Function, owners: dict[str, str], groups: list[Any], *rest: Any
    ) -> None:
        """Beside a drafter, vLLM looks up each layer's own spec, which a sharing layer lacks."""
        original(owners, groups, *rest)
        for group in groups:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            for name, owner in owners.items():
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


def embedding_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from [n] token ids to [n, H], the rows that vLLM's own drafters share.

    They are the target's table without its scale (Gemma) and without a LoRA adapter. A table of
    another name is found where it is the only one (EXAONE 3), else the target's method serves.
    """
    inner: Any = model
    if hasattr(inner, "get_language_model"):
        inner = inner.get_language_model()
    inner = getattr(inner, "model", inner)
    table: Any = getattr(inner, "embed_tokens", None) or getattr(inner, "embedding", None)
    if table is None:
        found = [each for each in model.modules() if type(each) is VocabParallelEmbedding]
        table = found[0] if len(found) == 1 else model.embed_input_ids
    return getattr(table, "base_layer", table)


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


def check_target_model(model: nn.Module, config: VllmConfig) -> None:
    """Raise TargetError for a target that ignores the tree mask.

    That is a custom model state, or a layer that is neither a recurrent one nor, with our backend,
    vLLM's `Attention` with equal key and value sizes or its `MLAAttention`.
    """
    if hasattr(model, "get_model_state_cls"):
        raise TargetError(f"its own model state ({type(model).__name__})")
    layers = config.compilation_config.static_forward_context
    names = [name for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)]
    if config.model_config.is_hybrid:
        # vLLM's recurrent layers load kernels for a GPU on import.
        from vllm_specblock.engine.recurrent import KINDS

        names = [name for name in names if type(layers[name]) not in KINDS]
    for name in names:
        layer = layers[name]
        backend = layer.get_attn_backend()
        # Subclasses may mask or store differently.
        known = type(layer) is Attention and layer.head_size_v == layer.head_size
        known = known or (type(layer) is MLAAttention and layer.qk_rope_head_dim > 0)
        if not known or backend is not AttentionBackendEnum.CUSTOM.get_class():
            raise TargetError(f"{type(layer).__name__} layers ({name}, {backend.__name__})")


# ---- hidden states by forward hooks, for targets without vLLM's EAGLE-3 interface ----

_ADDS_RESIDUAL = {
    "Cohere2MoeDecoderLayer",
    "CohereCompassDecoderLayer",
    "CohereDecoderLayer",
    "Exaone4DecoderLayer",
    "Gemma4DecoderLayer",
    "GraniteMoeHybridAttentionDecoderLayer",
    "GraniteMoeHybridMambaDecoderLayer",
    "HyperCLOVAXDecoderLayer",
    "MiniCPMDecoderLayer",
    "MuseGlimmerDecoderLayer",
    "PhiMoEDecoderLayer",
}
"""Layers whose hidden states already include the residual that they take. All other layers leave
the last addition to the next layer's norm."""

_SEVERAL_STREAMS = {"Gemma3nDecoderLayer", "LoopCoderDecoderLayer"}
"""Layers whose hidden states are not one row per token."""


def add_interface(model: nn.Module, config: VllmConfig) -> None:
    """Give `model` the methods of vLLM's `SupportsEagle3`.

    A hook copies the input of a layer to a persistent buffer, also in compiled code and graphs.

    Raises:
        TargetError: no `ModuleList` of all layers, or layers with several hidden states per token.
    """
    depth = config.model_config.hf_text_config.num_hidden_layers
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    attention = {each for each in model.modules() if isinstance(each, (Attention, MLAAttention))}
    layers = next((x for x in lists if len(x) == depth and attention & {*x.modules()}), None)
    if layers is None:
        raise TargetError(f"no list of {depth} decoder layers for the drafter to read")
    if type(layers[0]).__name__ in _SEVERAL_STREAMS:
        raise TargetError("several streams of hidden states, of which the drafter reads one")
    interface: Any = model
    forward, buffers = model.forward, list[torch.Tensor]()

    # Not a forward hook on the model: torch.compile would run it twice.
    @wraps(forward)
    def forward_with_states(*args: Any, **kwargs: Any) -> Any:
        hidden = forward(*args, **kwargs)
        return hidden, [buffer[: hidden.shape[0]] for buffer in buffers]

    def set_aux_hidden_state_layers(ids: tuple[int, ...]) -> None:
        target, device = config.model_config, config.device_config.device
        shape = config.scheduler_config.max_num_batched_tokens, target.get_hidden_size()
        for layer in (layers[index] for index in sorted(set(ids))):
            buffer = torch.zeros(shape, dtype=target.dtype, device=device)
            layer.register_forward_pre_hook(_copy_input(layer, buffer), with_kwargs=True)
            buffers.append(buffer)
        interface.forward = forward_with_states

    interface.supports_eagle3 = True
    interface.has_own_lm_head = interface.has_own_embed_tokens = False
    interface.set_aux_hidden_state_layers = set_aux_hidden_state_layers
    interface.get_eagle3_default_aux_hidden_state_layers = lambda: (2, depth // 2, depth - 3)


def _copy_input(layer: nn.Module, buffer: torch.Tensor) -> Any:
    # Compiled code cannot inspect signatures.
    names = list(inspect.signature(layer.forward).parameters)
    hidden_name = "hidden_states" if "hidden_states" in names else names[0]
    adds = type(layer).__name__ in _ADDS_RESIDUAL or "residual" not in names

    def copy_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args)) | kwargs
        hidden, residual = given[hidden_name], None if adds else given.get("residual")
        state = hidden if residual is None else hidden + residual
        state = state.flatten(0, -2)  # [1, T, H] of the Transformers backend
        buffer[: state.shape[0]].copy_(state)

    return copy_input
