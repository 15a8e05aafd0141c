"""Falcon-style drafting (arXiv 2412.12639): semi-autoregressive, k tokens per forward.

The network and its tree of fixed shape are those that we serve
(`vllm_specblock.drafters.baselines.falcon`); here are the objective and drafting along one text.

Simplified:
* The LSTM starts anew in every block. Its task in the paper, that tokens of one block depend on
  each other, is inside the block; what is further back, attention gives.
* A block ends at each row. Blocks see earlier blocks that end a multiple of k before, so what a
  row drafts does not depend on where the text was cut. A text's first blocks begin before it,
  with entries of zeros.
* Instead of a loss on features and glancing distillation, later forwards are trained on the
  states that earlier ones gave, their tokens being the text's (EAGLE-3's training-time test).
* Features of three target layers and a reduced vocabulary, as all drafters here have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from baselines.folder import write_folder
from baselines.groups import Kept, KeyValue, earlier_rows, group_attention, sizes_like
from baselines.trunk_learner import TrunkLearner, passes_over
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.drafters.baselines.config import FalconShape
from vllm_specblock.drafters.baselines.falcon import FalconModel, first_rope
from vllm_specblock.drafters.baselines.static_tree import TreePlan, default_hits, static_tree
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch
from vllm_specblock.tree import DraftTree

Seen = Callable[[int, Tensor, Tensor], KeyValue]


class Falcon(TrunkLearner, FalconModel):
    """See the module; `config.block_size` is k."""

    config: FalconShape

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        head: Tensor | None = None,
        *,
        block: int = 2,
        forwards: int = 3,
        lstm_layers: int = 1,
        budget: int = 60,
        **sizes: Any,
    ) -> Falcon:
        """A drafter for a target with this transformers config.

        Args:
            seed: of the weights.
            block: k.
            sizes: as `sizes_like` takes them, such as `intermediate_size` and `layer_ids`.
        """
        config = FalconShape(
            forwards=forwards,
            lstm_layers=lstm_layers,
            **sizes_like(target_config, len(d2t), block, **sizes),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, d2t, t2d, head, budget)

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        count = self.config.forwards * self.config.block_size
        return self.outcome(
            self.states(train_batch), train_batch, [1.0] * count, self.config.forwards
        )

    def states(self, train_batch: TrainBatch) -> Tensor:
        """All forwards of all rows but the last, fed the text's tokens: [B, L − 1, F·k, H]."""
        batch, block = train_batch.batch, self.config.block_size
        windows, length = batch.tokens.shape
        rows, prefix, own = slice(0, length - 1), Kept(dim=1), Kept(dim=2)
        entries = self.entries(
            train_batch.target_outputs.hidden[:, rows],
            train_batch.embed(batch.tokens[:, 1:].clamp(min=0)),
            batch,
        )
        states = [self.first(entries, batch, rows, prefix, own)]
        row = torch.arange(length - 1, device=entries.device).repeat_interleave(block)
        row, offset = row.expand(windows, -1), torch.arange(block, device=entries.device)
        sees = _visible(batch, rows, block)
        for done in range(block, block * self.config.forwards, block):
            place = row + 2 + done - block + offset.repeat(length - 1)
            token = batch.at(batch.tokens, row, place, 0).clamp(min=0)
            embedding = train_batch.embed(token).unflatten(1, (-1, block))
            entries = self.trunk.entry(states[-1], embedding)
            rope = first_rope(batch.position[:, rows], block) + done
            states.append(self.groups(entries, rope, sees, prefix.held, own))
        return torch.cat(states, dim=2)

    def entries(self, hidden: Tensor, embedding: Tensor, batch: Batch) -> Tensor:
        """Each row's block: itself and the k − 1 rows before it, zeros before the text.

        hidden [B, R, 3·Ht], embedding of the next tokens [B, R, Ht] -> [B, R, k, H].
        """
        block = self.config.block_size
        real = self.trunk.entry(self.trunk.condition(hidden), embedding)
        entries = pad(real, (0, 0, block - 1, 0)).unfold(1, block, 1).transpose(2, 3)
        back = torch.arange(block - 1, -1, -1, device=real.device)
        exists = batch.position[:, : real.shape[1], None] >= back
        return entries.masked_fill(~exists[..., None], 0.0)

    def first(self, entries: Tensor, batch: Batch, rows: slice, prefix: Kept, own: Kept) -> Tensor:
        """The first forward of the rows `rows`; those before them are in `prefix` already.

        entries [B, R, k, H] -> states [B, R, k, H], before the final norm.
        """
        block = self.config.block_size

        def grow(layer: int, key: Tensor, value: Tensor) -> KeyValue:
            return prefix.extend(layer, key.flatten(1, 2), value.flatten(1, 2))

        rope = first_rope(batch.position[:, rows], block)
        return self.groups(entries, rope, _visible(batch, rows, block), grow, own)

    def groups(
        self, entries: Tensor, rope: Tensor, sees: Tensor, prefix: Seen, own: Kept
    ) -> Tensor:
        """One forward.

        Args:
            entries: [B, R, k, H].
            rope: [B, R, k] int64, RoPE positions.
            sees: [B, R, P] bool, which entries of the prefix a row's blocks see.
            prefix: (layer, this forward's key, value [B, R, k, nkv, D]) -> the prefix's.
            own: what the row's earlier blocks left; this one joins it.

        Returns:
            [B, R, k, H], before the final norm.
        """

        def attend(layer: int, *flat: Tensor) -> Tensor:
            query, key, value = (each.view(*entries.shape[:3], *each.shape[2:]) for each in flat)
            mine = own.extend(layer, key, value)
            shape = query.shape[2], mine[0].shape[2]
            relaxed = torch.ones(shape, dtype=torch.bool, device=query.device)
            seen = prefix(layer, key, value)
            return group_attention(query, seen, mine, sees, relaxed).flatten(0, 2)[:, None]

        return self.run(entries, rope, attend)

    @torch.no_grad()
    def calibrate(self, train_batches: Iterable[TrainBatch]) -> None:
        """Shape later trees by how often each rank of each position is right on `train_batches`,
        the text's own tokens having been fed. One rank's lessons; the rates are not gathered.

        The default rates weigh as much as one row: no rank is shut out for want of samples.
        """
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

    @torch.no_grad()
    def draft_along(self, sequence: EvalSequence) -> Draft:
        batch, prefix, block = Batch.of(sequence.tokens[None]), Kept(dim=1), self.config.block_size
        last = len(sequence.tokens) - 1
        entries = self.entries(
            sequence.hidden[None, :last], sequence.embed(sequence.tokens[None, 1:]), batch
        )
        # No block sees what comes after its row, so all first forwards can be run before the
        # first root is asked for: the numbers are those of one pass per root.
        passes = []
        for rows in passes_over(last):
            passes.append(self.first(entries[:, rows], batch, rows, prefix, Kept(dim=2)))
        first = torch.cat(passes, dim=1)[0]  # [T − 1, k, H]
        by_row = prefix.map(lambda kept: kept.unflatten(1, (last, block)), dim=1)
        plan = TreePlan(*static_tree(self.hits.cpu(), self.budget), block, first.device)

        @torch.no_grad()
        def draft(root: int) -> DraftTree:
            row = root - 1
            earlier = by_row.map(lambda kept: kept[:, row % block : row : block].flatten(1, 2), 1)
            own = by_row.map(lambda kept: kept[:, row : row + 1], dim=2)
            return self._grow(plan, first[row : row + 1], row, earlier, own, sequence)

        return draft

    def _grow(
        self,
        plan: TreePlan,
        states: Tensor,
        row: int,
        earlier: Kept,
        own: Kept,
        sequence: EvalSequence,
    ) -> DraftTree:
        """The tree of one row, forward after forward. states [1, k, H], of the first one."""
        block = self.config.block_size
        token = torch.zeros(1, plan.count, dtype=torch.int64, device=states.device)
        logprob = torch.zeros(1, plan.count, device=states.device)
        for index, step in enumerate(plan.steps):
            if index:
                own = own.map(lambda kept, source=step.source: kept[:, source], dim=2)
                embedding = sequence.embed(token[0, step.path])
                entries = self.trunk.entry(states[step.source], embedding)[None]
                rope = torch.full((1, len(step.path)), row, device=token.device)
                seen = earlier.layers[0][0].shape[1]
                sees = torch.ones(1, len(step.path), seen, dtype=torch.bool, device=token.device)
                states = self.groups(
                    entries,
                    first_rope(rope, block) + index * block,
                    sees,
                    lambda layer, *_: earlier.layers[layer],
                    own,
                )[0]
            values, tokens = self.best(states.flatten(0, 1)[step.read], step.width)
            token[0, step.node] = tokens[step.place, step.rank]
            logprob[0, step.node] = values[step.place, step.rank]
        return plan.tree(token, logprob, self.budget)

    def save(self, directory: Path) -> None:
        """What we serve; the tree is shaped by the hit rates as they are then."""
        config = {"architectures": ["Falcon"]} | self.config.model_dump(mode="json")
        write_folder(directory, "falcon", config, self.state_dict())


def _visible(batch: Batch, rows: slice, block: int) -> Tensor:
    """[B, R, P·k] bool: blocks that end a multiple of k before each row of `rows`."""
    return earlier_rows(batch.document, rows, block).repeat_interleave(block, dim=-1)
