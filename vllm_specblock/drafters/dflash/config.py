"""Configuration of drafters over blocks of masks, from `config.json` of the authors or speculators.

DFlash (arXiv 2602.06036), JetSpec (2606.18394), DFlash2, and DSpark (2607.05147).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

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

_OWN = {
    "dspark": {"pair_rank": "markov_rank"},
    "dflash2": {
        "pair_rank": "selector_rank",
        "pair_width": "selector_top_k",
        "conv_taps": "conv_kernel_size",
        "conv_group": "conv_group_size",
    },
}
"""Our fields, and the keys, that a kind needs."""

_SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "soft_cap": "final_logit_softcapping",
}
"""Those that DFlash2 may have in `dflash_config`. vLLM ignores its `logit_scale`."""

_LAYERS = "aux_hidden_state_layer_ids"
_BESIDE = (
    *("target_hidden_size", "block_size", "mask_token_id", _LAYERS),
    *("markov_head_type", "markov_rank", *_OWN["dflash2"].values()),
)
_BESIDE_ONLY = ("draft_vocab_size", "sample_from_anchor")
"""Keys of the speculators layout beside the object that describes the layers."""


def _any_masks(count: int) -> int:
    if count < 1:
        raise ValueError("a block must hold a root and at least one mask")
    return count


class DFlashShape(DecoderShape):
    """Qwen3 layers over a block: the root's token, and masks."""

    rope_theta: Annotated[float, Field(gt=0)] = 1e6
    qk_norm: Literal[True] = True
    masks: Annotated[int, AfterValidator(_any_masks)]  # of a block in training
    mask_token_id: Annotated[int, Field(ge=0)]
    # The authors' config.json names the last of the layers that were run, from 0 on.
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1), Ascending]
    causal: bool = False  # no row of a block sees a later one, as in JetSpec drafters
    causal_windows: bool = False  # the same in layers with a window alone
    from_root: bool = False  # the root's row drafts the first token, else the first mask's
    # Of the pair head, which corrects a token's logit by the token before it; None: no such head.
    pair_rank: Count | None = None
    pair_width: Count = 64  # tokens of a position that it corrects, the likeliest ones
    # DFlash2 alone.
    conv_taps: Count | None = None  # rows that a convolution reads, up to its own
    conv_group: Count | None = None  # channels with the same change of its weights
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0
    soft_cap: Annotated[float, Field(ge=0)] = 0.0  # of the logits; 0: none

    @property
    def kind(self) -> str:
        """The kind of drafter, by which it is registered."""
        if self.pair_rank is not None:
            return "dspark" if self.conv_taps is None else "dflash2"
        return "jetspec" if self.causal else "dflash"

    @property
    def layer_causal(self) -> tuple[bool, ...]:
        """Whether each layer's rows see no later row of their block."""
        windowed = (each is not None for each in self.layer_windows)
        return tuple(self.causal or (each and self.causal_windows) for each in windowed)

    @model_validator(mode="after")
    def _check_groups(self) -> DFlashShape:
        if self.conv_group is not None and self.hidden_size % self.conv_group:
            raise ValueError(
                f"conv_group_size is {self.conv_group}, but must divide hidden_size, "
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
    block, layers, own = raw.get("dflash_config"), _LAYERS, dict(_OWN.get(kind, {}))
    block = block if isinstance(block, dict) and layout is None else {}
    if layout in _LAYOUTS:
        causal_windows = not raw.get("sliding_window_non_causal", kind != "dspark")
        raw = flattened(raw, where, _BESIDE, _BESIDE_ONLY) | {"architectures": [architecture]}
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
    refuse(raw, raw, where, supported, variants)
    mask, size = key_of(raw, *MASK_KEYS), key_of(raw, "block_size", "dspark_block_size")
    for key in (size, layers, *own.values()):
        if raw.get(key) is None:
            raise CheckpointError(f"{where} lacks the key {key!r}, which such a drafter needs.")
    keys = {
        "masks": _moved([raw[size]], -1)[0],
        "mask_token_id": raw.get(mask),
        "layer_ids": raw[layers] if layout else _moved(raw[layers], 1),
        "causal": any(causal.values()),
        "causal_windows": causal_windows,
        # vLLM's default for DSpark, outside of the speculators layout.
        "from_root": bool(raw.get("sample_from_anchor", kind == "dspark" and layout is None)),
    }
    keys |= {field: raw[key] for field, key in own.items()}
    if kind == "dflash2":
        keys |= {field: block.get(key) for field, key in _SCALES.items()}
        own |= _SCALES
    # In the flat layout transformers fills in its 10000.
    raw = raw if layout is None else {"rope_theta": 1e6} | raw
    own |= {"masks": size, "mask_token_id": mask, "layer_ids": layers}
    return shape_of(raw, keys, where, DFlashShape, **own)


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
