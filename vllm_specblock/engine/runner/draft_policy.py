"""Draft policies: which drafters draft, and how their trees are combined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_specblock.combine.combined import Combined
from vllm_specblock.combine.merge import merge
from vllm_specblock.combine.route import confidence, route
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.cache_holes import CacheHoles
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.feedback.lazy_gate import LazyGate
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.feedback.lazy_gate import learn_gate_triton, most_want_triton


@dataclass(frozen=True)
class Proposal:
    """The trees of a step, and their origin.

    Attributes:
        combined: R trees of N slots, and which drafter each node is from.
        drafted: per drafter [R] int32, nodes of its own tree; 0 where it did not draft.
        second: [R] bool, the second drafter drafted; None with one drafter.
        agreed: [R] bool, both drafted and name the same first token; None with one drafter.
    """

    combined: Combined
    drafted: tuple[torch.Tensor, ...]
    second: torch.Tensor | None
    agreed: torch.Tensor | None


class DraftPolicy(ABC):
    """Runs the drafters of an engine, once per step.

    All drafters advance in every step, so that each can draft in the next one (routing paper, §7).
    `skipping_merge.py` is the exception.

    Attributes:
        wanted: [n] int64, requests of this step that get drafts; None: all.
        holes: of a policy that masks cache blocks itself; None: tables come masked.
        asked: a drafter with weights took part in the last proposal, or there is none.
    """

    drafters: list[Drafter]
    wanted: torch.Tensor | None = None
    holes: CacheHoles | None = None
    asked = True

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path of any tree."""
        return max(drafter.max_depth for drafter in self.drafters)

    def learn(self, verified: VerifiedTrees) -> None:
        """Learn from the verified trees."""
        for index, drafter in enumerate(self.drafters):
            if drafter.calibration is not None:
                drafter.calibration.learn_from(verified, index)

    def forget(self) -> None:
        """Reset everything learned."""
        for drafter in self.drafters:
            if drafter.calibration is not None:
                drafter.calibration.forget()

    def begin(self, req_idx: int) -> None:
        """Reset what was learned in slot `req_idx`."""
        for drafter in self.drafters:
            if drafter.calibration is not None:
                drafter.calibration.begin(req_idx)

    def advance(self, rows: CommittedTokens) -> None:
        """Advance all drafters over the committed rows."""
        for drafter in self.drafters:
            drafter.advance(rows)

    def draft(self, drafter: Drafter, rows: CommittedTokens) -> DraftTree:
        """Return the trees of one drafter, empty for requests without drafts."""
        if self.wanted is None:
            return drafter.draft()
        trees = DraftTree.empty(len(rows.last), drafter.num_nodes, rows.last.device)
        return trees.put(self.wanted, drafter.draft(self.wanted))

    @abstractmethod
    def combine(self, rows: CommittedTokens) -> Proposal:
        """Return one tree per request, after `advance`."""


class SingleDrafter(DraftPolicy):
    """A single drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafters = [drafter]

    def combine(self, rows: CommittedTokens) -> Proposal:
        tree = self.draft(self.drafters[0], rows)
        return Proposal(Combined.of(tree, drafter=1), (tree.size,), None, None)


class RoutedDrafters(DraftPolicy):
    """Both drafters draft; the more confident tree is verified (routing paper, §5)."""

    def __init__(
        self, drafters: list[Drafter], options: CombineConfig, device: torch.device
    ) -> None:
        self.drafters, self.how = drafters, options.confidence
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def combine(self, rows: CommittedTokens) -> Proposal:
        first, second = (self.draft(drafter, rows) for drafter in self.drafters)
        return self.choose(first, second, self.always.expand(len(first.size)))

    def choose(self, first: DraftTree, second: DraftTree, drafted: torch.Tensor) -> Proposal:
        """Return the more confident trees; `drafted` [R] bool: the second drafter ran.

        Its tree is empty where it did not.
        """
        combined, _, agreed = route(first, second, self.how)
        return Proposal(combined, (first.size, second.size), drafted, agreed)


class LazilyRoutedDrafters(RoutedDrafters):
    """Routed drafters, of which the second drafts only where the first is unsure.

    On a CPU it drafts for exactly those requests. On a GPU the host must not wait for a device
    value, so it drafts for all requests or none, by the majority of the last step with a result on
    the host. All requests explore in the same steps there, since a minority would be outvoted.

    Args:
        num_slots: request slots of the engine.
    """

    def __init__(
        self, drafters: list[Drafter], options: CombineConfig, num_slots: int, device: torch.device
    ) -> None:
        super().__init__(drafters, options, device)
        self.gate = LazyGate(device, options.confidence, drafters[1].usual_cost)
        self.looks = device.type == "cpu"
        self.most_want = torch.ones(1, dtype=torch.bool, pin_memory=not self.looks)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.never = torch.zeros(1, dtype=torch.bool, device=device)
        self.nothing = torch.zeros(1, dtype=torch.int32, device=device)
        # By request slot, for the tree under verification.
        self.sure = torch.zeros(num_slots, device=device)
        self.both = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def learn(self, verified: VerifiedTrees) -> None:
        super().learn(verified)
        if self.sure.is_cuda:
            learn_gate_triton(self.gate.state, self.sure, self.both, verified)
        else:
            req_idx = verified.req_idx
            self.gate.learn(
                self.sure[req_idx], self.both[req_idx], verified.accepted, verified.live
            )

    def combine(self, rows: CommittedTokens) -> Proposal:
        first = self.draft(self.drafters[0], rows)
        return self._of_some(rows, first) if self.looks else self._of_all_or_none(rows, first)

    def _of_some(self, rows: CommittedTokens, first: DraftTree) -> Proposal:
        """Run the second drafter for the requests that want it."""
        sure, drafter = confidence(first, self.how), self.drafters[1]
        wanted = self.gate.wants(sure, rows.position[rows.last])
        if self.wanted is not None:
            wanted &= torch.zeros_like(wanted).index_fill_(0, self.wanted, True)
        self.sure[rows.req_idx], self.both[rows.req_idx] = sure, wanted
        index = wanted.nonzero()[:, 0]  # a host tensor
        if len(index) == len(wanted):
            return self.choose(first, drafter.draft(), wanted)
        requests, nodes = first.token.shape
        second = DraftTree.empty(requests, nodes, wanted.device)
        if len(index):
            second = second.put(index, drafter.draft(index))
        return self.choose(first, second, wanted)

    def _of_all_or_none(self, rows: CommittedTokens, first: DraftTree) -> Proposal:
        """Run the second drafter if most requests wanted it, as far as the host knows."""
        asked = bool(self.most_want)  # a host tensor
        self.most_want.copy_(self._most_of(rows.req_idx, first, asked), non_blocking=True)
        count = len(first.size)
        if asked:
            return self.choose(first, self.drafters[1].draft(), self.always.expand(count))
        never = self.never.expand(count)
        sizes = first.size, self.nothing.expand(count)
        return Proposal(Combined.of(first, drafter=1), sizes, never, never)

    def _most_of(self, req_idx: torch.Tensor, first: DraftTree, asked: bool) -> torch.Tensor:
        """Return whether most requests want the second drafter, [1] bool; store `sure`."""
        if self.sure.is_cuda:
            return most_want_triton(
                self.gate.state,
                first.logprob,
                first.size,
                self.how == "mean",
                self.step,
                asked,
                req_idx,
                self.sure,
                self.both,
            )
        sure = confidence(first, self.how)
        self.step += 1
        self.sure[req_idx] = sure
        self.both.index_fill_(0, req_idx, asked)
        wanted = self.gate.wants(sure, self.step.expand(len(sure)))
        return 2 * wanted.sum(0, keepdim=True) >= len(sure)


class MergedDrafters(DraftPolicy):
    """Both drafters draft, and the union of their trees is verified at once (merged-tree paper)."""

    def __init__(
        self, drafters: list[Drafter], options: CombineConfig, num_nodes: int, device: torch.device
    ) -> None:
        self.drafters, self.how, self.num_nodes = drafters, options.merge, num_nodes
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def combine(self, rows: CommittedTokens) -> Proposal:
        return self.union(*(self.draft(drafter, rows) for drafter in self.drafters))

    def union(self, first: DraftTree, second: DraftTree) -> Proposal:
        """Both trees in one; both drafters have drafted."""
        combined, agreed = merge(first, second, self.how, self.num_nodes, self.max_depth)
        both = self.always.expand(len(first.size))
        return Proposal(combined, (first.size, second.size), both, agreed)
