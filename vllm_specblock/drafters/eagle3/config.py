"""EAGLE-3 and P-EAGLE model configuration, from `config.json` of the authors or speculators."""

from __future__ import annotations

from typing import Any

from vllm_specblock.drafters.common.config import (
    MASK_KEYS,
    CheckpointError,
    Count,
    DecoderShape,
    flattened,
    key_of,
    refuse,
    shape_of,
)

_LLAMA = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("PeagleLlamaForCausalLM", "LlamaForCausalLM", "llama"),
)
_QWEN3 = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3ForCausalLM", "qwen3")
_KINDS = dict.fromkeys(_LLAMA, "llama") | dict.fromkeys(_QWEN3, "qwen3")
"""Kinds of layers by architecture. Some are named after the layer alone, and taken for EAGLE-3
because there is a draft vocabulary; the last are `model_type` in the speculators layout."""

_BESIDE = ("target_hidden_size", "eagle_aux_hidden_state_layer_ids", "mask_token_id")
_ONLY = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Keys of the speculators layout beside the object that describes the layer."""

_LAYOUTS = ("eagle3", "peagle")


class Eagle3Shape(DecoderShape):
    """Decoder layers over embedding and feature. Only the first layer reads the embedding.

    With `mask_token_id` it is P-EAGLE's (arXiv 2602.01469), which drafts all tokens at once.
    """

    num_hidden_layers: Count = 1
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    norm_before_fc: bool = False  # the features are normed together
    fc_norm: bool = False  # each feature is normed
    norm_output: bool = False  # a later step's feature is the state after the final norm

    @property
    def num_features(self) -> int:
        """How many hidden states of the target are fused."""
        return 3 if self.layer_ids is None else len(self.layer_ids)


def kind_in(raw: dict[str, Any]) -> str | None:
    """Return "eagle3" or "peagle", supported or not; None: a config of another kind."""
    layout, named = raw.get("speculators_model_type"), raw.get("architectures") or []
    names = f"{layout} {named}".lower()
    if "peagle" in names or any(
        key in raw for key in ("parallel_drafting", "pard_token", "ptd_token_id")
    ):
        return "peagle"
    known = "draft_vocab_size" in raw and any(name in _KINDS for name in named)
    return "eagle3" if layout == "eagle3" or "eagle" in names or known else None


def from_json(raw: dict[str, Any], where: str) -> Eagle3Shape:
    """Parse `raw`, a config.json; raises CheckpointError, in which `where` names it."""
    parallel, layout = kind_in(raw) == "peagle", raw.get("speculators_model_type")
    if layout in _LAYOUTS:  # translated into the authors' keys
        raw = {"norm_before_residual": layout == "eagle3"} | raw
        raw = flattened(raw, where, _BESIDE, _ONLY)
        raw["architectures"] = [raw.get("model_type", "llama")]
    named, eagle = raw.get("architectures") or [], raw.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    variants = ((layout not in (None, *_LAYOUTS), f"speculators_model_type = {layout!r}"),)
    refuse(raw | eagle, where, "plain EAGLE-3 and P-EAGLE heads (silu)", variants)
    kind = next((_KINDS[name] for name in named if name in _KINDS), None)
    if kind is None:
        raise CheckpointError(
            f"{where} is of architecture {named or None}, but such a head must be one of "
            f"{', '.join(_KINDS)}."
        )
    if kind == "qwen3":
        raw = {"head_dim": 128} | raw  # Qwen3's default
        says_rope = any(map(raw.get, ("rope_theta", "rope_scaling", "rope_parameters")))
        # As vLLM does. In the flat layout transformers has filled in its 10000 by then.
        if layout is not None and not says_rope:
            raw["rope_theta"] = 1e6
    mask, layers = key_of(raw, *MASK_KEYS), "eagle_aux_hidden_state_layer_ids"
    if parallel and raw.get(mask) is None:
        raise CheckpointError(f"{where} lacks the key 'mask_token_id', which P-EAGLE needs.")
    own = {
        # As Model Runner V2 does. `eagle_config.eagle_aux_hidden_state_layer_ids` is not read
        # there: other engines write it, too, and count its layers from another end of the layer.
        "layer_ids": raw.get(layers) or eagle.get("layer_ids") or None,
        "qk_norm": kind == "qwen3",
        "output_bias": bool(raw.get("attention_bias")) and kind == "llama",
        "mlp_bias": bool(raw.get("mlp_bias")) and kind == "llama",
        "norm_before_fc": bool(eagle.get("norm_before_fc", raw.get("norm_before_fc"))),
        "mask_token_id": raw.get(mask) if parallel else None,
    }
    layers = layers if raw.get(layers) else "eagle_config.layer_ids"
    return shape_of(raw, own, where, Eagle3Shape, mask_token_id=mask, layer_ids=layers)
