"""SpecBlock model configuration; imports pydantic alone, so that the command line starts fast."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

TOP_LOGPROBS = 10
"""Log-probabilities among the rank features ψ (appendix B)."""

PUBLISHED_RANK_TOPK = 20
"""`rank_topk` of the published rank heads; their config does not say."""

_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")

Count = Annotated[int, Field(ge=1)]


def _ascending(ids: tuple[int, ...]) -> tuple[int, ...]:
    # The target's states come in layer order: another one would swap columns of what reads them.
    if list(ids) != sorted({*ids}) or ids[0] < 0:
        raise ValueError(
            f"the target's layers {list(ids)} are read, but they must be different ones in "
            "ascending order"
        )
    return ids


Ascending = AfterValidator(_ascending)


class CheckpointError(ValueError):
    """A drafter or target directory that cannot be used; the message is one sentence."""


class TargetInfo(BaseModel):
    """The model that the drafter drafts for.

    Attributes:
        name: folder or hub id that vLLM loads as the target, if known.
        architectures: of the target's own config.json; for information only.
        hidden_size: Ht, width of the target's hidden states.
        vocab_size: V.
        layer_ids: the three hidden states of the context feature (eq. 1): i is the residual
            stream after i layers. None: `default_layer_ids` of the target.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None
    architectures: tuple[str, ...] = ()
    hidden_size: Count
    vocab_size: Count
    layer_ids: Annotated[tuple[int, int, int], Ascending] | None = None


class NetworkShape(BaseModel):
    """Decoder layers and vocabulary of a drafter.

    Attributes:
        vocab_size: V of the target.
        qk_norm: whether queries and keys are RMS-normed per head, as in Qwen3.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    computes_yarn: ClassVar[bool] = False

    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    intermediate_size: Count
    num_hidden_layers: Count
    vocab_size: Count
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether q, k and v, the attention's output, and the MLP have a bias."""
        return False, False, False

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, but must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        draft_vocab_size = getattr(self, "draft_vocab_size", self.vocab_size)
        if draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {draft_vocab_size}, but must not exceed vocab_size, "
                f"{self.vocab_size}"
            )
        check_rope_scaling(self.rope_scaling, self.computes_yarn)
        return self


class DrafterConfig(NetworkShape):
    """A SpecBlock drafter's tensors and numbers (paper, sections 3.1 and 3.2).

    Attributes:
        block_size: K, draft positions per forward; fixed by training.
        draft_vocab_size: Vd, width of the LM head; equal to `vocab_size` means no mapping.
        rank_topk: logits over which the rank features are taken, or "full" for all of them.
        block_rope: RoPE base of block 2 and later: block 1's ("base"), or moved on by the
            depth of the node that it starts from ("path").
        prefix_broadcast: all K positions get the condition and the token (eq. 2); otherwise the
            first alone (ablation of Table 2).
        layer_shift: eq. 3 stands between the layers (ablation).
    """

    target_hidden_size: Count
    block_size: Count
    draft_vocab_size: Annotated[int, Field(ge=TOP_LOGPROBS)]
    rank_classes: Count = 4
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rank_topk: Annotated[int, Field(ge=TOP_LOGPROBS)] | Literal["full"] = PUBLISHED_RANK_TOPK
    block_rope: Literal["base", "path"] = "base"
    prefix_broadcast: bool = True
    layer_shift: bool = True
    target: TargetInfo

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target's states that it reads; i is the residual stream after i layers."""
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


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return (2, N//2, N−3) of a target with N layers, as EAGLE-3 does.

    Raises:
        CheckpointError: these are not three different layers.
    """
    low, mid, high = ids = (2, num_layers // 2, num_layers - 3)
    if not low < mid < high:
        raise CheckpointError(
            f"A target of {num_layers} layers has no three different default feature layers "
            f"(2, N//2, N-3 gives {list(ids)}): choose three ascending ones below {num_layers} "
            "with --layer-ids."
        )
    return ids


def rope_type(scaling: dict[str, Any]) -> str | None:
    """The kind of a `rope_scaling` entry; older configs call the key "type"."""
    return scaling.get("rope_type", scaling.get("type"))


def check_rope_scaling(scaling: dict[str, Any] | None, yarn: bool = False) -> None:
    """Raise ValueError for a `rope_scaling` entry that is not computed; yarn: whether YaRN is."""
    if scaling is None:
        return
    kind = rope_type(scaling)
    known = {key: names for key, names in _ROPE_PARAMETERS.items() if yarn or key != "yarn"}
    if kind not in known:
        raise ValueError(f"rope_scaling is of type {kind!r}, but must be one of {', '.join(known)}")
    optional = [key for key in _YARN_OPTIONAL if kind == "yarn" and scaling.get(key) is not None]
    for key in (*known[kind], *optional):
        value = scaling.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(
                f"rope_scaling of type {kind!r} has {key} = {value!r}, but it must be a number "
                "above 0"
            )
