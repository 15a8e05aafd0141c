"""Drafting along a text with the served drafters, over the cache of one request."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.config import DEFAULT_NODES, parse_drafter
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter, level_shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

Network = SpecBlockModel | Eagle3Model

PAGE = 16
"""Tokens of a cache block."""


class ServedDraft:
    """A `Draft` along one text: a served drafter in the steps of one request.

    Args:
        drafter: reads all states of the text.
        calibration: learns β of the logits from every step, as in serving; None: β is 1.
        temperature: at which the target wrote the text.
        slots: cache slots that later forwards borrow after the root; default: N.
    """

    def __init__(
        self,
        drafter: NetworkDrafter,
        sequence: EvalSequence,
        calibration: DraftCalibration | None = None,
        temperature: float = 0.0,
        slots: int | None = None,
    ) -> None:
        weight = next(drafter.model.parameters())
        device = weight.device
        self.drafter, self.tokens, self.calibration = drafter, sequence.tokens, calibration
        self.states = sequence.hidden.to(weight.dtype).chunk(len(drafter.layers), dim=-1)
        pages = -(-(len(sequence.tokens) + (slots or drafter.num_nodes)) // PAGE)
        drafter.max_model_len = pages * PAGE
        shapes = [
            (pages, PAGE * layer.entries_per_token, layer.num_kv_heads, 2 * layer.head_dim)
            for layer in drafter.cache_layers()
        ]
        drafter.bind([weight.new_zeros(shape).transpose(1, 2) for shape in shapes])
        self.table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        self.request = torch.zeros(1, dtype=torch.int64, device=device)
        self.temperature = torch.tensor([temperature], device=device)
        self.root = 0
        self.tree: DraftTree | None = None
        self.growth: Expansion | None = None
        if isinstance(drafter, SpecBlockDrafter):
            drafter.expand = self._expand
        if calibration is not None:
            calibration.begin(0)

    def _expand(self, shape: TreeShape, width: Tensor, num_requests: int) -> Expansion:
        self.growth = Expansion(shape, width, num_requests)
        return self.growth

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        """The tree (R = 1) whose root is the text's token number `root`."""
        if self.calibration is not None:
            self._learn(self.calibration, root)
        self.drafter.advance(self._rows(root))
        self.root, self.tree = root, self.drafter.draft()
        return self.tree

    def forwards(self) -> Tensor:
        """[N], which forward, 1 …, each node of the last tree comes from; 0: no node."""
        if self.growth is not None:
            return self.growth.blocks()[0]
        assert self.tree is not None
        return torch.where(self.tree.parent[0] >= 0, self.tree.depth[0], 0)  # its level's

    def _learn(self, calibration: DraftCalibration, root: int) -> None:
        """Learn how far the last tree has come, and set β."""
        if self.tree is not None:
            accepted = torch.tensor([root - self.root - 1], device=self.request.device)
            expected = self.tree.logprob.exp().sum(1)
            calibration.learn(self.temperature, expected, accepted, accepted >= 0, self.request)
        self.drafter.beta = calibration.of(self.temperature, self.request)

    def _rows(self, root: int) -> CommittedTokens:
        """The rows of the tokens since the last root, whose slots are their positions."""
        rows, count = torch.arange(self.root, root, device=self.request.device), root - self.root
        return CommittedTokens(
            states=self.states,
            source=rows,
            token=self.tokens[rows + 1],
            position=rows,
            index=rows,
            kv_slot=rows,
            row_start=torch.tensor([0, count], dtype=torch.int32, device=rows.device),
            row_start_host=[0, count],
            last=self.request + count - 1,
            block_table=self.table,
            block_size=PAGE,
            max_position=root - 1,
            text=self.tokens[None].int(),
            req_idx=self.request,
            temperature=self.temperature,
        )


def draft_trees(
    model: Network,
    sequence: EvalSequence,
    shape: TreeShape,
    calibration: DraftCalibration | None = None,
    temperature: float = 0.0,
) -> ServedDraft:
    """Draft trees of any shape along a text, see `ServedDraft`."""
    dtype = next(model.parameters()).dtype

    def embed(ids: Tensor) -> Tensor:
        return sequence.embed(ids).to(dtype)

    drafter: NetworkDrafter
    if isinstance(model, Eagle3Model):
        layers = tuple(range(sequence.hidden.shape[-1] // model.config.target_hidden_size))
        drafter = Eagle3Drafter(model, embed, Eagle3Config(), shape.budget, 1, layers=layers)
        drafter.max_depth = shape.num_blocks
    else:
        drafter = SpecBlockDrafter(model, embed, SpecBlockConfig(), shape.budget, 1)
    drafter.shape = shape
    return ServedDraft(drafter, sequence, calibration, temperature)


def serving_shape(
    model: Network,
    options: SpecBlockConfig | Eagle3Config | None = None,
    nodes: int = DEFAULT_NODES,
) -> TreeShape:
    """Return the trees that serving grows with `options` (default: its own) and `nodes`."""
    if isinstance(model, Eagle3Model):
        assert not isinstance(options, SpecBlockConfig)
        return level_shape(options or Eagle3Config(), nodes, nodes, model.config.draft_vocab_size)
    options = options or parse_drafter({}, "specblock", num_nodes=nodes)
    return SpecBlockDrafter(model, lambda tokens: tokens, options, nodes, max_model_len=1).shape


def chain_shape(model: SpecBlockModel, blocks: int) -> TreeShape:
    """One path of `blocks` blocks, each from the end of the one before."""
    block = model.config.block_size
    return TreeShape(block, blocks, 1, (1, 1, 1, 1), blocks * block)
