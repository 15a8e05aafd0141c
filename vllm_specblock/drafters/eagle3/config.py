"""EAGLE-3 model configuration."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from vllm_specblock.drafters.specblock.config import Count, NetworkShape, default_layer_ids


class Eagle3Shape(NetworkShape):
    """Decoder layers over embedding and feature, and what checkpoints vary about them.

    Attributes:
        target_hidden_size: Ht, width of the target's hidden states.
        num_hidden_layers: L. Only the first layer reads the embedding.
        draft_vocab_size: Vd, width of the LM head; equal to `vocab_size` means no mapping.
        rotary_dim: dimensions of a head that RoPE turns, its first ones; None: all of them.
        num_features: hidden states of the target that are fused.
        layer_ids: which ones: i is the residual stream after i layers. None if the checkpoint
            leaves it to the target: `default_layer_ids` of its layer count.
        qkv_bias, output_bias: of the attention's projections.
        mlp_bias: of the MLP's projections.
        norm_before_residual: whether the first layer's residual is the feature after its norm.
        norm_before_fc: whether the fused features are normed together before `fc`.
        fc_norm: whether each of them is normed by itself before `fc`.
        norm_output: whether a later step's feature is the state after the final norm.
        logit_scale: factor on the logits.
    """

    computes_yarn: ClassVar[bool] = True

    target_hidden_size: Count
    num_hidden_layers: Count = 1
    draft_vocab_size: Count
    rotary_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    num_features: Count = 3
    layer_ids: tuple[int, ...] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: Annotated[float, Field(gt=0)] = 1.0

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target with so many layers; i is that after i layers."""
        return self.layer_ids or default_layer_ids(num_layers)

    @model_validator(mode="after")
    def _check(self) -> Eagle3Shape:
        if self.layer_ids is not None:
            ids = self.layer_ids
            # The target hands its states out in layer order: any other order here would swap
            # columns of fc.
            if list(ids) != sorted(set(ids)) or ids[0] < 0:
                raise ValueError(
                    f"eagle_aux_hidden_state_layer_ids is {list(ids)}, but must be different "
                    "layers in ascending order"
                )
        named = 3 if self.layer_ids is None else len(self.layer_ids)
        if named != self.num_features:
            raise ValueError(
                f"it fuses {self.num_features} hidden states of the target, but names {named} "
                "layers (the default is 3)"
            )
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(
                f"RoPE turns {self.rotary_dim} dimensions of a head, which has {self.head_dim}"
            )
        return self
