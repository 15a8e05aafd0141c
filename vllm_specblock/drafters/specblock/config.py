"""SpecBlock model configuration, and its `config.json` in two layouts.

"published" is the SpecBlock authors'. "ours" also names what theirs leaves to the code: RoPE base
of later blocks, rank features, q/k norm, target layers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_specblock.drafters.common.config import (
    Ascending,
    CheckpointError,
    Count,
    NetworkShape,
    checked,
    default_layer_ids,
    layers_of,
)

Layout = Literal["ours", "published"]

TOP_LOGPROBS = 10
"""Log-probabilities among the rank features ψ (appendix B)."""

PUBLISHED_RANK_TOPK = 20  # of the published rank heads; their config does not say

MODEL_TYPE = "specblock"
ARCHITECTURE = "SpecBlockDrafter"
PUBLISHED_ARCHITECTURES = ("LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")

_OF_VLLM = {
    *("model_type", "architectures", "max_position_embeddings", "torch_dtype", "dtype"),
    *("transformers_version", "speculators_config", "speculators_model_type"),
    "transformer_layer_config",
}
"""Keys of our config.json that only vLLM or transformers read."""

PUBLISHED_K = "diffspec_draft_token_num"
OF_BOTH = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("num_hidden_layers", "vocab_size", "draft_vocab_size", "rank_classes", "rms_norm_eps"),
)
"""Keys that both layouts have. Where the published one lacks some, the authors' code has values."""


class TargetInfo(BaseModel):
    """The model that the drafter drafts for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None  # folder or hub id that vLLM loads as the target, if known
    architectures: tuple[str, ...] = ()  # of its config.json; for information only
    hidden_size: Count  # Ht
    vocab_size: Count  # V
    # The three hidden states of the context feature (eq. 1): i is the residual stream after i
    # layers. None: `default_layer_ids`.
    layer_ids: Annotated[tuple[int, int, int], Ascending] | None = None


class DrafterConfig(NetworkShape):
    """A SpecBlock drafter's tensors and numbers (paper, sections 3.1 and 3.2)."""

    target_hidden_size: Count
    block_size: Count  # K, draft positions per forward
    draft_vocab_size: Annotated[int, Field(ge=TOP_LOGPROBS)]  # Vd; `vocab_size`: no mapping
    rank_classes: Count = 4
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    # Logits over which the rank features are taken.
    rank_topk: Annotated[int, Field(ge=TOP_LOGPROBS)] | Literal["full"] = PUBLISHED_RANK_TOPK
    # RoPE base of later blocks: block 1's, or moved on by the depth of the node before.
    block_rope: Literal["base", "path"] = "base"
    prefix_broadcast: bool = True  # condition and token go to all K positions, or to the first
    layer_shift: bool = True  # eq. 3 stands between the layers
    target: TargetInfo

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the states that it reads of a target with so many layers."""
        return self.target.layer_ids or default_layer_ids(num_layers)

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        for key, value, of_target in (
            ("target_hidden_size", self.target_hidden_size, self.target.hidden_size),
            ("vocab_size", self.vocab_size, self.target.vocab_size),
        ):
            if value != of_target:
                raise ValueError(f"{key} is {value}, but the target's is {of_target}")
        return self


def layout_of(raw: dict[str, Any], where: str) -> Layout:
    """Return the layout of `raw`; raises CheckpointError if it is no SpecBlock drafter's."""
    architectures = raw.get("architectures") or []
    if raw.get("model_type") == MODEL_TYPE or ARCHITECTURE in architectures:
        return "ours"
    if any(name in PUBLISHED_ARCHITECTURES for name in architectures):
        return "published"
    raise CheckpointError(
        f"{where} is of architecture {architectures or None}, but a SpecBlock drafter is one of "
        f"{', '.join((ARCHITECTURE, *PUBLISHED_ARCHITECTURES))}."
    )


def from_json(raw: dict[str, Any], where: str) -> DrafterConfig:
    """Parse `raw`, a config.json; raises CheckpointError, in which `where` names it."""
    if layout_of(raw, where) == "ours":
        ours = {k: v for k, v in raw.items() if k not in _OF_VLLM and not k.startswith("_")}
        return checked(where, ours, DrafterConfig)
    size = raw.get("target_hidden_size") or raw.get("hidden_size")
    layer_ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    keys = {key: raw.get(key) for key in OF_BOTH} | {
        "draft_vocab_size": raw.get("draft_vocab_size", 32000),
        "block_size": raw.get(PUBLISHED_K, 4),
        # A `head_dim` key is ignored, as the authors' code does.
        **layers_of(raw | {"head_dim": None}, where),
        "target_hidden_size": size,
        "target": {
            "hidden_size": size,
            "vocab_size": raw.get("vocab_size"),
            "layer_ids": layer_ids,
        },
    }
    layers = {"target.layer_ids": "eagle_config.eagle_aux_hidden_state_layer_ids"}
    keys = {key: value for key, value in keys.items() if value is not None}
    config = checked(where, keys, DrafterConfig, raw, block_size=PUBLISHED_K, **layers)
    if config.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            f"{where}: hidden_size is {config.hidden_size} and num_attention_heads "
            f"{config.num_attention_heads}, but the first must be a whole multiple of the second."
        )
    return config
