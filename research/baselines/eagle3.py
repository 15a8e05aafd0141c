"""EAGLE-3 (arXiv 2503.01840) with the dynamic tree of EAGLE-2 (arXiv 2406.16858).

One decoder layer, run once per drafted token. Row t reads the target's fused features of token t
and the embedding of token t + 1, and predicts token t + 2. Every further step takes the state
that the step before it left in place of features: in training ("training-time test") as in use.

The drafter and the growth of its tree are those that we serve (`vllm_specblock.drafters.eagle3`);
here are the objective and drafting along one text. Simplified: the text's own tokens are fed
in training and every one that the draft vocabulary can name gives a loss (the authors leave out
those where the target's likeliest token lies outside of it); attention of the unrolled steps is
dense over all steps' keys; the tree is grown for one request at a time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from baselines.folder import write_folder
from baselines.groups import (
    Kept,
    KeyValue,
    draw_weights,
    group_attention,
    masked_attention,
    seeded,
    shape_like,
)
from baselines.positions import loss_and_choice
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.eval.drafting import draft_eagle3
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    Draft,
    EvalSequence,
    Learner,
    LossOutput,
    TrainBatch,
    draft_labels,
)

DECAY = 0.8
"""Weight of a step's loss relative to the step before, as in the authors' code."""
GROWTH = TreeShape.levels(depth=7, top_k=10, width=10, budget=60)


class Eagle3(Learner, Eagle3Model):
    """The drafter and its objective. Parameter names are those that vLLM loads.

    Args:
        d2t: [Vd] int64, what a draft id lacks to its target id.
        t2d: [V] bool, whether a target id has a draft id.
        steps: J, unrolled steps of training.
        growth: of the trees that `draft_along` gives.
    """

    def __init__(
        self,
        shape: Eagle3Shape,
        d2t: Tensor,
        t2d: Tensor,
        steps: int = 7,
        growth: TreeShape = GROWTH,
    ):
        super().__init__(shape)
        self.steps, most = steps, min(growth.width, len(d2t))
        starts = min(growth.num_starts, most)
        self.growth = replace(growth, branching=(most,) * 4, num_starts=starts)
        self.d2t.copy_(d2t)
        self.register_buffer("t2d", t2d.clone())

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        steps: int = 7,
        growth: TreeShape = GROWTH,
        **sizes: Any,
    ) -> Eagle3:
        """An untrained drafter shaped after its target; the global generator is left alone.

        Args:
            target_config: of transformers, Llama- or Qwen3-like.
            seed: of the weights.
            head: [Vd, H], what the LM head starts from (default: drawn like the rest).
            sizes: fields of `Eagle3Shape` that shall not be the target's.
        """
        sizes = {"num_hidden_layers": 1, "qk_norm": False} | sizes
        shape = shape_like(Eagle3Shape, target_config, len(d2t), **sizes)

        def make() -> Eagle3:
            learner = cls(shape, d2t, t2d, steps, growth)
            draw_weights(learner)
            return learner

        learner = seeded(seed, make)
        if head is not None:
            learner.lm_head.weight.data.copy_(head)
        return learner

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """The unrolled steps over every row (M = 1, K = J).

        All rows whose label is known give a loss; the tally counts those of them where every
        earlier step's first choice was the text's token, so that hits / seen is α_k.
        """
        batch, target_probs = (
            train_batch.batch,
            train_batch.target_outputs.target_probs.flatten(0, 1),
        )
        label = draft_labels(self.t2d, batch)
        length = label.shape[1]
        column = torch.arange(batch.tokens.shape[1], device=label.device).expand_as(label)
        on_path = torch.ones_like(label, dtype=torch.bool)
        attend = UnrolledSight(batch)
        state = self.fuse(train_batch.target_outputs.hidden)
        total, count, tally = [], [], []
        for step in range(self.steps):
            token = batch.at(batch.tokens, column, column + step + 1, 0).clamp(min=0)
            state = self.run(train_batch.embed(token), state, batch.position + step, attend)
            wanted = batch.at(label, column, column + step + 2, IGNORE_INDEX)
            window, row = (wanted != IGNORE_INDEX).nonzero(as_tuple=True)
            rows = self.norm(state[window, row]) * self.config.logit_scale
            target_row = window * length + row + step + 1
            loss, ce_loss, best = loss_and_choice(
                rows, self.lm_head.weight, target_probs, target_row
            )
            total.append(loss)
            count.append(len(ce_loss))
            seen = on_path[window, row]
            hit = seen & (best == wanted[window, row])
            tally.append(torch.stack([(ce_loss * seen).sum(), hit.sum(), seen.sum()]))
            on_path = torch.zeros_like(on_path).index_put((window, row), hit)
        weight = DECAY ** torch.arange(self.steps, device=label.device)
        count = torch.tensor(count, device=label.device)
        loss = (train_batch.mean(torch.stack(total), count) * weight).sum()
        ce_loss, hits, seen = torch.stack(tally, dim=1)[:, None].float()
        return LossOutput(loss, ce_loss, hits, seen, torch.zeros_like(loss))

    def draft_along(self, sequence: EvalSequence) -> Draft:
        """Trees of `self.growth` along one text."""
        return draft_eagle3(self, sequence, self.growth)

    def save(self, directory: Path) -> None:
        """A checkpoint for vLLM's method "eagle3"."""
        tensors = self.state_dict()
        if len(self.d2t) == len(self.t2d):
            # vLLM has no place for a mapping where there is nothing to map.
            del tensors["d2t"], tensors["t2d"]
        write_folder(directory, None, self._config_json(), tensors)

    def _config_json(self) -> dict[str, Any]:
        shape = self.config
        of_layer = (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "draft_vocab_size",
            "rms_norm_eps",
        )
        rope = {
            "rope_type": "default",
            **(shape.rope_scaling or {}),
            "rope_theta": shape.rope_theta,
        }
        layers = list(shape.layer_ids)
        return {key: getattr(shape, key) for key in of_layer} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_parameters": rope | {"rope_theta": shape.rope_theta},
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": layers,
            },
        }


class UnrolledSight:
    """Who sees whom in training: row t of step j sees step 0 of its document's rows up to t, and
    itself in the steps 1 … j, as a chain that was drafted from row t would.

    Called once per step, in order, with queries [B, L, nh, D].
    """

    def __init__(self, batch: Batch):
        document = batch.document
        row = torch.arange(document.shape[1], device=document.device)
        same = document[:, :, None] == document[:, None, :]
        self.mask = same & (row <= row[:, None])  # [B, L, L]
        self.first: KeyValue | None = None  # of step 0
        self.own = Kept(dim=2)  # of the steps after it

    def __call__(self, _layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.first is None:
            self.first = key, value
            return masked_attention(query, key, value, self.mask)
        own = self.own.extend(0, key[:, :, None], value[:, :, None])
        inside = torch.ones(1, own[0].shape[2], dtype=torch.bool, device=query.device)
        return group_attention(query[:, :, None], self.first, own, self.mask, inside)[:, :, 0]
