"""The speculator's side of adaptive verification: what trees are worth, and who gets none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.combine.combined import Combined
from vllm_specblock.draft.backlog import Backlog
from vllm_specblock.draft.head import CommittedRows, Head
from vllm_specblock.engine import budget
from vllm_specblock.engine.slots import TreeSlots
from vllm_specblock.verify.reach import ReachTable
from vllm_specblock.verify.verified import Verified


class AdaptiveTrees:
    """Learns how likely nodes of a score are reached, and tells vLLM of every tree.

    Attributes (S request slots):
        switch: shared with the manager, which decides; host only.
        asleep: [S] bool, `switch.asleep` on the device.
        follow: some head has a cache, which has to follow the target.
        backlog: what such heads missed while they rested; only on a CPU.

    Args:
        heads: of the engine.
        confidence: [requests, N] fp32, where the runner looks for them after a proposal, by
            place in the batch.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        states: RequestState,
        slots: TreeSlots,
        confidence: torch.Tensor,
        device: torch.device,
    ):
        self.slots, self.confidence = slots, confidence
        num_slots, on_host = len(slots.accepted), device.type == "cpu"
        self.follow = any(head.cache_layers() for head in heads)
        self.backlog = Backlog() if self.follow and on_host else None
        wakes = on_host or not self.follow
        self.switch = budget.switch_of(states, num_slots, wakes)
        self.reach = ReachTable(device)
        self.asleep = torch.zeros(num_slots, dtype=torch.bool, device=device)
        if on_host:
            from vllm_specblock.engine import host_budget

            host_budget.install()
        else:
            budget.install()

    def add(self, slot: int) -> None:
        """A request comes to `slot`."""
        self.switch.asleep[slot] = False
        self.asleep[slot].fill_(False)
        if self.backlog is not None:
            self.backlog.forget(slot)

    def rests(self, batch: InputBatch) -> bool:
        """Whether nothing is to be drafted at the end of this step.

        The manager decides in decode steps. Where nobody decodes, what it said last was about
        requests that are gone.
        """
        if batch.is_prefilling_np[: batch.num_reqs].all():  # a host array
            self.switch.resting = False
        return self.switch.resting

    def learn(self, verified: Verified) -> None:
        """Take note of the verdicts."""
        self.reach.learn_from(verified)

    def offer(self, slot: torch.Tensor, temperature: torch.Tensor, combined: Combined) -> Combined:
        """Say what the new trees' nodes are worth.

        Args:
            slot: [R] integers.
            temperature: [R] fp32.
            combined: the new trees.

        Returns:
            These trees, but none for requests whose heads have slept.
        """
        return self.reach.offer(combined, temperature, slot, self.asleep, self.confidence)

    def catch_up(self, rows: CommittedRows) -> CommittedRows:
        """A step's rows, with those before them that the heads have rested in."""
        return rows if self.backlog is None else self.backlog.catch_up(rows)

    def sleep(self, batch: InputBatch, rows: Callable[[], CommittedRows]) -> None:
        """Nothing is drafted at the end of this step.

        Args:
            rows: gives what it has committed.
        """
        asleep, slot = self.switch.asleep, batch.idx_mapping_np
        if self.follow and not asleep[slot].all():  # a host array
            if self.backlog is None:
                asleep[slot] = True
                self.asleep.index_fill_(0, batch.idx_mapping, True)
            else:
                asleep[slot] = ~self.backlog.keep(rows(), ~asleep[slot])
                self.asleep.copy_(torch.from_numpy(asleep))  # a host tensor
        self.confidence[: batch.num_reqs] = 0
        # Whatever is scheduled next has no verdict.
        self.slots.accepted.index_fill_(0, batch.idx_mapping, 0)
