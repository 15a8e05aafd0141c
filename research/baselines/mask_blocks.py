"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): one forward drafts a block of masks.

A block is a root and K masks behind it; the target's states of all tokens before the root are its
context, as keys and values of every layer. DFlash's rows see the whole block, JetSpec's those up to
their own. The network is the one that we serve (`vllm_specblock.drafters.dflash`), which reads the
target's LM head as it is; here is the objective.
Simplified: every token that the target wrote is a root, where the authors draw some of them;
cross-entropy to the target's law for both, where DFlash's authors take the text's tokens; the law
is that of a reduced vocabulary, as for all drafters here, where what is served names every token.
"""

from __future__ import annotations

import math
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baselines.groups import group_attention
from baselines.positions import LAYER_KEYS, PositionsLearner, served, write_folder
from vllm_specblock.drafters.dflash.config import ARCHITECTURE, DFlashShape
from vllm_specblock.drafters.dflash.drafter import DFlashDrafter
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch


class FrozenHead(nn.Module):
    """The target's LM head [Vd, H]: no parameter, since it does not learn."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.clone())

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight.to(states.dtype))


class DFlash(PositionsLearner, DFlashModel):
    """See the module; `config.masks` is K. `head` is the target's LM head, which stays.

    Its size `mask_token_id` is a token of the target that texts hardly have.
    """

    kind = "dflash"
    config_class = DFlashShape
    defaults: ClassVar = {"masks": 7, "qk_norm": True}

    def take_head(self, d2t: Tensor, head: Tensor | None) -> None:
        assert head is not None, "the target's LM head is read as it is"
        self.register_buffer("d2t", d2t.clone())
        self.lm_head, self.wants_head = FrozenHead(head), False

    def weights(self) -> list[float]:
        """Of the K masks' losses in the mean: falling by e in half a block."""
        half = (1 + self.config.masks) / 2
        return [math.exp(-k / half) for k in range(self.config.masks)]

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        batch, last = train_batch.batch, train_batch.batch.tokens.shape[1] - 1
        position, document = batch.position[:, :last], batch.document[:, :last]
        hidden = train_batch.target_outputs.hidden[:, :last].flatten(0, 1)
        context = [
            tuple(x.unflatten(0, position.shape) for x in pair)
            for pair in self.context(hidden, position.flatten())
        ]
        root = batch.tokens[:, 1:, None].clamp(min=0)
        masks = torch.full_like(root, self.config.mask_token_id)
        tokens = torch.cat([root, masks.expand(-1, -1, self.config.masks)], -1)  # [B, L − 1, S]
        size = tokens.shape[2]
        sees = (document[:, :, None] == document[:, None]).tril()
        inside = torch.ones(size, size, dtype=torch.bool, device=tokens.device)
        if self.config.causal:
            inside = inside.tril()

        def attend(layer: int, *flat: Tensor) -> Tensor:
            query, key, value = (x.unflatten(0, tokens.shape) for x in flat)
            return group_attention(query, context[layer], (key, value), sees, inside).flatten(0, 2)

        ahead = position[..., None] + torch.arange(1, size + 1, device=tokens.device)
        embedding = train_batch.embed(tokens.flatten())
        state = DFlashModel.forward(self, embedding, ahead.flatten(), attend)
        states = state.unflatten(0, tokens.shape)[:, :, 1:]
        return self.outcome(states, train_batch, self.weights())

    def draft_along(self, sequence: EvalSequence) -> Draft:
        network = copy(self)
        network.__class__ = DFlashModel  # whose forward runs blocks
        return served(DFlashDrafter, network, self.budget, sequence)

    def save(self, directory: Path) -> None:
        """What we serve, in the authors' layout, which vLLM's own method "dflash" loads, too."""
        shape = self.config
        config = shape.model_dump(include=LAYER_KEYS) | {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "block_size": 1 + shape.masks,
            "attention_bias": shape.qkv_bias,
            "dflash_config": self.own_config(),
            "layer_types": ["full_attention"] * shape.num_hidden_layers,
        }
        write_folder(directory, self.kind, config, dict(self.named_parameters()))

    def own_config(self) -> dict[str, Any]:
        """`dflash_config`, which names target layers by the last one that was run, from 0 on."""
        layers = [each - 1 for each in self.config.layer_ids]
        return {"mask_token_id": self.config.mask_token_id, "target_layer_ids": layers}


class JetSpec(DFlash):
    """Differs in that no row of a block sees a later one, and all masks weigh the same."""

    kind = "jetspec"
    defaults: ClassVar = DFlash.defaults | {"causal": True}

    def weights(self) -> list[float]:
        return [1.0] * self.config.masks

    def own_config(self) -> dict[str, Any]:
        # The authors' key, and the one that vLLM reads.
        return super().own_config() | {"causal_head": True, "causal": True}
