"""Per-drafter speculation counters, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees

Counts = dict[tuple[str, int], int]
"""(name, drafter) → count since the engine started; drafter 1 or 2, or 0 for what is of both."""

_KINDS = 3
"""Origins a node in use can have: 1 drafter 1, 2 drafter 2, 3 both."""


class DrafterCounters:
    """Sums over all steps and requests, in one small tensor of the device.

    On a GPU, `publish` passes the sums of the previous step and copies the current ones.

    Args:
        num_drafters: 1 or 2.
        num_nodes: N, slots of a verified tree.
        max_depth: D, the deepest path.
        sink: takes the counts of every `publish`; None: no metrics.

    Attributes:
        sources: return further counts to publish.
    """

    def __init__(
        self,
        num_drafters: int,
        num_nodes: int,
        max_depth: int,
        device: torch.device | str,
        sink: Callable[[Counts], None] | None = None,
    ) -> None:
        self.num_drafters, self.sink = num_drafters, sink
        self.sources: list[Callable[[], Counts]] = []
        # Nodes by origin, as (verified, accepted, first of a tree); then what `drafted` adds.
        split = _KINDS * 3
        self.total = torch.zeros(split + 3 * num_drafters + 4, dtype=torch.int64, device=device)
        self._nodes = self.total[:split].view(_KINDS, 3)
        self._drafts = self.total[split:]
        self._kinds = torch.arange(1, _KINDS + 1, dtype=torch.uint8, device=device)[:, None, None]
        self._node = torch.arange(num_nodes + 1, device=device)
        self._column = torch.tensor(
            [0] * (num_nodes + 1) + [1] * (max_depth + 1) + [2], device=device
        )
        self._host = self.total
        if self.total.is_cuda:
            self._host = torch.zeros(self.total.shape, dtype=torch.int64, pin_memory=True)

    def verified(self, verified: VerifiedTrees) -> None:
        """Count the trees that the target ran on in this step."""
        # The root has origin 0, and so has padding after the end of the path.
        run = self._node <= verified.num_run[:, None]
        seen = torch.nn.functional.pad(verified.authors, (1, 0)) * run
        kinds = torch.cat([seen, seen.gather(1, verified.path), seen[:, 1:2]], dim=1)
        self._nodes.index_add_(1, self._column, (kinds == self._kinds).sum(1))

    def drafted(
        self,
        sizes: Sequence[torch.Tensor],
        second: torch.Tensor | None,
        agreed: torch.Tensor | None,
        live: torch.Tensor,
        betas: Sequence[torch.Tensor | None],
    ) -> None:
        """Count the trees that the drafters drafted in this step.

        Args:
            sizes: per drafter [R] int32, nodes of its own tree; 0 where it has none.
            second: [R] bool, the second drafter was asked; None: there is none.
            agreed: [R] bool, both drafters' trees begin with the same token; None likewise.
            live: [R] bool; the other requests are left out (mid-prompt, padding).
            betas: per drafter [R] fp32, β that its tree was grown with; None: 1.
        """
        if second is None or agreed is None:
            second = agreed = torch.zeros_like(live)
        table = torch.stack([*sizes, second.int(), agreed.int()]) * live
        trees = table[: self.num_drafters] > 0
        sharp = [torch.ones_like(live, dtype=torch.float32) if x is None else x for x in betas]
        thousandths = (torch.stack(sharp) * 1000 + 0.5).long() * trees
        rows = [table, trees, trees.all(0, keepdim=True), live[None], thousandths]
        self._drafts += torch.cat(rows).sum(1)

    def publish(self) -> None:
        """Pass the counts on the host, and those of `sources`, to the sink."""
        if self.sink is None:
            return
        counts = tally(self._host.tolist(), self.num_drafters)  # a host tensor
        for source in self.sources:
            counts |= source()
        self.sink(counts)
        if self._host is not self.total:
            self._host.copy_(self.total, non_blocking=True)

    def as_dict(self) -> dict[str, int]:
        """All counts by name, with "_1" or "_2" for a drafter's; waits for the device."""
        counts = tally(self.total.tolist(), self.num_drafters)  # a host read, not for a step
        return {
            f"{name}_{drafter}" if drafter else name: n for (name, drafter), n in counts.items()
        }


def tally(total: Sequence[int], num_drafters: int) -> Counts:
    """From the sums that `DrafterCounters` keeps to counts by name."""
    split = _KINDS * 3
    nodes = [total[start : start + 3] for start in range(0, split, 3)]
    size, beta = total[split : split + num_drafters], total[-num_drafters:]
    rest = total[split + num_drafters : -num_drafters]
    second, agreed, *trees, both, live = rest
    counts: Counts = {}
    for drafter in range(1, num_drafters + 1):
        counts["drafted_trees", drafter] = trees[drafter - 1]
        counts["drafted_nodes", drafter] = size[drafter - 1]
        counts["calibration_thousandths", drafter] = beta[drafter - 1]
        # Kind 3 is of both drafters and counts for both.
        verified, accepted, first = (a + b for a, b in zip(nodes[drafter - 1], nodes[2]))
        counts["chosen_trees", drafter] = first
        counts["verified_nodes", drafter] = verified
        counts["accepted_nodes", drafter] = accepted
    counts["tree_nodes", 0] = sum(kind[0] for kind in nodes)
    if num_drafters == 2:
        counts["shared_nodes", 0], counts["shared_accepted_nodes", 0], _ = nodes[2]
        counts["both_drafted", 0] = both
        counts["agreed", 0] = agreed
        counts["second_skipped", 0] = live - second
    return counts
