"""Drafting along a text: serving's trees over the dense cache of one sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES, parse_drafter
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.growth import grow, limits_of
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.chain import first_block_along
from vllm_specblock.train.eval.dense_cache import DenseCache
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.grow_level import LevelLimits, NextRows


class LearnedBeta:
    """β of the drafter's logits along one text, learned from every step as in serving; without
    `calibration` it is 1. `temperature`: at which the target wrote the text."""

    def __init__(
        self, calibration: DraftCalibration | None, temperature: float, device: torch.device
    ) -> None:
        self.calibration = calibration
        self.req_idx = torch.zeros(1, dtype=torch.int64, device=device)
        if calibration is not None:
            calibration.begin(0)  # as one request
        self.temperature = torch.tensor([temperature], device=device)
        self.before: tuple[int, DraftTree] | None = None
        """The last step's root and tree, to be set after each step."""

    def at(self, root: int) -> Tensor | None:
        """[1] fp32 for the step from `root`, after learning how far the step before has come."""
        if self.calibration is None:
            return None
        if self.before is not None:
            accepted = torch.tensor([root - self.before[0] - 1], device=self.req_idx.device)
            expected = self.before[1].logprob.exp().sum(1)
            live = accepted >= 0
            self.calibration.learn(self.temperature, expected, accepted, live, self.req_idx)
        return self.calibration.of(self.temperature, self.req_idx)


class SpecBlockDraft:
    """A `Draft` along one text. calibration, temperature: see `LearnedBeta`."""

    def __init__(
        self,
        drafter: SpecBlockModel,
        sequence: EvalSequence,
        shape: TreeShape,
        calibration: DraftCalibration | None = None,
        temperature: float = 0.0,
    ) -> None:
        weight = drafter.lm_head.weight
        self.drafter, self.sequence, self.shape = drafter, sequence, shape
        self.dtype, self.device = weight.dtype, weight.device
        self.cache = DenseCache(drafter.config, self.dtype, self.device)
        self.branching = torch.tensor(shape.branching, device=self.device)
        self.path_rope = drafter.config.block_rope == "path"
        self.beta = LearnedBeta(calibration, temperature, self.device)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """The tree (R = 1) whose root is the text's token number `root`."""
        drafter, beta = self.drafter, self.beta.at(root)
        newest = torch.tensor([root - 1], device=self.device)
        drafted = self._first_block[newest]  # [rows so far, K, H]; row 0 is the drafting row
        depth = torch.zeros(1, dtype=torch.int64, device=self.device)  # tokens before a row
        expansion = Expansion(self.shape, self.branching, num_requests=1)
        best = drafter.candidates(drafted[None], self.shape.width, beta)
        grown = expansion.attach(None, *best)
        growth = self.cache.grow(newest)
        while isinstance(grown, NextStarts):
            row, position = grown.row[0], grown.position[0]
            reach = depth[row] + position + 1
            base = root + (reach if self.path_rope else torch.zeros_like(reach))
            hidden = drafter(
                drafted[row, position],
                self.sequence.embed(grown.token[0]).to(self.dtype),
                base,
                growth.starts(row, position),
            )  # [S, K, H]
            best = drafter.candidates(hidden[None], self.shape.width, beta)
            grown = expansion.attach(grown, *best)
            drafted, depth = torch.cat([drafted, hidden]), torch.cat([depth, reach])
        self.last, self.beta.before = expansion, (root, grown)
        return grown

    def forwards(self) -> Tensor:
        """[N], which forward (block 1 … M) each node of the last tree comes from; 0: no node."""
        return self.last.blocks()[0]

    @cached_property
    @torch.no_grad()
    def _first_block(self) -> Tensor:
        """Block 1's states [T − 1, K, H] of all rows, which no step changes."""
        return first_block_along(self.drafter, self.sequence, self.cache)


class Eagle3Draft:
    """A `Draft` along one text: catch up on the committed rows, then grow a tree from the newest.
    calibration, temperature: see `LearnedBeta`."""

    def __init__(
        self,
        drafter: Eagle3Model,
        sequence: EvalSequence,
        growth: LevelLimits,
        calibration: DraftCalibration | None = None,
        temperature: float = 0.0,
    ) -> None:
        weight = drafter.fc.weight
        self.drafter, self.sequence, self.growth = drafter, sequence, growth
        self.embed = sequence.embed if drafter.embed_tokens is None else drafter.embed_tokens
        self.cache = DenseCache(drafter.config, weight.dtype, weight.device)
        self.beta = LearnedBeta(calibration, temperature, weight.device)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """The tree (R = 1) whose root is the text's token number `root`."""
        beta, tokens = self.beta.at(root), self.sequence.tokens
        row = torch.arange(self.cache.rows, root, device=tokens.device)
        feature = self.drafter.fuse(self.sequence.hidden[row])
        attend = _rows_of_one(self.cache.append())
        state = self.drafter.run(self.embed(tokens[row + 1]), feature, row, attend)[-1:]
        levels = self.cache.grow()

        def attention(_level: int, rows: NextRows) -> tuple[Attend, None]:
            return _rows_of_one(levels.starts(rows.row[0], rows.position[0])), None

        tree = grow(self.drafter, self.embed, self.growth, state, row[-1:], attention, beta)
        self.beta.before = root, tree
        return tree

    def forwards(self) -> Tensor:
        """[N], which forward each node of the last tree comes from: its level's."""
        assert self.beta.before is not None  # a tree was drafted
        _, tree = self.beta.before
        return torch.where(tree.parent[0] >= 0, tree.depth[0], 0)


def _rows_of_one(attend: Attend) -> Attend:
    """`attend` of a `DenseCache` of K = 1 for rows [n, heads, D] without a dimension of K."""
    return lambda layer, *rows: attend(layer, *(x[:, None] for x in rows))[:, 0]


def serving_shape(
    drafter: SpecBlockModel, options: SpecBlockConfig | None = None, nodes: int = DEFAULT_NODES
) -> TreeShape:
    """The trees that serving grows with `options` (default: its own) and a budget of `nodes`."""
    # The drafter decides, since its blocks must fit into the slots of the budget.
    options = options or parse_drafter({}, "specblock", num_nodes=nodes)
    return SpecBlockDrafter(drafter, lambda tokens: tokens, options, nodes, max_model_len=1).shape


def serving_growth(
    drafter: Eagle3Model, options: Eagle3Config | None = None, nodes: int = DEFAULT_NODES
) -> LevelLimits:
    """The trees that serving grows with `options` (default: its own) and a budget of `nodes`."""
    options = options or Eagle3Config()
    return limits_of(options, nodes, nodes, drafter.config.draft_vocab_size)


def chain_shape(drafter: SpecBlockModel, blocks: int) -> TreeShape:
    """One path of `blocks` blocks, each from the end of the one before."""
    block = drafter.config.block_size
    return TreeShape(block, blocks, 1, (1, 1, 1, 1), blocks * block)


def uniform_shape(shape: TreeShape, width: int | None = None) -> TreeShape:
    """Ablation: the same width at every position. The default is the least width, from 2 on, with
    1.5 times as many candidates as the budget: those of equal text join, and a comparison needs a
    full tree."""
    cells = shape.rows(shape.num_blocks) * shape.block_size
    width = width or max(2, -(-3 * shape.budget // (2 * cells)))
    return replace(shape, branching=(width,) * 4)
