"""DFlash model configuration, and its `config.json` as the authors write it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_specblock.drafters.specblock.config import CheckpointError, Count, NetworkShape
from vllm_specblock.drafters.specblock.config_json import checked, rope_of

ARCHITECTURE = "DFlashDraftModel"
SPECULATORS = "jetspec"
"""What the speculators library, whose layouts are refused, calls a drafter with causal blocks."""


class DFlashShape(NetworkShape):
    """Qwen3 layers over a block of masks, whose context is keys and values of the target's states.

    It is as wide as the target, and embeds and names tokens as the target does.

    Attributes:
        masks: of a block in training; a block is the root's token and so many masks.
        mask_token_id: the target's token whose embedding stands for a mask.
        layer_ids: hidden states of the target that are fused: i is the residual stream after i
            layers (config.json names the last of those layers, from 0 on).
        attention_bias: of all of the attention's projections.
    """

    computes_yarn: ClassVar[bool] = True

    rope_theta: Annotated[float, Field(gt=0)] = 1e6
    qk_norm: Literal[True] = True
    masks: Count
    mask_token_id: Annotated[int, Field(ge=0)]
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    attention_bias: bool = False

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target; i is that after i layers."""
        return self.layer_ids

    @model_validator(mode="after")
    def _check(self) -> DFlashShape:
        ids = list(self.layer_ids)
        # The target hands its states out in layer order: any other would swap columns of fc.
        if ids != sorted(set(ids)) or ids[0] < 1:
            said = [each - 1 for each in ids]
            raise ValueError(
                f"target_layer_ids is {said}, but must be different layers in ascending order"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, but the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        return self


def is_dflash(raw: dict[str, Any]) -> bool:
    """Whether the config.json `raw` is a DFlash or JetSpec drafter's, be it one that `from_json`
    refuses."""
    named = [*(raw.get("architectures") or []), raw.get("speculators_model_type")]
    names = " ".join(map(str, named)).lower()
    return "dflash_config" in raw or "dflash" in names or SPECULATORS in names


def is_causal(raw: dict[str, Any]) -> bool:
    """Whether no row of a block sees a later one, as in JetSpec drafters.

    Their authors write `causal_head`; what trains them for vLLM writes a key that it reads.
    """
    return any(_causal_keys(raw).values()) or raw.get("speculators_model_type") == SPECULATORS


def from_json(raw: dict[str, Any], where: str, causal: bool = False) -> DFlashShape:
    """The shape in `raw`.

    Args:
        where: names its file in errors.
        causal: whether its blocks have to be, as `is_causal` has it; else they must not.

    Raises:
        CheckpointError: a variant that is not supported, a key missing or out of range.
    """
    own = _own(raw)
    _refuse_variants(raw, own, where, causal)
    theta, scaling = rope_of({"rope_theta": 1e6} | raw)
    if scaling is not None and raw.get("max_position_embeddings"):
        scaling = {"original_max_position_embeddings": raw["max_position_embeddings"]} | scaling
    layers, block = own.get("target_layer_ids"), own.get("block_size", raw.get("block_size"))
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    if isinstance(layers, list) and all(isinstance(each, int) for each in layers):
        layers = tuple(each + 1 for each in layers)
    keys = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": raw.get("intermediate_size"),
        "num_hidden_layers": raw.get("num_hidden_layers"),
        "vocab_size": raw.get("vocab_size"),
        "rms_norm_eps": raw.get("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "masks": block - 1 if isinstance(block, int) else block,
        "mask_token_id": own.get("mask_token_id", raw.get("mask_token_id")),
        "layer_ids": layers,
        "attention_bias": bool(raw.get("attention_bias")),
    }
    for key, name in (("masks", "block_size"), ("layer_ids", "dflash_config.target_layer_ids")):
        if keys[key] is None:
            raise CheckpointError(f"{where} lacks the key {name!r}, which such a drafter has.")
    return checked(where, {key: v for key, v in keys.items() if v is not None}, DFlashShape)


def _own(raw: dict[str, Any]) -> dict[str, Any]:
    own = raw.get("dflash_config")
    return own if isinstance(own, dict) else {}


def _causal_keys(raw: dict[str, Any]) -> dict[str, bool]:
    own = _own(raw)
    said = {
        "causal_head": own.get("causal_head"),
        "causal": own.get("causal"),
        "is_causal": raw.get("is_causal"),
    }
    return {key: bool(value) for key, value in said.items() if value is not None}


def _refuse_variants(raw: dict[str, Any], own: dict[str, Any], where: str, causal: bool) -> None:
    named, types = raw.get("architectures") or [], raw.get("layer_types") or []
    hidden, vocabulary = raw.get("hidden_size"), raw.get("vocab_size")
    said = _causal_keys(raw)
    other = "blocks whose rows all see each other" if causal else "causal blocks"
    widths = {raw.get("target_hidden_size"), own.get("target_hidden_size")} - {None, hidden}
    for refused, what in (
        ("speculators_model_type" in raw, "the layout of the speculators library"),
        (ARCHITECTURE not in named, f"architectures = {named or None}"),
        (raw.get("quantization_config"), "quantised weights"),
        ("sliding_attention" in types or own.get("use_swa"), "sliding-window attention"),
        (len(set(said.values())) > 1, f"{' and '.join(said)} that contradict each other"),
        (is_causal(raw) is not causal, other),
        (own.get("sample_from_anchor"), "blocks that are read from their first token"),
        (own.get("use_aux_hidden_state", True) is False, "use_aux_hidden_state = false"),
        (raw.get("is_neox_style", True) is False, "interleaved RoPE"),
        (own.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"), "sinks"),
        (own.get("attention_value_scale") not in (None, 1, 1.0), "scaled values"),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act = {raw.get('hidden_act')!r}"),
        (widths, "a width that is not the target's"),
        (raw.get("draft_vocab_size") not in (None, vocabulary), "a vocabulary of its own"),
    ):
        if refused:
            name, within = ("JetSpec", "causal") if causal else ("DFlash", "full")
            raise CheckpointError(
                f"{where} has {what}, but only plain {name} drafters ({ARCHITECTURE}, Qwen3 "
                f"layers, {within} attention within a block) can be drafted with."
            )
