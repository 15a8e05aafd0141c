"""Standard speculative sampling: a small language model drafts a chain.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). The drafter is a small Llama
with tied embeddings, distilled from the target's next-token law on the same text as the other
drafters; it reads nothing of the target's. vLLM's method "draft_model" serves it.
Simplified: it learns, and drafts here, only tokens of the draft vocabulary. vLLM drafts over the
whole vocabulary. Chains are greedy, as in both papers at temperature 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from baselines.positions import loss_and_choice, write_folder
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    Draft,
    EvalSequence,
    Learner,
    LossOutput,
    TrainBatch,
    draft_labels,
)
from vllm_specblock.tree import DraftTree


class SmallModel(Learner):
    """A small Llama and its distillation; t2d: [V] bool, whether a target id has a draft id."""

    depth = 5
    """Tokens of a drafted chain."""
    t2d: Tensor

    def __init__(self, config: LlamaConfig, t2d: Tensor) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(config)
        self.register_buffer("t2d", t2d.clone())

    @classmethod
    def for_target(cls, target_config: Any, t2d: Tensor, seed: int, **sizes: Any) -> Self:
        """Return a drafter for a target; the global generator is left alone.

        sizes: hidden_size, num_hidden_layers and other fields that are not the target's.
        """
        names = ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters")
        names += ("bos_token_id", "eos_token_id", "pad_token_id")
        like = {name: getattr(target_config, name, None) for name in names}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(LlamaConfig(tie_word_embeddings=True, **like | sizes), t2d)

    def head(self) -> Tensor:
        """[Vd, H]: the draft vocabulary's embeddings, which are its LM head."""
        return self.llama.get_input_embeddings().weight[self.t2d]

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """Cross-entropy to the target's law at every token whose successor is counted."""
        batch = train_batch.batch
        label = draft_labels(self.t2d, batch)
        column = torch.arange(label.shape[1], device=label.device).expand_as(label)
        wanted = batch.at(label, column, column + 1, IGNORE_INDEX)
        same = batch.document[:, :, None] == batch.document[:, None, :]
        state = self.llama.model(
            input_ids=batch.tokens.clamp(min=0),
            attention_mask=same.tril()[:, None],
            position_ids=batch.position,
            use_cache=False,
        ).last_hidden_state
        window, row = (wanted != IGNORE_INDEX).nonzero(as_tuple=True)
        target_probs = train_batch.target_outputs.target_probs.flatten(0, 1)
        target_row = window * label.shape[1] + row
        total, _, best = loss_and_choice(state[window, row], self.head(), target_probs, target_row)
        count = torch.tensor(len(best), device=label.device)
        hit = (best == wanted[window, row]).sum()
        loss = train_batch.counts.mean(total, count)
        tally = (number.detach().float().view(1, 1) for number in (total, hit, count))
        return LossOutput(loss, *tally, torch.zeros_like(loss))

    def draft_along(self, sequence: EvalSequence) -> Draft:
        named, cache, known = self.t2d.nonzero()[:, 0], DynamicCache(), 0

        @torch.no_grad()
        def draft(root: int) -> DraftTree:
            nonlocal known
            given, known = sequence.tokens[None, known : root + 1], root + 1
            tokens, logprobs = [], []
            for _ in range(self.depth):
                state = self.llama.model(given, past_key_values=cache).last_hidden_state[:, -1]
                logprob, best = linear(state, self.head()).float().log_softmax(-1).max(-1)
                given = named[best][:, None]
                tokens.append(given)
                logprobs.append(logprob[:, None])
            cache.crop(1 - self.depth)  # back to the text
            size = torch.tensor([self.depth], dtype=torch.int32, device=named.device)
            return DraftTree.chain(torch.cat(tokens, 1), torch.cat(logprobs, 1).cumsum(1), size)

        return draft

    def save(self, directory: Path) -> None:
        """Write a transformers model, which vLLM's method "draft_model" serves."""
        config = self.llama.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        write_folder(directory, None, config, dict(self.llama.named_parameters()))
