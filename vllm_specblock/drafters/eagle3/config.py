"""EAGLE-3 model configuration, and its `config.json` in the authors' and speculators' layouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

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
_TOP_LEVEL = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "quantization_config",
)
"""Keys of the speculators layout beside the object that describes the layer."""


class Eagle3Shape(DecoderShape):
    """Decoder layers over embedding and feature. Only the first layer reads the embedding."""

    target_hidden_size: Count  # Ht
    num_hidden_layers: Count = 1
    draft_vocab_size: Count  # Vd; equal to `vocab_size`: no mapping
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    norm_before_fc: bool = False  # the features are normed together
    fc_norm: bool = False  # each feature is normed
    norm_output: bool = False  # a later step's feature is the state after the final norm
    logit_scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def num_features(self) -> int:
        """How many hidden states of the target are fused."""
        return 3 if self.layer_ids is None else len(self.layer_ids)


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
    eagle, layout = eagle if isinstance(eagle, dict) else {}, raw.get("speculators_model_type")
    variants = (
        ("peagle" in f"{layout} {named}".lower(), "a head that drafts in parallel (P-EAGLE)"),
        (layout not in (None, "eagle3"), f"speculators_model_type = {layout!r}"),
        (raw.get("parallel_drafting"), "parallel drafting"),
    )
    refuse(raw, eagle, where, "plain EAGLE-3 heads (full attention, silu)", variants)
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
    flat = layer | {"speculators_model_type": "eagle3", "norm_before_residual": True}
    flat |= {key: raw[key] for key in _TOP_LEVEL if raw.get(key) is not None}
    model_type = layer.get("model_type", "llama")
    named = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    return flat | {"architectures": [named.get(model_type, model_type)]}
