"""Standard speculative sampling: a small language model drafts a chain.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). The drafter is a small Llama
with an embedding of its own, which is its LM head too, distilled from the target's next-token law
on the same text as the other drafters; it reads nothing of the target's.
Simplified: the chain is greedy, which is what both papers do at temperature 0, and only names
tokens of the draft vocabulary, since the others were not trained. Another engine that loads the
saved model drafts over the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens

from baselines.group_attention import GroupRows, joined, newest_rows, rows_after
from baselines.groups import SmallShape, draw_weights, masked_attention
from baselines.options import SpSConfig
from baselines.positions import (
    NamedLearner,
    loss_and_choice,
    served,
    write_folder,
    write_mapping,
)
from vllm_specblock.drafters.common.config import layers_of
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.train.learner import (
    IGNORE_INDEX,
    Draft,
    EvalSequence,
    LossOutput,
    TrainBatch,
    draft_labels,
)
from vllm_specblock.tree import DraftTree


class SmallLanguageModel(nn.Module):
    """A Llama; parameter names are those of transformers."""

    d2t: Tensor

    def __init__(self, shape: SmallShape) -> None:
        super().__init__()
        self.config = shape
        self.model = SmallDecoder(shape)
        # What a draft id lacks to its target id. Until it is loaded: the first Vd target ids.
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.lm_head: nn.Linear | None = None  # see `fold`

    def fold(self) -> None:
        """Take the draft vocabulary's rows out of the embedding once and for all."""
        size, count = self.config.hidden_size, len(self.d2t)
        self.lm_head = nn.Linear(size, count, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(self.rows().detach(), requires_grad=False)

    def logits(self, states: Tensor) -> Tensor:
        """After the final norm [..., H] -> [..., Vd]."""
        if self.lm_head is not None:
            return self.lm_head(states)
        return linear(states, self.rows())

    def rows(self) -> Tensor:
        """[Vd, H]: the draft vocabulary's embeddings, which are its LM head."""
        ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        return self.model.embed_tokens.weight[ids]

    def best(self, states: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the likeliest token after states [R, H]: its log-probability over the draft
        vocabulary [R, 1] float32, and its target id [R, 1] int64. beta: [R] float32; None: 1."""
        return topk_tokens(self.logits(states), self.d2t, 1, 1.0, beta)


class SmallDecoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: SmallShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)

    def forward(
        self, token: Tensor, position: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """token and position [T] int64 -> states after the final norm [T, H]; of `keep` [Q] alone
        [Q, H]. `attend` gets one position per row, [T, 1, heads, D]."""
        hidden = self.embed_tokens(token)[:, None]
        rope = self.rotary(position, hidden.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, rope, attend, keep if index == last else None)
        return self.norm(hidden[:, 0])


class SpSDrafter(NetworkDrafter):
    """Catch-up on the committed tokens and the root are one forward; each token after the first
    is another.

    It reads neither `embed` nor `layers`.
    """

    kind = "sps"
    model: SmallLanguageModel

    def set_shape(self, options: SpSConfig, lookahead: int) -> None:
        self.max_depth = min(options.depth, self.num_nodes, lookahead)

    def bind(self, caches: list[Tensor]) -> None:
        self.attention_builder = GroupRows(caches, 1, self.max_model_len)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        roots = rows_after(newest_rows(rows), 1, self.max_model_len)
        # Row t brings the token after its own, and so all of a request's but the first.
        own = rows.text[rows.req_idx[rows.request()], rows.position].long()
        token, both = torch.cat([own, roots.token]), joined(rows, roots)
        attend, _, keep = self.attention_builder.first(both)
        return self.model.model(token, both.position, attend, keep)[len(rows.last) :]

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        state, beta = of_requests(requests, self.state, self.beta)
        self.attention_builder.begin(requests)
        rows = rows_after(self.attention_builder.drafting, 1, self.max_model_len)
        logprob, token = self.model.best(state, beta)
        tokens, scores = [token], [logprob.clamp(max=0)]
        for _ in range(1, self.max_depth):
            rows = rows_after(rows, 1, self.max_model_len)
            attend, _, keep = self.attention_builder.first(rows)
            state = self.model.model(token[:, 0], rows.position, attend, keep)
            logprob, token = self.model.best(state, beta)
            tokens.append(token)
            scores.append(scores[-1] + logprob.clamp(max=0))
        unused = 0, self.num_nodes - self.max_depth
        size = torch.full((len(state),), self.max_depth, dtype=torch.int32, device=state.device)
        named, logprobs = (pad(torch.cat(each, 1), unused) for each in (tokens, scores))
        return DraftTree.chain(named, logprobs, size)


_STD = 0.02
"""Of the first weights, as transformers draws a Llama's."""


class SmallModel(NamedLearner, SmallLanguageModel):
    """A small Llama and its distillation; the first LM head of a target is not used."""

    depth = 5
    """Tokens of a drafted chain."""

    @staticmethod
    def shape_like(target_config: Any, draft_vocab_size: int, **sizes: Any) -> SmallShape:
        """sizes: hidden_size, num_hidden_layers and other fields that are not the target's."""
        rope = layers_of(target_config.to_dict())
        own = {
            "draft_vocab_size": draft_vocab_size,
            "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
            "rope_theta": rope["rope_theta"],
            "rope_scaling": rope["rope_scaling"],
        }
        names = ("vocab_size", "rms_norm_eps", "max_position_embeddings")
        names += ("bos_token_id", "eos_token_id", "pad_token_id")
        like = {name: getattr(target_config, name, None) for name in names}
        return SmallShape(**like | own | sizes)

    def draw(self) -> None:
        draw_weights(self, _STD)

    def take_head(self, d2t: Tensor, head: Tensor | None) -> None:
        self.d2t.copy_(d2t)

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """Cross-entropy to the target's law at every token whose successor is counted."""
        batch = train_batch.batch
        label = draft_labels(self.t2d, batch)
        column = torch.arange(batch.tokens.shape[1], device=label.device).expand_as(label)
        wanted = batch.at(label, column, column + 1, IGNORE_INDEX)
        same = batch.document[:, :, None] == batch.document[:, None, :]
        mask = same & (column[:, :, None] >= column[:, None, :])

        def attend(_: int, *flat: Tensor) -> Tensor:
            of_windows = (each.view(*label.shape, *each.shape[2:]) for each in flat)
            return masked_attention(*of_windows, mask).flatten(0, 1)[:, None]

        tokens = batch.tokens.clamp(min=0)
        state = self.model(tokens.flatten(), batch.position.flatten(), attend)
        rows = (wanted != IGNORE_INDEX).nonzero(as_tuple=True)
        normed = state.view(*label.shape, -1)[rows]
        target_probs = train_batch.target_outputs.target_probs.flatten(0, 1)
        target_row = rows[0] * label.shape[1] + rows[1]
        total, _, best = loss_and_choice(normed, self.rows(), target_probs, target_row)
        count = torch.tensor(len(best), device=label.device)
        hit = (best == wanted[rows]).sum()
        loss = train_batch.counts.mean(total, count)
        tally = (number.detach().float().view(1, 1) for number in (total, hit, count))
        return LossOutput(loss, *tally, torch.zeros_like(loss))

    def draft_along(self, sequence: EvalSequence) -> Draft:
        return served(SpSDrafter, self, self.depth, sequence, depth=self.depth)

    def save(self, directory: Path) -> None:
        """What we serve, and a transformers model for vLLM's method "draft_model"."""
        shape = self.config.model_dump(exclude={"draft_vocab_size", "rope_theta", "rope_scaling"})
        rope = {"rope_type": "default", **(self.config.rope_scaling or {})}
        config = shape | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": rope | {"rope_theta": self.config.rope_theta},
        }
        write_folder(directory, "sps", config, dict(self.named_parameters()))
        write_mapping(directory, self.d2t, self.t2d)
