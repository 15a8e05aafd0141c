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
from typing import ClassVar

import torch
from torch import Tensor
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from baselines.groups import KeyValue, earlier_rows, extend, group_attention
from baselines.positions import DECAY, LAYER_KEYS, PositionsLearner, write_folder
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.eval.drafting import draft_trees
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch


class Eagle3(PositionsLearner, Eagle3Model):
    """The drafter and its objective. Parameter names are those that vLLM loads."""

    config_class = Eagle3Shape
    defaults: ClassVar = {"num_hidden_layers": 1, "qk_norm": False}
    steps = 7
    """J, unrolled steps of training."""

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """The unrolled steps over every row but the last (M = 1, K = J)."""
        batch = train_batch.batch
        column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        column = column.expand_as(batch.tokens)
        attend = unrolled_attention(batch)
        states = [self.fuse(train_batch.target_outputs.hidden)]
        for step in range(self.steps):
            token = batch.at(batch.tokens, column, column + step + 1, 0).clamp(min=0)
            embedding = train_batch.embed(token)
            states.append(self.run(embedding, states[-1], batch.position + step, attend))
        weights = [DECAY**step for step in range(self.steps)]
        return self.outcome(torch.stack(states[1:], 2)[:, :-1], train_batch, weights)

    def draft_along(self, sequence: EvalSequence) -> Draft:
        width = min(10, len(self.d2t))
        shape = TreeShape.levels(depth=7, top_k=width, width=width, budget=self.budget)
        return draft_trees(self, sequence, shape)

    def save(self, directory: Path) -> None:
        tensors, layers = self.state_dict(), list(self.config.layer_ids)
        if len(self.d2t) == len(self.t2d):
            # vLLM has no place for a mapping where there is nothing to map.
            del tensors["d2t"], tensors["t2d"]
        config = self.config.model_dump(include=LAYER_KEYS | {"draft_vocab_size"}) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": layers,
            },
        }
        write_folder(directory, None, config, tensors)


def unrolled_attention(batch: Batch) -> Attend:
    """Attention in training: row t of step j sees step 0 of its document's rows before t, and
    itself in the steps 0 … j, as a chain drafted from row t does.

    Called once per step, in order, with queries [B, L, nh, D].
    """
    earlier = earlier_rows(batch.document)
    steps: dict[int, KeyValue] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = extend(steps, layer, (key[:, :, None], value[:, :, None]))
        first = own[0][:, :, 0], own[1][:, :, 0]
        inside = torch.ones(1, own[0].shape[2], dtype=torch.bool, device=query.device)
        return group_attention(query[:, :, None], first, own, earlier, inside)[:, :, 0]

    return attend
