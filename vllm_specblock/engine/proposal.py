"""What the heads draft, combined into the trees that the target verifies next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_specblock.combine.combined import Combined
from vllm_specblock.combine.lazy import LazyGate
from vllm_specblock.combine.merge import merge
from vllm_specblock.combine.route import confidence, route
from vllm_specblock.config import CombineConfig
from vllm_specblock.draft.head import CommittedRows, Head
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.feedback.lazy_gate import learn_gate_triton, most_want_triton
from vllm_specblock.verify.verified import Verified

USUAL_COST = {"ngram": 0.02}
"""What drafting a second head of some kind adds to a step, as a share of its time, where it is
not the 0.15 of one with weights."""


@dataclass(frozen=True)
class Proposal:
    """The trees of a step, and how they came about.

    Attributes:
        combined: R trees of N slots, and which head each node is from.
        drafted: per head [R] int32, nodes of its own tree; 0 where it did not draft.
        second: [R] bool, the second head drafted; None with one head.
        agreed: [R] bool, both drafted and name the same first token; None with one head.
    """

    combined: Combined
    drafted: tuple[torch.Tensor, ...]
    second: torch.Tensor | None
    agreed: torch.Tensor | None


class Proposer(ABC):
    """Asks the heads of an engine for trees, once a step.

    Every head advances in every step, whoever drafts or is chosen: so they stay interchangeable
    (routing paper, §7). `skipping_merge.py` has what may lag behind instead.
    """

    heads: list[Head]

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path of any tree."""
        return max(head.max_depth for head in self.heads)

    def learn(self, verified: Verified) -> None:
        """Take note of what was accepted."""
        for index, head in enumerate(self.heads):
            if head.sharpness is not None:
                head.sharpness.learn_from(verified, index)

    def forget(self) -> None:
        """As if no request had been served yet."""
        for head in self.heads:
            if head.sharpness is not None:
                head.sharpness.forget()

    def begin(self, slot: int) -> None:
        """A request comes to `slot`; nothing learned of its last one holds."""
        for head in self.heads:
            if head.sharpness is not None:
                head.sharpness.begin(slot)

    def advance(self, rows: CommittedRows) -> None:
        """The heads take in what was committed; all of them, see above."""
        for head in self.heads:
            head.advance(rows)

    @abstractmethod
    def combine(self, rows: CommittedRows) -> Proposal:
        """One tree per request; the heads have advanced."""


class One(Proposer):
    """A single head: its tree is the tree."""

    def __init__(self, head: Head):
        self.heads = [head]

    def combine(self, rows: CommittedRows) -> Proposal:
        tree = self.heads[0].draft()
        return Proposal(Combined.of(tree, head=1), (tree.size,), None, None)


class Route(Proposer):
    """Both heads draft, the surer one's tree is verified (routing paper, §5)."""

    def __init__(self, heads: list[Head], options: CombineConfig, device: torch.device):
        self.heads, self.how = heads, options.confidence
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def combine(self, rows: CommittedRows) -> Proposal:
        first, second = (head.draft() for head in self.heads)
        return self.choose(first, second, self.always.expand(len(first.size)))

    def choose(self, first: DraftTree, second: DraftTree, drafted: torch.Tensor) -> Proposal:
        """The tree of the surer head; `drafted` [R] bool: the second head was asked at all.

        Where it was not, its tree is empty.
        """
        combined, _, agreed = route(first, second, self.how)
        return Proposal(combined, (first.size, second.size), drafted, agreed)


class LazyRoute(Route):
    """Differs from Route in that the second head drafts only where the first is not sure.

    On a device whose memory is the host's, it drafts for just those requests. Elsewhere nobody
    may wait for a device value: it drafts for all requests or for none, by what most of them
    wanted in the last step whose answer has come back. There all explore in the same steps, or
    those that do would be outvoted.

    Args:
        num_slots: request slots of the engine.
    """

    def __init__(
        self, heads: list[Head], options: CombineConfig, num_slots: int, device: torch.device
    ):
        super().__init__(heads, options, device)
        cost = options.second_head_cost
        if cost is None:
            cost = USUAL_COST.get(heads[1].kind, 0.15)
        self.gate = LazyGate(device, options.confidence, cost)
        self.looks = device.type == "cpu"
        self.most_want = torch.ones(1, dtype=torch.bool, pin_memory=not self.looks)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.never = torch.zeros(1, dtype=torch.bool, device=device)
        self.nothing = torch.zeros(1, dtype=torch.int32, device=device)
        # By request slot, of the tree under verification.
        self.sure = torch.zeros(num_slots, device=device)
        self.both = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def learn(self, verified: Verified) -> None:
        super().learn(verified)
        if self.sure.is_cuda:
            learn_gate_triton(self.gate.state, self.sure, self.both, verified)
        else:
            slot = verified.slot
            self.gate.learn(self.sure[slot], self.both[slot], verified.accepted, verified.live)

    def combine(self, rows: CommittedRows) -> Proposal:
        first = self.heads[0].draft()
        return self._of_some(rows, first) if self.looks else self._of_all_or_none(rows, first)

    def _of_some(self, rows: CommittedRows, first: DraftTree) -> Proposal:
        """The second head drafts for those that want it."""
        sure, head = confidence(first, self.how), self.heads[1]
        wanted = self.gate.wants(sure, rows.position[rows.last])
        self.sure[rows.text_row], self.both[rows.text_row] = sure, wanted
        index = wanted.nonzero()[:, 0]  # a host tensor
        if len(index) == len(wanted):
            return self.choose(first, head.draft(), wanted)
        second = DraftTree.empty(*first.token.shape, wanted.device)
        if len(index):
            second = second.put(index, head.draft(index))
        return self.choose(first, second, wanted)

    def _of_all_or_none(self, rows: CommittedRows, first: DraftTree) -> Proposal:
        """The second head drafts if most wanted it, when they were last heard of."""
        asked = bool(self.most_want)  # a host tensor
        self.most_want.copy_(self._most_of(rows.text_row, first, asked), non_blocking=True)
        count = len(first.size)
        if asked:
            return self.choose(first, self.heads[1].draft(), self.always.expand(count))
        never = self.never.expand(count)
        sizes = first.size, self.nothing.expand(count)
        return Proposal(Combined.of(first, head=1), sizes, never, never)

    def _most_of(self, slot: torch.Tensor, first: DraftTree, asked: bool) -> torch.Tensor:
        """[1] bool, whether most want the second head; keeps how sure the first one is."""
        if self.sure.is_cuda:
            return most_want_triton(
                self.gate.state, first.logprob, first.size, self.how == "mean", self.step, asked,
                slot, self.sure, self.both,
            )  # fmt: skip
        sure = confidence(first, self.how)
        self.step += 1
        self.sure[slot] = sure
        self.both.index_fill_(0, slot, asked)
        wanted = self.gate.wants(sure, self.step.expand(len(sure)))
        return 2 * wanted.sum(0, keepdim=True) >= len(sure)


class Merge(Proposer):
    """Both heads draft, and the union of their trees is verified at once (merged-tree paper)."""

    def __init__(
        self, heads: list[Head], options: CombineConfig, num_nodes: int, device: torch.device
    ):
        self.heads, self.how, self.num_nodes = heads, options.merge, num_nodes
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def combine(self, rows: CommittedRows) -> Proposal:
        return self.union(*(head.draft() for head in self.heads))

    def union(self, first: DraftTree, second: DraftTree) -> Proposal:
        """Both trees in one; both heads have drafted."""
        combined, agreed = merge(first, second, self.how, self.num_nodes, self.max_depth)
        both = self.always.expand(len(first.size))
        return Proposal(combined, (first.size, second.size), both, agreed)
