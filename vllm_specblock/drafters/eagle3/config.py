"""EAGLE-3 model configuration, and its `config.json` in the authors' and speculators' layouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from vllm_specblock.drafters.common.config import (
    CheckpointError,
    Count,
    DecoderShape,
    refuse,
    shape_of,
)

_KINDS = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    # Named after the layer alone, and taken for EAGLE-3 because there is a draft vocabulary.
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
_SPECULATORS_KEYS = {
    "draft_vocab_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Keys of the speculators layout's top level, and their values where they are missing."""


class Eagle3Shape(DecoderShape):
    """Decoder layers over embedding and feature. Only the first layer reads the embedding."""

    target_hidden_size: Count  # Ht
    num_hidden_layers: Count = 1
    draft_vocab_size: Count  # Vd; equal to `vocab_size`: no mapping
    num_features: Count = 3  # hidden states of the target that are fused
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    norm_before_fc: bool = False  # the features are normed together
    fc_norm: bool = False  # each feature is normed
    norm_output: bool = False  # a later step's feature is the state after the final norm
    logit_scale: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _check_features(self) -> Eagle3Shape:
        named = 3 if self.layer_ids is None else len(self.layer_ids)
        if named != self.num_features:
            raise ValueError(
                f"it fuses {self.num_features} hidden states of the target, but names {named} "
                "layers (the default is 3)"
            )
        return self


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Return whether `raw` is an EAGLE-3 config, supported or not."""
    if raw.get("speculators_model_type") in ("eagle3", "peagle"):
        return True
    named = raw.get("architectures") or []
    if any("eagle" in str(name).lower() for name in named):
        return True
    return "draft_vocab_size" in raw and any(name in _KINDS for name in named)


def from_json(raw: dict[str, Any], where: str) -> Eagle3Shape:
    """Parse `raw`, a config.json; raises CheckpointError, in which `where` names it."""
    raw = _flat(raw, where)
    named, eagle = raw.get("architectures") or [], raw.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    _refuse_variants(raw, eagle, where)
    kind = next((_KINDS[name] for name in named if name in _KINDS), None)
    if kind is None:
        raise CheckpointError(
            f"{where} is of architecture {named or None}, but an EAGLE-3 head must be one of "
            f"{', '.join(_KINDS)}."
        )
    if kind == "qwen3":
        raw = {"head_dim": 128} | raw  # Qwen3's default
        says_rope = any(map(raw.get, ("rope_theta", "rope_scaling", "rope_parameters")))
        # As vLLM does. In the flat layout transformers has filled in its 10000 by then.
        if "speculators_model_type" in raw and not says_rope:
            raw["rope_theta"] = 1e6
    # As Model Runner V2 does. `eagle_config.eagle_aux_hidden_state_layer_ids` is not read there:
    # other engines write it, too, and count its layers from another end of the layer.
    layer_ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("layer_ids") or None
    bias = bool(raw.get("attention_bias"))
    own = {
        "target_hidden_size": raw.get("target_hidden_size") or raw.get("hidden_size"),
        "draft_vocab_size": raw.get("draft_vocab_size") or raw.get("vocab_size"),
        "num_features": raw.get("num_aux_hidden_states")
        or raw.get("num_aux_layers")
        or (len(layer_ids) if isinstance(layer_ids, list) else 3),
        "layer_ids": layer_ids,
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias,
        "output_bias": bias and kind == "llama",
        "mlp_bias": bool(raw.get("mlp_bias")) and kind == "llama",
        "norm_before_fc": bool(eagle.get("norm_before_fc", raw.get("norm_before_fc"))),
    }
    return shape_of(raw, own, where, Eagle3Shape)


def _flat(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Translate the speculators layout into the authors' keys; leave any other as it is."""
    if raw.get("speculators_model_type") != "eagle3":
        return raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{where} has transformer_layer_config = {layer!r}, but it must be an object that "
            "describes the drafter's layer."
        )
    flat = layer | {"speculators_model_type": "eagle3"}
    flat |= {key: raw.get(key, missing) for key, missing in _SPECULATORS_KEYS.items()}
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids", "quantization_config"):
        if raw.get(key):
            flat[key] = raw[key]
    model_type = layer.get("model_type", "llama")
    named = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    return flat | {"architectures": [named.get(model_type, model_type)]}


def _refuse_variants(raw: dict[str, Any], eagle: dict[str, Any], where: str) -> None:
    kind, named = raw.get("speculators_model_type"), raw.get("architectures") or []
    types, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    # Some name those of the target's layers, too; a wrong number is refused with the shape.
    count = layers if isinstance(layers, int) else 1
    own_layers = types[:count] if isinstance(types, list) else []
    variants = (
        ("peagle" in f"{kind} {named}".lower(), "a head that drafts in parallel (P-EAGLE)"),
        (kind not in (None, "eagle3"), f"speculators_model_type = {kind!r}"),
        (raw.get("quantization_config"), "quantised weights"),
        (raw.get("parallel_drafting"), "parallel drafting"),
        (
            eagle.get("use_aux_hidden_state", True) is False,
            "use_aux_hidden_state = false, as EAGLE-1 heads do",
        ),
        ("sliding_attention" in own_layers, "sliding-window attention"),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act = {raw.get('hidden_act')!r}"),
    )
    refuse(where, "plain EAGLE-3 heads (full attention, silu)", variants)
