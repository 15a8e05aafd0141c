"""EAGLE-3 `config.json`, as vLLM reads it.

Two layouts: that of the EAGLE authors, flat like a Llama's, and that of the speculators library,
which keeps the layer's keys under `transformer_layer_config`.
"""

from __future__ import annotations

from typing import Any

from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.specblock.config import CheckpointError, rope_type
from vllm_specblock.drafters.specblock.config_json import checked, rope_of

_KINDS = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    # Named after the layer alone, and taken for EAGLE-3 because there is a draft vocabulary.
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
_HEAD_DIM_OF_QWEN3 = 128
"""What a Qwen3 config means that leaves `head_dim` out."""
_THETA_OF_QWEN3 = 1e6
"""What vLLM takes for a Qwen3 layer in the speculators layout that says nothing of RoPE; in the
flat layout transformers has filled in its 10000 by then."""

# Key of the speculators layout's top level → value when it is missing.
_SPECULATORS_KEYS = {
    "draft_vocab_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether the config.json `raw` is an EAGLE head's, be it one that `from_json` refuses."""
    if raw.get("speculators_model_type") in ("eagle3", "peagle"):
        return True
    named = raw.get("architectures") or []
    if any("eagle" in str(name).lower() for name in named):
        return True
    return "draft_vocab_size" in raw and any(name in _KINDS for name in named)


def from_json(raw: dict[str, Any], where: str) -> Eagle3Shape:
    """The shape in `raw`, a config.json of either layout; `where` names it in errors.

    Raises:
        CheckpointError: an architecture or a variant that is not supported, a key missing or
            out of range.
    """
    raw = _flat(raw, where)
    kind = _kind(raw, where)
    _refuse_variants(raw, where)
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None and kind == "qwen3":
        head_dim = _HEAD_DIM_OF_QWEN3
    elif head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    eagle, layer_ids = _eagle(raw), _layer_ids(raw)
    bias = bool(raw.get("attention_bias"))
    keys = {
        "hidden_size": hidden,
        "target_hidden_size": raw.get("target_hidden_size") or hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "num_hidden_layers": raw.get("num_hidden_layers"),
        "intermediate_size": raw.get("intermediate_size"),
        "vocab_size": raw.get("vocab_size"),
        "draft_vocab_size": raw.get("draft_vocab_size") or raw.get("vocab_size"),
        "rms_norm_eps": raw.get("rms_norm_eps"),
        **_rope(raw, kind, head_dim),
        "num_features": raw.get("num_aux_hidden_states")
        or raw.get("num_aux_layers")
        or (len(layer_ids) if isinstance(layer_ids, list) else 3),
        "layer_ids": layer_ids,
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias,
        "output_bias": bias and kind == "llama",
        "mlp_bias": bool(raw.get("mlp_bias")) and kind == "llama",
        "norm_before_residual": bool(raw.get("norm_before_residual")),
        "norm_before_fc": bool(eagle.get("norm_before_fc", raw.get("norm_before_fc"))),
        "fc_norm": bool(raw.get("fc_norm")),
        "norm_output": bool(raw.get("norm_output")),
        "logit_scale": raw.get("logit_scale"),
    }
    # Absent ones are left out: then either a default holds, or the key is missed by its name.
    return checked(where, {key: v for key, v in keys.items() if v is not None}, Eagle3Shape)


def _flat(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The speculators layout in the authors' words; anything else as it is."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    if kind != "eagle3":
        what = "drafts in parallel (P-EAGLE)" if kind == "peagle" else f"is of type {kind!r}"
        raise CheckpointError(f"{where} {what}, but only plain EAGLE-3 heads can be drafted with.")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{where} has transformer_layer_config = {layer!r}, but it must be an object that "
            "describes the drafter's layer."
        )
    flat = layer | {"speculators_model_type": kind}
    flat |= {key: raw.get(key, missing) for key, missing in _SPECULATORS_KEYS.items()}
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids", "quantization_config"):
        if raw.get(key):
            flat[key] = raw[key]
    model_type = layer.get("model_type", "llama")
    named = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    return flat | {"architectures": [named.get(model_type, model_type)]}


def _kind(raw: dict[str, Any], where: str) -> str:
    named = raw.get("architectures") or []
    if any("peagle" in str(name).lower() for name in named):
        raise CheckpointError(
            f"{where} drafts in parallel (P-EAGLE), but only plain EAGLE-3 heads can be drafted "
            "with."
        )
    for name in named:
        if name in _KINDS:
            return _KINDS[name]
    raise CheckpointError(
        f"{where} is of architecture {named or None}, but an EAGLE-3 head must be one of "
        f"{', '.join(_KINDS)}."
    )


def _refuse_variants(raw: dict[str, Any], where: str) -> None:
    types, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    # Some name those of the target's layers, too; a wrong number is refused with the shape.
    own_layers = (
        types[: layers if isinstance(layers, int) else 1] if isinstance(types, list) else []
    )
    sliding = "sliding_attention" in own_layers
    for refused, what, supported in (
        (raw.get("quantization_config"), "quantised weights", "plain ones"),
        (raw.get("parallel_drafting"), "parallel drafting", "plain EAGLE-3"),
        (
            _eagle(raw).get("use_aux_hidden_state", True) is False,
            "use_aux_hidden_state = false, as EAGLE-1 heads do",
            "heads that read the target's inner hidden states",
        ),
        (sliding, "sliding-window attention", "full attention"),
        (
            raw.get("hidden_act", "silu") != "silu",
            f"hidden_act = {raw.get('hidden_act')!r}",
            "'silu'",
        ),
    ):
        if refused:
            raise CheckpointError(f"{where} has {what}, but only {supported} can be drafted with.")


def _rope(raw: dict[str, Any], kind: str, head_dim: Any) -> dict[str, Any]:
    """Fields of RoPE, with what transformers and vLLM take for keys that are missing."""
    theta, scaling = rope_of(raw)
    said = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if kind == "qwen3" and "speculators_model_type" in raw and not (said or "rope_theta" in raw):
        theta = _THETA_OF_QWEN3
    if scaling is not None and rope_type(scaling) in ("llama3", "yarn"):
        trained = raw.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", raw.get("max_position_embeddings")
        )
        scaling = scaling | {"original_max_position_embeddings": trained}
    partial = said.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    rotary_dim = None
    if partial != 1 and isinstance(partial, (int, float)) and isinstance(head_dim, int):
        rotary_dim = int(head_dim * partial)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim}


def _eagle(raw: dict[str, Any]) -> dict[str, Any]:
    eagle = raw.get("eagle_config")
    return eagle if isinstance(eagle, dict) else {}


def _layer_ids(raw: dict[str, Any]) -> Any:
    # As Model Runner V2 does. `eagle_config.eagle_aux_hidden_state_layer_ids` is not read there:
    # other engines write it, too, and count its layers from another end of the layer.
    return raw.get("eagle_aux_hidden_state_layer_ids") or _eagle(raw).get("layer_ids") or None
