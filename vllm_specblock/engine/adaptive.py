"""The speculator's side of adaptive verification: what trees are worth, and who gets none."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.combine.combined import Combined
from vllm_specblock.engine import budget
from vllm_specblock.engine.slots import TreeSlots
from vllm_specblock.verify.reach import ReachTable
from vllm_specblock.verify.verified import Verified


class AdaptiveTrees:
    """Learns how likely nodes of a score are reached, and tells vLLM of every tree.

    Attributes (S request slots):
        switch: shared with the manager, which decides; host only.
        asleep: [S] bool, `switch.asleep` on the device.

    Args:
        confidence: [requests, N] fp32, where the runner looks for them after a proposal, by
            place in the batch.
    """

    def __init__(
        self, states: RequestState, slots: TreeSlots, confidence: torch.Tensor, device: torch.device
    ):
        self.slots, self.confidence = slots, confidence
        num_slots = len(slots.accepted)
        self.switch = budget.switch_of(states, num_slots)
        self.reach = ReachTable(device)
        self.asleep = torch.zeros(num_slots, dtype=torch.bool, device=device)
        if device.type == "cpu":
            from vllm_specblock.engine import host_budget

            host_budget.install()
        else:
            budget.install()

    def add(self, slot: int) -> None:
        """A request comes to `slot`."""
        self.switch.asleep[slot] = False
        self.asleep[slot].fill_(False)

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

    def sleep(self, batch: InputBatch) -> None:
        """Nothing is drafted at the end of this step."""
        asleep, slot = self.switch.asleep, batch.idx_mapping_np
        if not asleep[slot].all():  # a host array
            asleep[slot] = True
            self.asleep.index_fill_(0, batch.idx_mapping, True)
        self.confidence[: batch.num_reqs] = 0
        # Whatever is scheduled next has no verdict.
        self.slots.accepted.index_fill_(0, batch.idx_mapping, 0)
