"""DFlash model configuration, and its `config.json` as the authors write it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_specblock.drafters.common.config import (
    Ascending,
    CheckpointError,
    Count,
    DecoderShape,
    refuse,
    shape_of,
)

ARCHITECTURE = "DFlashDraftModel"
_SPECULATORS = "jetspec"  # a drafter with causal blocks in the speculators library


class DFlashShape(DecoderShape):
    """Qwen3 layers over a block of masks, with the target's width, embedding and LM head."""

    rope_theta: Annotated[float, Field(gt=0)] = 1e6
    qk_norm: Literal[True] = True
    masks: Count  # of a block in training, after the root's token
    mask_token_id: Annotated[int, Field(ge=0)]  # of the target
    # config.json names the last of the layers that were run, from 0 on.
    layer_ids: Annotated[tuple[Count, ...], Field(min_length=1), Ascending]
    causal: bool = False  # no row of a block sees a later one, as in JetSpec drafters

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size


def is_dflash(raw: dict[str, Any]) -> bool:
    """Return whether `raw` is a DFlash or JetSpec config, supported or not."""
    named = [*(raw.get("architectures") or []), raw.get("speculators_model_type")]
    names = " ".join(map(str, named)).lower()
    return "dflash_config" in raw or "dflash" in names or _SPECULATORS in names


def is_causal(raw: dict[str, Any]) -> bool:
    """Return whether blocks are causal: JetSpec writes `causal_head`, others vLLM's key."""
    return any(_causal_keys(raw).values()) or raw.get("speculators_model_type") == _SPECULATORS


def from_json(raw: dict[str, Any], where: str) -> DFlashShape:
    """Parse `raw`, a config.json; raises CheckpointError, in which `where` names it."""
    own = _own(raw)
    named, hidden = raw.get("architectures") or [], raw.get("hidden_size")
    causal, vocabulary = _causal_keys(raw), raw.get("vocab_size")
    widths = raw.get("target_hidden_size"), own.get("target_hidden_size")
    variants = (
        ("speculators_model_type" in raw, "the layout of the speculators library"),
        (ARCHITECTURE not in named, f"architectures = {named or None}"),
        (own.get("use_swa"), "sliding-window attention"),
        (len(set(causal.values())) > 1, f"{' and '.join(causal)} that contradict each other"),
        (own.get("sample_from_anchor"), "blocks that are read from their first token"),
        (raw.get("is_neox_style", True) is False, "interleaved RoPE"),
        (own.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"), "sinks"),
        (own.get("attention_value_scale") not in (None, 1, 1.0), "scaled values"),
        (any(width not in (None, hidden) for width in widths), "a width that is not the target's"),
        (raw.get("draft_vocab_size") not in (None, vocabulary), "a vocabulary of its own"),
    )
    supported = f"plain DFlash and JetSpec drafters ({ARCHITECTURE}, Qwen3 layers)"
    refuse(raw, own, where, supported, variants)
    layers, block = own.get("target_layer_ids"), own.get("block_size", raw.get("block_size"))
    mask = own.get("mask_token_id", raw.get("mask_token_id"))
    for key, value in (("block_size", block), ("dflash_config.target_layer_ids", layers)):
        if value is None:
            raise CheckpointError(f"{where} lacks the key {key!r}, which such a drafter needs.")
    if isinstance(layers, list) and all(isinstance(each, int) for each in layers):
        layers = tuple(each + 1 for each in layers)
    bias = bool(raw.get("attention_bias"))
    keys = {
        "masks": block - 1 if isinstance(block, int) else block,
        "mask_token_id": mask,
        "layer_ids": layers,
        "qkv_bias": bias,
        "output_bias": bias,
        "causal": is_causal(raw),
    }
    shape = shape_of({"rope_theta": 1e6} | raw, keys, where, DFlashShape)
    if shape.mask_token_id >= shape.vocab_size:
        raise CheckpointError(
            f"{where} has mask_token_id = {mask}, but the vocabulary ends at "
            f"{shape.vocab_size - 1}."
        )
    return shape


def _own(raw: dict[str, Any]) -> dict[str, Any]:
    own = raw.get("dflash_config")
    return own if isinstance(own, dict) else {}


def _causal_keys(raw: dict[str, Any]) -> dict[str, bool]:
    own = _own(raw)
    keys = {key: own.get(key) for key in ("causal_head", "causal")}
    keys["is_causal"] = raw.get("is_causal")
    return {key: bool(value) for key, value in keys.items() if value is not None}
