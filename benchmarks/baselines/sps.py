"""Standard speculative sampling: a small language model drafts a chain.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). The drafter is a small Llama
with an embedding of its own, distilled from the target's next-token law on the same text as the
other drafters; it reads nothing of the target's. Simplified: the chain is greedy, which is what
both papers do at temperature 0, and only names tokens of the draft vocabulary, since the others
were not trained. An engine that loads the saved model drafts over the whole vocabulary.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from vllm_specblock.draft.config_json import rope_of
from vllm_specblock.train.labels import draft_labels
from vllm_specblock.train.learner import OUTSIDE, Draft, Learner, Lesson, Outcome, Script
from vllm_specblock.tree import DraftTree


class SmallModel(Learner):
    """A small Llama and its distillation.

    Args:
        config: of the small Llama, over the target's vocabulary.
        t2d: [V] bool, whether a target id has a draft id.
        depth: d, tokens of a drafted chain.
    """

    def __init__(self, config: LlamaConfig, t2d: Tensor, depth: int = 5):
        super().__init__()
        self.model, self.depth = LlamaForCausalLM(config), depth
        self.register_buffer("t2d", t2d.clone())
        self.register_buffer("draft_ids", t2d.nonzero()[:, 0])

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        depth: int = 5,
        **sizes: Any,
    ) -> SmallModel:
        """An untrained small Llama for a target; the global generator is left alone.

        Args:
            target_config: of transformers; gives vocabulary, special tokens, length and RoPE.
            d2t: not needed beside t2d; other drafters take it.
            seed: of the weights.
            head: not used: the drafter's width is its own. Other drafters take it.
            sizes: further keys of LlamaConfig: hidden_size, num_hidden_layers, and so on.
        """
        theta, scaling = rope_of(target_config.to_dict())
        config = LlamaConfig(
            **{
                "vocab_size": target_config.vocab_size,
                "max_position_embeddings": target_config.max_position_embeddings,
                "rms_norm_eps": target_config.rms_norm_eps,
                "bos_token_id": target_config.bos_token_id,
                "eos_token_id": target_config.eos_token_id,
                "pad_token_id": target_config.pad_token_id,
                "rope_parameters": {
                    "rope_type": "default",
                    **(scaling or {}),
                    "rope_theta": theta,
                },
                "tie_word_embeddings": True,
                **sizes,
            }
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, t2d, depth)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained, the embedding's included (which is the LM head, too)."""
        return sum(weight.numel() for weight in self.parameters())

    def logits(self, state: Tensor) -> Tensor:
        """After the final norm [..., H] -> [..., Vd] fp32."""
        return F.linear(state, self.model.lm_head.weight[self.draft_ids]).float()

    def forward(self, lesson: Lesson) -> Outcome:
        """Cross-entropy to the target's law at every token whose successor is counted."""
        batch = lesson.batch
        label = draft_labels(self.t2d, batch)
        column = torch.arange(batch.tokens.shape[1], device=label.device).expand_as(label)
        wanted = batch.at(label, column, column + 1, OUTSIDE)
        # transformers keeps documents apart where positions start anew.
        state = self.model.model(
            input_ids=batch.tokens.clamp(min=0), position_ids=batch.position, use_cache=False
        ).last_hidden_state
        rows = (wanted != OUTSIDE).nonzero(as_tuple=True)
        logits = self.logits(state[rows])
        total = F.cross_entropy(logits, lesson.teaching.law[rows], reduction="sum")
        count = torch.tensor(len(logits), device=label.device)
        hit = (logits.argmax(-1) == wanted[rows]).sum()
        loss = lesson.mean(total, count)
        tally = (number.detach().float().view(1, 1) for number in (total, hit, count))
        return Outcome(loss, *tally, torch.zeros_like(loss))

    def draft_along(self, script: Script) -> Draft:
        """Greedy chains of `self.depth` tokens along one text."""
        return Along(self, script)

    def save(self, directory: Path) -> None:
        """A transformers model, for vLLM's method "draft_model"."""
        directory.mkdir(parents=True, exist_ok=True)
        half = copy.deepcopy(self.model).to(torch.bfloat16)
        with tempfile.TemporaryDirectory(dir=directory.parent) as aside:
            half.save_pretrained(aside)
            for file in sorted(Path(aside).iterdir()):
                file.replace(directory / file.name)


class Along:
    """Drafts along one text: catch up on the committed tokens, then one token at a time."""

    def __init__(self, learner: SmallModel, script: Script):
        self.learner, self.script = learner, script
        self.cache = DynamicCache(config=learner.model.config)
        self.known = 0  # committed tokens in the cache

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        self._cut(min(self.known, root))
        token = self.script.tokens[None, self.known : root + 1]
        tokens, scores, score = [], [], torch.zeros(1, device=token.device)
        for _ in range(self.learner.depth):
            logprob, token = self._next(token)
            score = score + logprob
            tokens.append(token[:, 0])
            scores.append(score)
        self._cut(root + 1)
        size = torch.tensor([len(tokens)], dtype=torch.int32, device=token.device)
        return DraftTree.chain(torch.stack(tokens, 1), torch.stack(scores, 1), size)

    def _next(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens [1, n]: log-probability [1] and target id [1, 1] of the likeliest next."""
        output = self.learner.model.model(
            input_ids=tokens, past_key_values=self.cache, use_cache=True
        )
        logprob = self.learner.logits(output.last_hidden_state[:, -1]).log_softmax(-1)
        best = logprob.max(-1)
        return best.values, self.learner.draft_ids[best.indices][:, None]

    def _cut(self, tokens: int) -> None:
        surplus = self.cache.get_seq_length() - tokens
        if surplus > 0:
            self.cache.crop(-surplus)  # how many to forget; transformers drops the other form
        self.known = tokens
