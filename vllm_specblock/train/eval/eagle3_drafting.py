"""EAGLE-3 drafting along a text: the tree of serving, over the plain cache of one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES, Eagle3Config
from vllm_specblock.drafters.eagle3.growth import grow, limits_of
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.specblock.tree_shape import Starts
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.drafting import LearnedBeta
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.grow_level import LevelLimits


class Eagle3Draft:
    """A `Draft` along one text, in the drafter's dtype and on its device: catch up on the committed
    rows, then grow a tree from the newest. calibration, temperature: see `LearnedBeta`."""

    def __init__(
        self,
        drafter: Eagle3Model,
        sequence: EvalSequence,
        growth: LevelLimits,
        calibration: DraftCalibration | None = None,
        temperature: float = 0.0,
    ) -> None:
        self.drafter, self.sequence, self.growth = drafter, sequence, growth
        self.embed = sequence.embed if drafter.embed_tokens is None else drafter.embed_tokens
        self.beta = LearnedBeta(calibration, temperature, drafter.fc.weight.device)
        self.attention_builder = CachedAttentionBuilder(drafter)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """The tree (R = 1) whose root is the text's token number `root`."""
        beta = self.beta.at(root)
        state = self._catch_up(root)
        self.attention_builder.begin()
        newest = torch.full((1,), root - 1, device=state.device)
        level = self.attention_builder.level
        tree = grow(self.drafter, self.embed, self.growth, state, newest, level, beta)
        self.attention_builder.cut(root)
        self.beta.before = root, tree
        return tree

    def forwards(self) -> Tensor:
        """[N], which forward each node of the last tree comes from: its level's."""
        assert self.beta.before is not None  # a tree was drafted
        _, tree = self.beta.before
        return torch.where(tree.parent[0] >= 0, tree.depth[0], 0)

    def _catch_up(self, root: int) -> Tensor:
        """Run the committed rows that were not yet, at least the newest one: its state [1, H]."""
        self.attention_builder.cut(min(self.attention_builder.rows, root - 1))
        row = torch.arange(self.attention_builder.rows, root, device=self.sequence.tokens.device)
        self.attention_builder.mask = torch.arange(root, device=row.device) <= row[:, None]
        embedding = self.embed(self.sequence.tokens[row + 1])
        feature = self.drafter.fuse(self.sequence.hidden[row])
        return self.drafter.run(embedding, feature, row, self.attention_builder)[-1:]


class CachedAttentionBuilder:
    """`attend` over one text's rows so far (key, value: [n, nkv, D] of each layer) and new ones;
    mask [new, n + new] bool is set before each forward."""

    def __init__(self, drafter: Eagle3Model) -> None:
        weight, shape = drafter.fc.weight, drafter.config
        sizes = (0, shape.num_key_value_heads, shape.head_dim)
        empty = torch.empty(sizes, dtype=weight.dtype, device=weight.device)
        self.key, self.value = ([empty] * shape.num_hidden_layers for _ in range(2))
        self.mask: Tensor

    @property
    def rows(self) -> int:
        return len(self.key[0])

    def cut(self, rows: int) -> None:
        """Keep the first `rows` only."""
        self.key, self.value = ([x[:rows] for x in kept] for kept in (self.key, self.value))

    def begin(self) -> None:
        """Begin a tree: its rows see the rows so far and their ancestors."""
        self.committed = self.rows
        # Drafted row 0 is the newest committed one, and hides nothing from those below it.
        self.path = torch.zeros(1, 0, dtype=torch.bool, device=self.key[0].device)

    def level(self, _level: int, rows: Starts) -> tuple[CachedAttentionBuilder, None]:
        """Set the mask for `rows` ([1, width]) of the next level."""
        row = rows.row[0]
        own = torch.eye(len(row), dtype=torch.bool, device=row.device)
        path = torch.cat([self.path[row], own], dim=1)
        self.path = torch.cat([F.pad(self.path, (0, len(row))), path])
        self.mask = F.pad(path, (self.committed, 0), value=True)
        return self, None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key[layer] = key = torch.cat([self.key[layer].to(key.dtype), key])
        self.value[layer] = value = torch.cat([self.value[layer].to(value.dtype), value])
        return masked_attention(query[None], key[None], value[None], self.mask[None])[0]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [B, Q, nh, D], key and value [B, T, nkv, D], mask [B, Q, T] bool -> [B, Q, nh, D]."""
    # Repeated by hand: fused kernels that take a mask know no groups.
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return mixed.transpose(1, 2)


def serving_growth(
    drafter: Eagle3Model, options: Eagle3Config | None = None, nodes: int = DEFAULT_NODES
) -> LevelLimits:
    """The trees that serving grows with `options` (default: its own) and a budget of `nodes`."""
    options = options or Eagle3Config()
    return limits_of(options, nodes, nodes, drafter.config.draft_vocab_size)
