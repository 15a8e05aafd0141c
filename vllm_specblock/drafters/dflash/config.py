"""Configuration of drafters over blocks of masks, from `config.json` of the authors or speculators.

DFlash (arXiv 2602.06036), JetSpec (2606.18394), DFlash2, and DSpark (2607.05147).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vllm_specblock.drafters.common.config import (
    MASK_KEYS,
    Ascending,
    CheckpointError,
    Count,
    DecoderShape,
    check_containers,
    flattened,
    key_of,
    refuse,
    shape_of,
)

ARCHITECTURE = "DFlashDraftModel"
_ARCHITECTURES = {"dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
_LAYOUTS = ("dflash", *_ARCHITECTURES)  # of the speculators library

_NEEDED: dict[str, tuple[str, ...]] = {
    "dspark": ("markov_rank",),
    "dflash2": ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
}
"""Keys of a kind, which need values."""

_HEADS = ("markov_head_type", *_NEEDED["dspark"], *_NEEDED["dflash2"])
_SCALES = ("input_embedding_scale", "final_logit_softcapping")
_LAYERS = "aux_hidden_state_layer_ids"
_BESIDE = (_LAYERS, "target_hidden_size", "block_size", "mask_token_id", *_HEADS)
_ONLY = ("draft_vocab_size", "sample_from_anchor")
"""Keys of the speculators layout beside the object that describes the layers."""


class DFlashShape(DecoderShape):
    """Qwen3 layers over a block: the root's token, and masks."""

    rope_theta: Annotated[float, Field(gt=0)] = 1e6
    qk_norm: Literal[True] = True
    masks: Count  # of a block in training
    mask_token_id: Annotated[int, Field(ge=0)]
    # The authors' config.json names the last of the layers that were run, from 0 on.
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1), Ascending]
    causal: bool = False  # no row of a block sees a later one, as in JetSpec drafters
    causal_windows: bool = False  # the same in layers with a window alone
    from_root: bool = False  # the root's row drafts the first token, else the first mask's
    # Of heads that correct a token's logit by the token before it: DSpark's, DFlash2's; None: none.
    markov_rank: Count | None = None
    selector_rank: Count | None = None
    selector_top_k: Count = 64  # tokens of a position that either corrects, the likeliest ones
    # DFlash2 alone.
    conv_kernel_size: Count = 1  # rows that a convolution reads, up to its own
    conv_group_size: Count = 1  # channels with the same change of its weights
    input_embedding_scale: Annotated[float, Field(gt=0)] = 1.0
    final_logit_softcapping: Annotated[float, Field(ge=0)] = 0.0  # 0: none

    @property
    def kind(self) -> str:
        """The kind of drafter, by which it is registered."""
        if self.markov_rank or self.selector_rank:
            return "dflash2" if self.selector_rank else "dspark"
        return "jetspec" if self.causal else "dflash"

    @property
    def layer_causal(self) -> tuple[bool, ...]:
        """Whether each layer's rows see no later row of their block."""
        windowed = (each is not None for each in self.layer_windows)
        return tuple(self.causal or (each and self.causal_windows) for each in windowed)

    @model_validator(mode="after")
    def _check_groups(self) -> DFlashShape:
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, but must divide hidden_size, "
                f"{self.hidden_size}"
            )
        return self


def kind_in(raw: dict[str, Any]) -> str | None:
    """Return the kind of such a drafter, supported or not; None: a config of another kind."""
    names = f"{raw.get('speculators_model_type')} {raw.get('architectures')}".lower()
    kinds = ("dspark", "dflash2", "dflash")
    found = next((kind for kind in kinds if kind in names or f"{kind}_config" in raw), None)
    return "jetspec" if found == "dflash" and any(_causal_keys(raw).values()) else found


def from_json(raw: dict[str, Any], where: str) -> DFlashShape:
    """Parse `raw`, a config.json; raises CheckpointError, in which `where` names it."""
    layout, kind = raw.get("speculators_model_type"), kind_in(raw) or ""
    architecture = _ARCHITECTURES.get(kind, ARCHITECTURE)
    block, layers, needed = raw.get("dflash_config"), _LAYERS, _NEEDED.get(kind, ())
    block = block if isinstance(block, dict) and layout is None else {}
    if layout in _LAYOUTS:
        causal_windows = not raw.get("sliding_window_non_causal", kind != "dspark")
        raw = flattened(raw, where, _BESIDE, _ONLY) | {"architectures": [architecture]}
    else:
        raw = raw | block
        check_containers(raw, where)
        of_dspark = raw.get("dspark_target_layer_ids") and not block.get("target_layer_ids")
        layers = "dspark_target_layer_ids" if of_dspark else "target_layer_ids"
        # Windows that are named by layer are causal if nothing is said.
        sliding = "sliding_attention" in (raw.get("layer_types") or [])
        causal_windows = sliding and not _causal_keys(raw)
    named, causal = raw.get("architectures") or [], _causal_keys(raw)
    variants = (
        (layout not in (None, *_LAYOUTS), f"speculators_model_type = {layout!r}"),
        (architecture not in named, f"architectures = {named}"),
        (len(set(causal.values())) > 1, f"{' and '.join(causal)} that contradict each other"),
        (raw.get("is_neox_style", True) is False, "interleaved RoPE"),
        (raw.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"), "sinks"),
        (raw.get("attention_value_scale") not in (None, 1, 1.0), "scaled values"),
        (raw.get("markov_head_type", "vanilla") != "vanilla", "a gated or recurrent Markov head"),
    )
    supported = "DFlash, JetSpec, DFlash2 and DSpark drafters with Qwen3 layers"
    refuse(raw, where, supported, variants)
    mask, size = key_of(raw, *MASK_KEYS), key_of(raw, "block_size", "dspark_block_size")
    for key in (size, layers, *needed):
        if raw.get(key) is None:
            raise CheckpointError(f"{where} lacks the key {key!r}, which such a drafter needs.")
    dflash2 = kind == "dflash2"
    scales, scale = (block, "output_multiplier") if dflash2 else (raw, "logit_scale")
    own = {
        "masks": _moved([raw[size]], -1)[0],
        "mask_token_id": raw.get(mask),
        "layer_ids": raw[layers] if layout else _moved(raw[layers], 1),
        "causal": any(causal.values()),
        "causal_windows": causal_windows,
        # vLLM's default for DSpark, outside of the speculators layout.
        "from_root": bool(raw.get("sample_from_anchor", kind == "dspark" and layout is None)),
        **{key: raw[key] if key in needed else None for key in _HEADS},
        # vLLM reads them in `dflash_config` alone, and no other scale of DFlash2's logits.
        "logit_scale": scales.get(scale),
        **{key: scales.get(key) if dflash2 else None for key in _SCALES},
    }
    # In the flat layout transformers fills in its 10000.
    raw = raw if layout is None else {"rope_theta": 1e6} | raw
    keys_of = {"mask_token_id": mask, "layer_ids": layers, "logit_scale": scale}
    return shape_of(raw, own, where, DFlashShape, masks=f"{size} - 1", **keys_of)


def _moved(numbers: Any, by: int) -> Any:
    """Add `by` to each number of a list; leave anything else, which is refused with the shape."""
    whole = isinstance(numbers, list) and all(isinstance(each, (int, float)) for each in numbers)
    return [each + by for each in numbers] if whole else numbers


def _causal_keys(raw: dict[str, Any]) -> dict[str, bool]:
    """JetSpec writes `causal_head`, others vLLM's keys."""
    block = raw.get("dflash_config")
    own = raw | (block if isinstance(block, dict) else {})
    keys = ("causal_head", "causal", "is_causal")
    return {key: bool(own[key]) for key in keys if own.get(key) is not None}
