"""Hidden states by forward hooks, for targets without vLLM's EAGLE-3 interface."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from vllm_specblock.options import TargetError

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
    layers = next((each for each in lists if len(each) == depth and _attends(each)), None)
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


def _attends(layers: nn.ModuleList) -> bool:
    return any(isinstance(module, Attention) for module in layers.modules())


def _copy_input(layer: nn.Module, buffer: torch.Tensor) -> Any:
    # Compiled code cannot inspect signatures.
    names = list(inspect.signature(layer.forward).parameters)
    hidden_at = names.index("hidden_states") if "hidden_states" in names else 0
    adds = type(layer).__name__ in _ADDS_RESIDUAL or "residual" not in names
    residual_at = None if adds else names.index("residual")

    def given(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[at] if at < len(args) else kwargs.get(names[at])

    def copy_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = given(hidden_at, args, kwargs)
        residual = None if residual_at is None else given(residual_at, args, kwargs)
        state = hidden if residual is None else hidden + residual
        state = state.flatten(0, -2)  # [1, T, H] of the Transformers backend
        buffer[: state.shape[0]].copy_(state)

    return copy_input
