"""EAGLE-3 (arXiv 2503.01840) with the dynamic tree of EAGLE-2 (arXiv 2406.16858).

One decoder layer, run once per drafted token. Row t reads the target's fused features of token t
and the embedding of token t + 1, and predicts token t + 2. Every further step takes the state
that the step before it left in place of features: in training ("training-time test") as in use.

The drafter and the growth of its tree are those that we serve (`vllm_specblock.drafters.eagle3`);
here is the objective. Simplified: training feeds the text's tokens, and each one in the draft
vocabulary gives a loss (the authors skip those where the target's likeliest token is outside of
it); attention of the unrolled steps is dense over all steps' keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from baselines.groups import KeyValue, earlier_rows, extend, group_attention
from baselines.positions import NamedLearner, loss_and_choice, write_folder
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.eval.drafting import draft_trees
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    Draft,
    EvalSequence,
    LossOutput,
    TrainBatch,
    draft_labels,
)

DECAY = 0.8
"""Weight of a step's loss relative to the step before, as in the authors' code."""


class Eagle3(NamedLearner, Eagle3Model):
    """The drafter and its objective. Parameter names are those that vLLM loads."""

    config_class = Eagle3Shape
    defaults: ClassVar = {"num_hidden_layers": 1, "qk_norm": False}
    steps = 7
    """J, unrolled steps of training."""

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """The unrolled steps over every row (M = 1, K = J).

        All rows whose label is known give a loss; the tally counts those of them where every
        earlier step's first choice was the text's token, so that hits / seen is α_k.
        """
        batch = train_batch.batch
        target_probs = train_batch.target_outputs.target_probs.flatten(0, 1)
        label = draft_labels(self.t2d, batch)
        length = label.shape[1]
        column = torch.arange(batch.tokens.shape[1], device=label.device).expand_as(label)
        attend = unrolled_attention(batch)
        on_path = torch.ones_like(label, dtype=torch.bool)
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
        loss = (train_batch.counts.mean(torch.stack(total), count) * weight).sum()
        ce_loss, hits, seen = torch.stack(tally, dim=1)[:, None].float()
        return LossOutput(loss, ce_loss, hits, seen, torch.zeros_like(loss))

    def draft_along(self, sequence: EvalSequence) -> Draft:
        width = min(10, len(self.d2t))
        shape = TreeShape.levels(depth=7, top_k=width, width=width, budget=self.budget)
        return draft_trees(self, sequence, shape)

    def save(self, directory: Path) -> None:
        tensors = self.state_dict()
        if len(self.d2t) == len(self.t2d):
            # vLLM has no place for a mapping where there is nothing to map.
            del tensors["d2t"], tensors["t2d"]
        write_folder(directory, None, self._config_json(), tensors)

    def _config_json(self) -> dict[str, Any]:
        shape, layers = self.config, list(self.config.layer_ids)
        like = {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
        like |= {"intermediate_size", "vocab_size", "draft_vocab_size", "rms_norm_eps"}
        rope = {"rope_type": "default", **(shape.rope_scaling or {})}
        return shape.model_dump(include=like) | {
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


def unrolled_attention(batch: Batch) -> Attend:
    """Attention in training: row t of step j sees step 0 of its document's rows before t, and
    itself in the steps 0 … j, as a chain drafted from row t does.

    Called once per step, in order, with queries [B, L, nh, D].
    """
    earlier = earlier_rows(batch.document, slice(0, batch.document.shape[1]))
    steps: dict[int, KeyValue] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = extend(steps, layer, (key[:, :, None], value[:, :, None]))
        first = own[0][:, :, 0], own[1][:, :, 0]
        inside = torch.ones(1, own[0].shape[2], dtype=torch.bool, device=query.device)
        return group_attention(query[:, :, None], first, own, earlier, inside)[:, :, 0]

    return attend
