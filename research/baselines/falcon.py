"""Falcon-style drafting (arXiv 2412.12639): semi-autoregressive, k tokens per forward.

A forward reads the newest k rows as one group: LSTM layers along it, then decoder layers whose
relaxed causal mask lets the group's rows see each other and all earlier groups. Row j of the group
gives the j-th of the next k tokens. Those tokens and the states that gave them, in place of the
target's features, are the next group; a few such forwards fill a tree of fixed shape.

Simplified:
* The LSTM starts anew in every block: tokens of one block depend on each other, as in the paper.
* A block ends at each row and sees earlier blocks that end a multiple of k before, so a row drafts
  the same wherever the text was cut. A text's first blocks begin before it, with zeros.
* Instead of a loss on features and glancing distillation, later forwards are trained on the
  states of earlier ones and the text's tokens (EAGLE-3's training-time test).
* Features of three target layers and a reduced vocabulary, as all drafters here have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from baselines.group_attention import FalconAttention
from baselines.groups import (
    FalconShape,
    KeyValue,
    Trunk,
    earlier_rows,
    extend,
    group_attention,
)
from baselines.options import FalconConfig
from baselines.positions import Positions, PositionsLearner, served
from baselines.static_tree import TreePlan, default_hits
from vllm_specblock.candidates import NEVER
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.layers import Attend, RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.interface import CacheLayer
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch
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

    def run(
        self, entries: Tensor, position: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """One forward over groups [..., k, H]; other arguments as of `Trunk.forward`."""
        along = self.lstm(entries.flatten(0, -3))[0].view(entries.shape)
        return self.trunk(entries + along, position, attend, keep)


def first_rope(position: Tensor, block: int) -> Tensor:
    """RoPE positions [..., k] of a row's group; position [...] int64: the row's, one before that of
    its own entry, the last."""
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
        self.attention_builder = FalconAttention(caches, self.k, self.plan, self.max_model_len)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        trunk = self.model.trunk
        condition = trunk.condition(rows.features(self.layers))
        groups = self.attention_builder.groups(rows, trunk.entry(condition, self.embed(rows.token)))
        attend, order, keep = self.attention_builder.first(rows)
        rope = first_rope(rows.position[order], self.k)
        states = self.model.run(groups[order], rope, attend, keep)
        return states.view(len(rows.last), self.k, -1)

    def draft(self) -> DraftTree:
        plan, trunk, beta = self.plan, self.model.trunk, self.beta
        states, count = self.state[:, None], len(self.state)  # [R, S, k, H]
        rope = first_rope(self.attention_builder.rows.position, self.k)[:, None]  # [R, 1, k]
        token = torch.zeros(count, plan.count, dtype=torch.int64, device=states.device)
        score = torch.zeros(count, plan.count, device=states.device)
        for index, step in enumerate(plan.steps):
            there = None
            if index:
                starts = len(step.source)
                embedded = self.embed(token[:, step.path].flatten())
                entries = trunk.entry(
                    states[:, step.source], embedded.view(count, starts, self.k, -1)
                )
                attend, there = self.attention_builder.next(index, step.before, starts)
                at = (rope + index * self.k).expand(-1, starts, -1)
                states = self.model.run(entries, at, attend)
            logprob, best = self.model.best(states.flatten(1, 2), step.width, beta)
            if there is not None:
                # Groups without slots have read other entries.
                lost = ~there.repeat_interleave(self.k, 1)[..., None]
                logprob = logprob.masked_fill(lost, NEVER)
            token[:, step.node] = best[:, step.place, step.rank]
            score[:, step.node] = logprob[:, step.place, step.rank]
        return plan.tree(token, score, self.num_nodes)


class Falcon(PositionsLearner, FalconModel):
    """See the module; `config.block_size` is k."""

    config: FalconShape
    config_class = FalconShape
    defaults: ClassVar = {"block_size": 2, "forwards": 3, "lstm_layers": 1}

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        forwards = self.config.forwards
        weights = [1.0] * forwards * self.config.block_size
        return self.outcome(self.states(train_batch), train_batch, weights, forwards)

    def states(self, train_batch: TrainBatch) -> Tensor:
        """All forwards of all rows but the last, fed the text's tokens: [B, L − 1, F·k, H]."""
        batch, block = train_batch.batch, self.config.block_size
        windows, length = batch.tokens.shape
        rows = slice(0, length - 1)
        entries = self._first_entries(train_batch, rows)
        row = torch.arange(length - 1, device=entries.device).repeat_interleave(block)
        row, offset = row.expand(windows, -1), torch.arange(block, device=entries.device)
        # Blocks that end a multiple of k before.
        sees = earlier_rows(batch.document[:, rows], block).repeat_interleave(block, dim=-1)
        prefix: dict[int, KeyValue] = {}
        own: dict[int, KeyValue] = {}

        def attend(layer: int, *flat: Tensor) -> Tensor:
            query, key, value = (each.view(*entries.shape[:3], *each.shape[2:]) for each in flat)
            mine = extend(own, layer, (key, value))
            seen = prefix.setdefault(layer, (key.flatten(1, 2), value.flatten(1, 2)))
            relaxed = torch.ones(block, mine[0].shape[2], dtype=torch.bool, device=query.device)
            return group_attention(query, seen, mine, sees, relaxed).flatten(0, 2)[:, None]

        states: list[Tensor] = []
        for done in range(0, block * self.config.forwards, block):
            if done:
                place = row + 2 + done - block + offset.repeat(length - 1)
                token = batch.at(batch.tokens, row, place, 0).clamp(min=0)
                embedding = train_batch.embed(token).unflatten(1, (-1, block))
                entries = self.trunk.entry(states[-1], embedding)
            states.append(
                self.run(entries, first_rope(batch.position[:, rows], block) + done, attend)
            )
        return torch.cat(states, dim=2)

    def _first_entries(self, train_batch: TrainBatch, rows: slice) -> Tensor:
        """Each row's block [B, R, k, H]: itself and the k − 1 rows before it, zeros before the
        text."""
        batch, block = train_batch.batch, self.config.block_size
        condition = self.trunk.condition(train_batch.target_outputs.hidden[:, rows])
        real = self.trunk.entry(condition, train_batch.embed(batch.tokens[:, 1:].clamp(min=0)))
        entries = pad(real, (0, 0, block - 1, 0)).unfold(1, block, 1).transpose(2, 3)
        back = torch.arange(block - 1, -1, -1, device=real.device)
        return entries.masked_fill((batch.position[:, rows, None] < back)[..., None], 0.0)

    @torch.no_grad()
    def calibrate(self, train_batches: Iterable[TrainBatch]) -> None:
        """Shape later trees by how often each rank of each position is right on this process's
        `train_batches`, fed the text's tokens. The default rates weigh as much as one row."""
        right = default_hits(*self.hits.shape).to(self.hits)
        count = torch.ones_like(right[:, :1])
        for train_batch in train_batches:
            for k, (rows, _, wanted) in enumerate(
                self.positions(self.states(train_batch), train_batch)
            ):
                best = self.logits(rows).float().topk(self.hits.shape[1]).indices
                right[k] += (best == wanted[:, None]).sum(0)
                count[k] += len(wanted)
        self.hits.copy_(right / count)

    def draft_along(self, sequence: EvalSequence) -> Draft:
        # So many slots that the tree is the whole plan.
        slots = (self.budget + 1) * self.config.block_size
        return served(FalconDrafter, self, self.budget, sequence, slots)
