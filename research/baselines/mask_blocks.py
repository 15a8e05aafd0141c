"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): one forward drafts a block of masks.

A block is a root and K masks behind it; the target's states of all tokens before the root are its
context, as keys and values of every layer. DFlash's rows see the whole block, JetSpec's those up to
their own. The network is the one that we serve (`vllm_specblock.drafters.dflash`), which reads the
target's LM head as it is; here are the objective and drafting along one text.
Simplified: every token that the target wrote is a root, where the authors draw some of them;
cross-entropy to the target's law for both, where DFlash's authors take the text's tokens; the law
is that of a reduced vocabulary, as for all drafters here, where what is served names every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baselines.folder import write_folder
from baselines.groups import KeyValue, draw_weights, group_attention, seeded, shape_like
from baselines.positions import PositionsLearner
from baselines.trunk import passes_over
from vllm_specblock.drafters.dflash.config import ARCHITECTURE, DFlashShape
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch

Context = list[KeyValue]
"""Of each layer, keys and values [B, L, kv heads, D] of a text's tokens."""


class FrozenHead(nn.Module):
    """The target's LM head: no parameter, since it does not learn."""

    weight: Tensor

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocabulary, size))

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        return linear(states, self.weight.to(states.dtype))


class DFlash(PositionsLearner, DFlashModel):
    """See the module.

    Args:
        shape: `masks` is K.
        d2t, t2d: draft vocabulary.
        head: [Vd, H], rows of the target's LM head as they are.
        budget: N, nodes of a drafted tree.
    """

    kind = "dflash"

    def __init__(
        self,
        shape: DFlashShape,
        d2t: Tensor,
        t2d: Tensor,
        head: Tensor | None = None,
        budget: int = 60,
    ) -> None:
        super().__init__(shape)
        self.lm_head = FrozenHead(len(d2t), shape.hidden_size)
        self.register_buffer("d2t", torch.zeros_like(d2t))
        self.wants_head = False
        self.begin(d2t, t2d, head)
        self.budget = budget
        draw_weights(self)

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        mask_token_id: int,
        masks: int = 7,
        budget: int = 60,
        final_norm: Tensor | None = None,
        **sizes: Any,
    ) -> Self:
        """A drafter for a target with this transformers config.

        Args:
            seed: of the weights.
            mask_token_id: a token of the target that texts hardly have.
            masks: K.
            final_norm: [H], of the target, first weight of the drafter's; None: ones.
            sizes: as `sizes_like` takes them, such as `intermediate_size` and `layer_ids`.
        """
        own = {"masks": masks, "mask_token_id": mask_token_id, "causal": cls.kind == "jetspec"}
        shape = shape_like(DFlashShape, target_config, len(d2t), **sizes, **own, qk_norm=True)
        learner = seeded(seed, lambda: cls(shape, d2t, t2d, head, budget))
        if final_norm is not None:
            learner.norm.weight.data.copy_(final_norm)
        return learner

    def inside(self) -> Tensor:
        """[1 + K, 1 + K] bool, which rows of its block a row sees."""
        size = 1 + self.config.masks
        sees = torch.ones(size, size, dtype=torch.bool, device=self.d2t.device)
        return sees.tril() if self.config.causal else sees

    def weights(self) -> list[float]:
        """Of the K masks' losses in the mean: falling by e in half a block."""
        half = (1 + self.config.masks) / 2
        return [math.exp(-k / half) for k in range(self.config.masks)]

    def context_of(self, hidden: Tensor, position: Tensor) -> Context:
        """Keys and values of tokens by their hidden [B, L, n·Ht] and position [B, L] int64."""
        flat = self.context(hidden.flatten(0, 1), position.flatten())
        key_values = (tuple(x.unflatten(0, position.shape) for x in pair) for pair in flat)
        return [(key, value) for key, value in key_values]

    def states(
        self, context: Context, embed: Callable[[Tensor], Tensor], batch: Batch, rows: slice
    ) -> Tensor:
        """The masks behind the roots that follow the rows `rows`.

        Args:
            context: of columns 0 … rows.stop − 1 at least.
            embed: target ids [n] -> the target's embeddings [n, H].

        Returns:
            [B, R, K, H], before the final norm.
        """
        root = batch.tokens[:, rows.start + 1 : rows.stop + 1, None].clamp(min=0)
        masks = torch.full_like(root, self.config.mask_token_id)
        tokens = torch.cat([root, masks.expand(-1, -1, self.config.masks)], -1)  # [B, R, S]
        ahead = torch.arange(1, tokens.shape[2] + 1, device=tokens.device)
        position = batch.position[:, rows, None] + ahead
        column = torch.arange(rows.stop, device=tokens.device)
        same = batch.document[:, rows, None] == batch.document[:, None, : rows.stop]
        sees, inside = same & (column <= column[rows, None]), self.inside()

        def attend(layer: int, *flat: Tensor) -> Tensor:
            query, key, value = (x.unflatten(0, tokens.shape) for x in flat)
            far_key, far_value = (x[:, : rows.stop] for x in context[layer])
            seen = far_key, far_value
            return group_attention(query, seen, (key, value), sees, inside).flatten(0, 2)

        state = DFlashModel.forward(self, embed(tokens.flatten()), position.flatten(), attend)
        return state.unflatten(0, tokens.shape)[:, :, 1:]

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        batch, last = train_batch.batch, train_batch.batch.tokens.shape[1] - 1
        hidden = train_batch.target_outputs.hidden[:, :last]
        context = self.context_of(hidden, batch.position[:, :last])
        states = self.states(context, train_batch.embed, batch, slice(0, last))
        return self.outcome(states, train_batch, self.weights())

    @torch.no_grad()
    def draft_along(self, sequence: EvalSequence) -> Draft:
        batch, last = Batch.of(sequence.tokens[None]), len(sequence.tokens) - 1
        context = self.context_of(sequence.hidden[None, :last], batch.position[:, :last])
        # No block sees what comes after its root, so all can be drafted before the first is asked
        # for: the numbers are those of one pass per root.
        passes = [self.states(context, sequence.embed, batch, rows) for rows in passes_over(last)]
        states = torch.cat(passes, dim=1)[0]  # [T − 1, K, H]
        return self.product_draft(states)

    def save(self, directory: Path) -> None:
        """What we serve, in the authors' layout, which vLLM's own method "dflash" loads, too."""
        shape = self.config
        config = {
            key: getattr(shape, key)
            for key in (
                *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
                *("intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"),
                *("rope_theta", "rope_scaling"),
            )
        } | {
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

    def weights(self) -> list[float]:
        return [1.0] * self.config.masks

    def own_config(self) -> dict[str, Any]:
        # The authors' key, and the one that vLLM reads.
        return super().own_config() | {"causal_head": True, "causal": True}
