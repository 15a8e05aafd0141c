"""Speculation counters per drafter, and draft time T_D [SpecBlock, §3], on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.count_step import Drafted, count_step_triton
from vllm_specblock.triton_kernels.feedback.device_clock import begin_span_triton, end_span_triton
from vllm_specblock.triton_kernels.op import op, views
from vllm_specblock.triton_kernels.optional_numba import njit
from vllm_specblock.triton_kernels.verify.verification_result import VerificationResult

Counts = dict[tuple[str, int], int]
"""(name, drafter) → count since the engine started; drafter 1 or 2, or 0 for what is of both."""

_KINDS = 3
"""Origins a node in use can have: 1 drafter 1, 2 drafter 2, 3 both."""

_OF_NODES = "verified_nodes", "accepted_nodes", "chosen_trees"
DRAFTING_NS, DRAFTING_STEPS = "drafting_nanoseconds", "drafting_steps"


class DraftClock:
    """Sums the time between `begin` and `end`, over all steps that ended one.

    On a GPU, kernels read the device clock, also in graphs; else wall clock.

    Args:
        total: [3] int64, nanoseconds, steps, and when the open span began.
    """

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self._began = total, 0

    def begin(self) -> None:
        if self.total.is_cuda:
            return begin_span_triton(self.total)
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        if self.total.is_cuda:
            return end_span_triton(self.total)
        self.total[0] += time.perf_counter_ns() - self._began
        self.total[1] += 1

    def take(self) -> list[int]:
        """Nanoseconds since the last call, and in how many steps; waits for the device."""
        sums = self.total[:2].tolist()  # a host read, not for a step
        self.total.zero_()
        return sums


class DrafterCounters:
    """Sums over all steps and requests, in one small tensor of the device.

    On a GPU, `publish` passes the sums of the previous step and copies the current ones.

    Args:
        sink: takes the counts of every `publish`; None: no metrics.
        source: returns further counts to publish.

    Attributes:
        total: int64, the sums that `count` adds to.
        clock: times drafting.
    """

    def __init__(
        self,
        num_drafters: int,
        device: torch.device | str,
        sink: Callable[[Counts], None] | None = None,
        source: Callable[[], Counts] = dict,
    ) -> None:
        self.num_drafters, self.sink, self.source = num_drafters, sink, source
        # Nodes by origin, as (verified, accepted, first of a tree); then what was drafted.
        size = 3 * _KINDS + 3 * num_drafters + 4
        self._all = self._host = torch.zeros(size + 3, dtype=torch.int64, device=device)
        self.total, self.clock = self._all[:size], DraftClock(self._all[size:])
        if self._all.is_cuda:
            self._host = torch.zeros(self._all.shape, dtype=torch.int64, pin_memory=True)

    def clear(self) -> None:
        self._all.zero_()

    def count(self, verified: VerifiedTrees, drafted: Drafted | None = None) -> None:
        """Count the trees that the target ran on in this step, and those drafted in it."""
        count_step(self.total, verified, drafted)

    def publish(self) -> None:
        """Pass the counts on the host, and those of `source`, to the sink."""
        if self.sink is None:
            return
        *sums, nanoseconds, steps, _ = self._host.tolist()  # a host tensor
        counts = tally(sums, self.num_drafters) | self.source()
        self.sink(counts | {(DRAFTING_NS, 0): nanoseconds, (DRAFTING_STEPS, 0): steps})
        if self._host is not self._all:
            self._host.copy_(self._all, non_blocking=True)

    def as_dict(self) -> Counts:
        """Return all counts; waits for the device."""
        return tally(self.total.tolist(), self.num_drafters)  # a host read, not for a step


@op(count_step_triton)
def count_step(
    total: torch.Tensor, result: VerificationResult, drafted: Drafted | None = None
) -> None:
    """See `DrafterCounters.count`; `total` is that of `DrafterCounters`."""
    nodes, split = (result.req_idx, result.num_run, result.path, result.origin), 3 * _KINDS
    sums, *given = views([total, *nodes])
    _count_nodes(sums, *given)
    if drafted is None:
        return
    live, second, agreed, *trees = views(drafted)
    live = live != 0
    sizes = [size * live for size in trees[::2] if size is not None]
    there = [size > 0 for size in sizes]
    second, agreed = (second[live] != 0, agreed[live] != 0) if trees[2] is not None else ((), ())
    betas = [live if beta is None else beta for beta in trees[1::2]]
    thousandths = [(beta * 1000 + 0.5).astype(int)[drew] for beta, drew in zip(betas, there)]
    both = np.logical_and.reduce(there)
    rows = *sizes, second, agreed, *there, both, live, *thousandths
    sums[split:] += [np.sum(row, dtype=int) for row in rows]


@njit
def _count_nodes(total: Any, req_idx: Any, num_run: Any, path: Any, origin: Any) -> None:
    for request in range(len(req_idx)):
        by = origin[req_idx[request]]
        run = min(num_run[request], len(by))
        for node in range(run):
            if by[node]:
                total[3 * by[node] - 3] += 1
                total[3 * by[node] - 1] += node == 0
        for node in path[request]:  # 0, the root, fills it beyond its end
            if 0 < node <= run and by[node - 1]:
                total[3 * by[node - 1] - 2] += 1


def tally(total: Sequence[int], num_drafters: int) -> Counts:
    """From the sums that `DrafterCounters` keeps to counts by name."""
    split = _KINDS * 3
    nodes = [total[start : start + 3] for start in range(0, split, 3)]
    size, beta = total[split : split + num_drafters], total[-num_drafters:]
    second, agreed, *trees, both, live = total[split + num_drafters : -num_drafters]
    counts: Counts = {}
    for at, drafter in enumerate(range(1, num_drafters + 1)):
        counts["drafted_trees", drafter] = trees[at]
        counts["drafted_nodes", drafter] = size[at]
        counts["calibration_thousandths", drafter] = beta[at]
        # Kind 3 is of both drafters and counts for both.
        for name, own, shared in zip(_OF_NODES, nodes[at], nodes[2]):
            counts[name, drafter] = own + shared
    counts["tree_nodes", 0] = sum(kind[0] for kind in nodes)
    if num_drafters == 2:
        counts["shared_nodes", 0], counts["shared_accepted_nodes", 0], _ = nodes[2]
        counts["both_drafted", 0] = both
        counts["agreed", 0] = agreed
        counts["second_skipped", 0] = live - second
    return counts
