"""Falcon-style drafting (arXiv 2412.12639): semi-autoregressive, k tokens per forward.

A forward reads the newest k rows as one group: LSTM layers along it, then decoder layers whose
relaxed causal mask lets the group's rows see each other and all earlier groups. Row j of the group
gives the j-th of the next k tokens. Those tokens and the states that gave them, in place of the
target's features, are the next group; a few such forwards fill a tree of fixed shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_specblock.candidates import NEVER
from vllm_specblock.config import FalconConfig
from vllm_specblock.drafters.baselines.config import FalconShape
from vllm_specblock.drafters.baselines.group_attention import GroupAttentionBuilder
from vllm_specblock.drafters.baselines.positions import Positions
from vllm_specblock.drafters.baselines.static_tree import TreePlan, default_hits
from vllm_specblock.drafters.baselines.trunk import Trunk
from vllm_specblock.drafters.common.layers import RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens
from vllm_specblock.drafters.specblock.model import Attend
from vllm_specblock.tree import DraftTree

WIDTH = 10
"""Choices per position that the static tree picks from."""


class FalconModel(Positions):
    """LSTM, trunk and LM head.

    `hits` [F·k, B] are the hit rates that the static tree is shaped by.
    """

    hits: Tensor

    def __init__(self, config: FalconShape) -> None:
        super().__init__(config.hidden_size, config.draft_vocab_size)
        self.config = config
        size = config.hidden_size
        self.lstm = nn.LSTM(size, size, config.lstm_layers, batch_first=True)
        self.trunk = Trunk(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        shape = config.forwards * config.block_size, min(WIDTH, config.draft_vocab_size)
        self.register_buffer("hits", default_hits(*shape).float())

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    def run(
        self, entries: Tensor, position: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """One forward over groups [..., k, H]; the rest as `Trunk.forward` has it.

        The LSTM starts anew in every group: what is further back, attention gives.
        """
        along = self.lstm(entries.flatten(0, -3))[0].view(entries.shape)
        return self.trunk(entries + along, position, attend, keep)


def first_rope(position: Tensor, block: int) -> Tensor:
    """RoPE positions [..., k] of the entries of a row's group; `position` [...] int64, the row's.

    Its own entry, the last, stands one further than the row.
    """
    return position[..., None] + 2 - block + torch.arange(block, device=position.device)


class FalconDrafter(NetworkDrafter):
    """Catch-up on the committed rows and the first forward are one; each later one another."""

    kind = "falcon"
    model: FalconModel

    def set_shape(self, options: FalconConfig, lookahead: int) -> None:
        model = self.model
        self.k = self.entries_per_token = model.config.block_size
        # Drafted groups begin up to k − 1 places behind the newest row, and take k each.
        room = (lookahead - self.k + 1) // self.k
        hits = model.hits if room > 0 else model.hits[: self.k]
        self.plan = TreePlan.fitting(hits, self.num_nodes, self.k, max(0, room), self.device)
        self.max_depth = self.plan.max_depth

    def cache_layers(self) -> list[CacheLayer]:
        # The last holds no keys and values, but what goes into the LSTM: H numbers per row.
        return [*super().cache_layers(), CacheLayer(1, self.model.config.hidden_size // 2, 1)]

    def bind(self, caches: list[Tensor]) -> None:
        self.attention_builder = GroupAttentionBuilder(
            caches, self.k, self.plan, self.max_model_len
        )

    def _forward(self, rows: CommittedTokens) -> Tensor:
        trunk = self.model.trunk
        condition = trunk.condition(rows.features(self.layers))
        groups = self.attention_builder.groups(rows, trunk.entry(condition, self.embed(rows.token)))
        attend, order, keep = self.attention_builder.first(rows)
        rope = first_rope(rows.position[order], self.k)
        states = self.model.run(groups[order], rope, attend, keep)
        return states.view(len(rows.last), self.k, -1)

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        plan, trunk = self.plan, self.model.trunk
        states, beta = of_requests(requests, self.state, self.beta)
        self.attention_builder.begin(requests)
        states, count = states[:, None], len(states)  # [R, S, k, H]
        rope = first_rope(self.attention_builder.position, self.k)[:, None]  # [R, 1, k]
        token = torch.zeros(count, plan.count, dtype=torch.int64, device=states.device)
        score = torch.zeros(count, plan.count, device=states.device)
        for index, step in enumerate(plan.steps):
            there = None
            if index:
                starts = len(step.source)
                embedded = self.embed(token[:, step.path].flatten())
                embedded = embedded.view(count, starts, self.k, -1)
                entries = trunk.entry(states[:, step.source], embedded)
                attend, there = self.attention_builder.next(index, step.before, starts)
                at = (rope + index * self.k).expand(-1, starts, -1)
                states = self.model.run(entries, at, attend)
            read = states.flatten(1, 2)[:, step.read]  # [R, P, H]
            logprob, best = self.model.best(read, step.width, beta)
            if there is not None:
                # Groups without a place have read what is not theirs.
                logprob = logprob.masked_fill(~there[:, step.read // self.k, None], NEVER)
            token[:, step.node] = best[:, step.place, step.rank]
            score[:, step.node] = logprob[:, step.place, step.rank]
        return plan.tree(token, score, self.num_nodes)
