"""SpecBlock drafting along a text: the tree of serving, over the plain cache of one sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES, SpecBlockConfig
from vllm_specblock.draft.cache import DenseCache
from vllm_specblock.draft.expand import Expansion, Shape
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.draft.sharpness import Sharpness
from vllm_specblock.draft.specblock import SpecBlockHead
from vllm_specblock.train.learner import Script
from vllm_specblock.tree import DraftTree


class LearnedBeta:
    """β of the drafter's logits along one text, learned from every step as in serving.

    Args:
        sharpness: with one slot at least; None: β is 1.
        temperature: at which the target wrote the text.
    """

    def __init__(self, sharpness: Sharpness | None, temperature: float, device: torch.device):
        self.sharpness, self.slot = sharpness, torch.zeros(1, dtype=torch.int64, device=device)
        if sharpness is not None:
            sharpness.begin(0)  # as a request of its own
        self.temperature = torch.tensor([temperature], device=device)
        self.before: tuple[int, DraftTree] | None = None  # the last step's root and tree

    def at(self, root: int) -> Tensor | None:
        """[1] fp32 for the step from `root`, after learning how far the step before has come."""
        if self.sharpness is None:
            return None
        if self.before is not None:
            accepted = torch.tensor([root - self.before[0] - 1], device=self.slot.device)
            expected = self.before[1].logprob.exp().sum(1)
            live = accepted >= 0
            self.sharpness.learn(self.temperature, expected, accepted, live, self.slot)
        return self.sharpness.of(self.temperature, self.slot)

    def drafted(self, root: int, tree: DraftTree) -> None:
        """Keep the step's tree until it is known what was accepted."""
        self.before = root, tree


class SpecBlockDraft:
    """A `Draft` along one text.

    Args:
        drafter: its dtype is that of the arithmetic, whatever the script's is.
        script: the text, on the drafter's device.
        shape: of the trees, with any number of blocks.
        sharpness, temperature: see `LearnedBeta`.
    """

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        script: Script,
        shape: Shape,
        sharpness: Sharpness | None = None,
        temperature: float = 0.0,
    ):
        weight = drafter.lm_head.weight
        self.drafter, self.script, self.shape = drafter, script, shape
        self.dtype, self.device = weight.dtype, weight.device
        self.cache = DenseCache(drafter.config, self.dtype, self.device)
        self.branching = torch.tensor(shape.branching, device=self.device)
        self.path_rope = drafter.config.block_rope == "path"
        self.beta = LearnedBeta(sharpness, temperature, self.device)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """The tree (R = 1) whose root is the text's token number `root`."""
        drafter, width = self.drafter, self.shape.width
        beta = self.beta.at(root)
        drafted = self._append(root)  # [rows so far, K, H]; row 0 is the drafting row
        depth = torch.zeros(1, dtype=torch.int64, device=self.device)  # tokens before a row
        expansion = Expansion(self.shape, self.branching, num_requests=1)
        expansion.first_block(*drafter.candidates(drafted, width, beta))
        growth = self.cache.grow()
        for block in range(2, self.shape.num_blocks + 1):
            starts = expansion.starts(block)
            row, position = starts.row[0], starts.position[0]
            reach = depth[row] + position + 1
            base = root + (reach if self.path_rope else torch.zeros_like(reach))
            hidden = drafter(
                drafted[row, position],
                self._embed(starts.token[0]),
                base,
                growth.starts(row, position),
            )  # [S, K, H]
            expansion.next_block(starts, block, *drafter.candidates(hidden[None], width, beta))
            drafted, depth = torch.cat([drafted, hidden]), torch.cat([depth, reach])
        selection = expansion.select()
        self.last = expansion, selection
        self.beta.drafted(root, selection.tree)
        return selection.tree

    def forwards(self) -> Tensor:
        """[N], which forward (block 1 … M) each node of the last tree comes from; 0: no node."""
        expansion, selection = self.last
        return expansion.blocks(selection)[0]

    def _append(self, root: int) -> Tensor:
        """Catch up with the text; the newest row's states [1, K, H]."""
        row = torch.arange(self.cache.rows, root, device=self.device)
        newest = torch.tensor([len(row) - 1], device=self.device)
        condition = self.drafter.condition(self.script.hidden[row].to(self.dtype))
        token = self._embed(self.script.tokens[row + 1])
        return self.drafter(condition, token, row + 1, self.cache.append(newest), newest)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.script.embed(tokens).to(self.dtype)


def serving_shape(
    drafter: SpecBlockDrafter, options: SpecBlockConfig | None = None, nodes: int = DEFAULT_NODES
) -> Shape:
    """The trees that serving grows with `options` (default: its own) and a budget of `nodes`."""
    # The head itself decides, for it has to fit its blocks into the slots of the budget.
    options = options or SpecBlockConfig()
    return SpecBlockHead(drafter, lambda tokens: tokens, options, nodes, max_model_len=1).shape


def chain_shape(drafter: SpecBlockDrafter, blocks: int) -> Shape:
    """One path of `blocks` blocks, each from the end of the one before."""
    block = drafter.config.block_size
    return Shape(block, blocks, 1, (1, 1, 1, 1), blocks * block)


def uniform_shape(shape: Shape) -> Shape:
    """Ablation: the same width at every position, and no position gives up.

    The least width, from 2 on, that hangs half as many candidates again as the budget: many are
    of equal text and join, and a tree that stays below the budget would be no fair comparison.
    The cut to the budget by score stays.
    """
    cells = shape.num_rows * shape.block_size
    width = max(2, -(-3 * shape.budget // (2 * cells)))
    return replace(shape, branching=(width,) * 4)
