"""The speculator's side of adaptive verification: what trees are worth, and who gets none."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.combine.combined import Combined
from vllm_specblock.engine import budget
from vllm_specblock.engine.rows import StepRows
from vllm_specblock.engine.slots import TreeSlots
from vllm_specblock.verify.reach import ReachTable, on_path


class AdaptiveTrees:
    """Learns how likely nodes of a score are reached, and tells vLLM of every tree.

    Attributes (S request slots):
        switch: shared with the manager, which decides; host only.
        samples: [S] int64, 1 for requests that sample, see `ReachTable`.
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
        self.samples = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.asleep = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.node = torch.arange(slots.num_nodes, device=device)
        if device.type == "cpu":
            from vllm_specblock.engine import host_budget

            host_budget.install()
        else:
            budget.install()

    def add(self, slot: int, params: SamplingParams | None) -> None:
        """A request comes to `slot`."""
        sampling = params is not None and params.temperature > 0
        self.samples[slot].fill_(1 if sampling else 0)
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

    def learn(self, rows: StepRows, live: torch.Tensor) -> None:
        """Take note of the verdicts; `live` [R] bool: the target ran on a tree of ours."""
        slot = rows.batch.idx_mapping
        judged = live[:, None] & (self.node < rows.drafts[:, None])
        reached = on_path(rows.path, rows.accepted, self.slots.num_nodes)
        self.reach.learn(self.samples[slot], self.slots.score[slot], reached, judged)

    def awake(self, slot: torch.Tensor, combined: Combined) -> Combined:
        """No tree for requests whose heads have slept; `slot` [R] int64."""
        return combined.empty_where(self.asleep[slot])

    def offer(self, slot: torch.Tensor, combined: Combined) -> None:
        """Say what the new trees' nodes are worth."""
        steps = self.reach.steps(self.samples[slot], combined.tree.logprob)
        self.confidence[: len(slot)] = steps

    def sleep(self, batch: InputBatch) -> None:
        """Nothing is drafted at the end of this step."""
        self.switch.asleep[batch.idx_mapping_np] = True
        self.asleep.index_fill_(0, batch.idx_mapping, True)
        self.confidence[: batch.num_reqs] = 0
        # Whatever is scheduled next has no verdict.
        self.slots.accepted.index_fill_(0, batch.idx_mapping, 0)
