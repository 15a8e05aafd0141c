"""Standard speculative sampling (arXiv 2211.17192, 2302.01318): a small Llama drafts a chain.

It has an embedding of its own, which is its LM head too, and reads nothing of the target's. The
chain is greedy, and names tokens of the draft vocabulary only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from vllm_specblock.config import SpSConfig
from vllm_specblock.drafters.baselines.causal_rows import CausalRows
from vllm_specblock.drafters.baselines.config import SmallShape
from vllm_specblock.drafters.common.layers import RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.specblock.model import Attend, DecoderLayer
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


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
        """The likeliest token after states [R, H]: its log-probability over the draft vocabulary
        [R, 1] float32, and its target id [R, 1] int64. sharpness: [R] float32; None: 1."""
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
        """token and position [T] int64 -> states after the final norm, [T, H], or [Q, H] of the
        rows `keep` [Q]. `attend` gets one position per row, [T, 1, heads, D]."""
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
        self.attention_builder = CausalRows(caches, self.max_model_len)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        attend, position, keep = self.attention_builder.first(rows, 1, keep_newest=False)
        # Row t brings the token after its own, and so all of a request's but the first.
        own = rows.text[rows.req_idx[rows.request()], rows.position].long()
        token = torch.cat([own, rows.token[rows.last]])
        return self.model.model(token, position, attend, keep)

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        state, beta = of_requests(requests, self.state, self.beta)
        self.attention_builder.begin(requests)
        logprob, token = self.model.best(state, beta)
        tokens, scores = [token], [logprob.clamp(max=0)]
        for ahead in range(1, self.max_depth):
            attend, position = self.attention_builder.next(ahead)
            state = self.model.model(token[:, 0], position, attend)
            logprob, token = self.model.best(state, beta)
            tokens.append(token)
            scores.append(scores[-1] + logprob.clamp(max=0))
        unused = 0, self.num_nodes - self.max_depth
        size = torch.full((len(state),), self.max_depth, dtype=torch.int32, device=state.device)
        named, logprobs = (pad(torch.cat(each, 1), unused) for each in (tokens, scores))
        return DraftTree.chain(named, logprobs, size)
