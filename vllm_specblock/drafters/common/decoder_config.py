"""Decoder layers of other projects' drafters, and their keys in a config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from vllm_specblock.drafters.specblock.config import (
    Ascending,
    CheckpointError,
    NetworkShape,
    default_layer_ids,
    rope_type,
)
from vllm_specblock.drafters.specblock.config_json import checked, layers_of


class DecoderShape(NetworkShape):
    """Decoder layers of other projects' drafters, and what their checkpoints vary about them.

    Attributes:
        rotary_dim: dimensions of a head that RoPE turns, its first ones; None: all of them.
        layer_ids: hidden states of the target that are fused: i is the residual stream after i
            layers. None if the checkpoint leaves it to the target: `default_layer_ids` of its
            layer count.
        qkv_bias, output_bias: of the attention's projections.
        mlp_bias: of the MLP's projections.
    """

    computes_yarn: ClassVar[bool] = True

    rotary_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1), Ascending] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.qkv_bias, self.output_bias, self.mlp_bias

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target with so many layers; i is that after i layers."""
        return self.layer_ids or default_layer_ids(num_layers)

    @model_validator(mode="after")
    def _check_rotary_dim(self) -> DecoderShape:
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(
                f"RoPE turns {self.rotary_dim} dimensions of a head, which has {self.head_dim}"
            )
        return self


Shape = TypeVar("Shape", bound=DecoderShape)


def shape_of(raw: dict[str, Any], own: dict[str, Any], where: str, kind: type[Shape]) -> Shape:
    """A shape of `kind`: fields that `raw` has by the same name, RoPE, heads, and then `own`.

    Missing keys of RoPE mean what transformers and vLLM take for them.

    Raises:
        CheckpointError: a key missing or out of range.
    """
    layers = layers_of(raw)
    scaling, head_dim = layers["rope_scaling"], layers["head_dim"]
    if scaling is not None and rope_type(scaling) in ("llama3", "yarn"):
        trained = raw.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", raw.get("max_position_embeddings")
        )
        layers["rope_scaling"] = scaling | {"original_max_position_embeddings": trained}
    said = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    partial = said.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if partial != 1 and isinstance(partial, (int, float)) and isinstance(head_dim, int):
        layers["rotary_dim"] = int(head_dim * partial)
    keys = {key: raw.get(key) for key in kind.model_fields} | layers | own
    # Absent ones are left out: then either a default holds, or the key is missed by its name.
    return checked(where, {key: v for key, v in keys.items() if v is not None}, kind)


def refuse(where: str, what_is_drafted_with: str, variants: Iterable[tuple[Any, str]]) -> None:
    """Raises CheckpointError for the first of `variants`, (whether it is there, its name)."""
    for there, what in variants:
        if there:
            raise CheckpointError(
                f"{where} has {what}, but only {what_is_drafted_with} can be drafted with."
            )
