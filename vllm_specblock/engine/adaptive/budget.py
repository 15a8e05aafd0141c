"""vLLM's adaptive verification for trees: the verify budget of a step, and pauses of drafting.

vLLM picks the number of drafts that maximises expected tokens per second, ordered by the running
product of their confidences. Here that product is the probability of reaching a node
(`feedback/acceptance_estimator.py`). Nodes are in descending order, so any cut leaves a tree.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.engine.patches import Function, patch
from vllm_specblock.engine.releases import reallocated
from vllm_specblock.engine.scheduler import UNDRAFTED
from vllm_specblock.feedback.drafting_switch import DraftingSwitch
from vllm_specblock.feedback.step_cost import cost_per_request
from vllm_specblock.triton_kernels.verify.reallocate_drafts import reallocate_drafts_triton


class DraftingState:
    """State that the manager and the speculator share, on the host.

    Attributes:
        all_paused: drafting is paused at the end of this step.
        paused: [request slots] bool, requests without drafts: they declined them, or their
            drafters missed rows during a pause and cannot catch up.
        samples: [request slots] bool, requests at T > 0.
        can_resume: drafters can catch up after a pause.
        draft_seconds: host time of the last proposal, used on a CPU only.
        accepted: draft tokens accepted in the last step, on a CPU only.
        missed: request slot → committed rows that its drafters have yet to read.
        decide: called with the batch of a step without scheduled drafts.
    """

    def __init__(self, num_slots: int, can_resume: bool) -> None:
        self.all_paused, self.can_resume = False, can_resume
        self.paused, self.samples = np.zeros((2, num_slots), dtype=bool)
        self.draft_seconds, self.accepted = 0.0, 0
        self.missed: Callable[[int], int] = lambda slot: 0
        self.decide: Callable[[InputBatch], None] = lambda batch: None

    def undrafted(self, batch: InputBatch) -> frozenset[str]:
        """Return the requests of a batch without new drafts."""
        if self.all_paused:
            return frozenset(batch.req_ids)
        paused = self.paused[batch.idx_mapping_np]
        return frozenset(request for request, is_paused in zip(batch.req_ids, paused) if is_paused)


_SWITCHES: weakref.WeakKeyDictionary[RequestState, DraftingState] = weakref.WeakKeyDictionary()


def drafting_state_of(states: RequestState, num_slots: int, can_resume: bool) -> DraftingState:
    """Return the state of the engine that owns `states`; the manager finds it by the same key."""
    return _SWITCHES.setdefault(states, DraftingState(num_slots, can_resume))


class TreeBudgetManager(AdaptiveVerificationManager):
    """AdaptiveVerificationManager that can also pause drafting.

    It compares the best budget with plain decoding, and pauses drafting where that is faster. It
    allocates drafts in one launch instead of vLLM's twenty or so, with the same result up to
    rounding and ties (`triton_kernels/verify/reallocate_drafts.py`).
    """

    _counts: np.ndarray | None = None
    """[2, R] int32, drafts and other tokens of each request, as last copied to the device."""
    _counts_there: torch.Tensor
    _batch_budget: Any
    """vLLM's: drafts and other tokens of each request, and the budget of the step."""

    def __init__(self, req_states: RequestState, *args: Any, **kwargs: Any) -> None:
        super().__init__(req_states, *args, **kwargs)
        self.drafting_state = _SWITCHES[req_states]
        self.drafting_state.decide = self.decide_without_drafts
        self.drafting_switch = DraftingSwitch(
            self.num_speculative_steps, self.drafting_state.can_resume
        )

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        if self.drafting_state.all_paused:  # no trees, even if drafts were scheduled
            drafts = {req: len(draft_tokens.get(req, ())) for req in num_tokens_per_req}
            others = {req: count - drafts[req] for req, count in num_tokens_per_req.items()}
            self._batch_budget = drafts, others, 0
        else:
            super().get_num_tokens(num_tokens_per_req, draft_tokens)
        _, others, budget = self._batch_budget
        self._decide(list(num_tokens_per_req))
        return sum(others.values()) + budget

    def decide_without_drafts(self, batch: InputBatch) -> None:
        """Decide whether a pause ends: vLLM asks for a budget only if drafts are scheduled."""
        is_dummy = batch.req_ids[0] not in self.req_states.req_id_to_index
        if self.drafting_state.all_paused and not is_dummy and not batch.is_prefilling_np.all():
            tokens = batch.num_scheduled_tokens[: batch.num_reqs].tolist()  # a host array
            self.get_num_tokens(dict(zip(batch.req_ids, tokens)), {})
            self._batch_budget = None

    def _decoding(self, requests: list[str]) -> np.ndarray:
        """Return the slots of requests that decode in this step."""
        states, index = self.req_states, self.req_states.req_id_to_index
        slots = np.array([index[request] for request in requests], dtype=np.int64)
        return slots[states.num_computed_prefill_tokens[slots] >= states.prefill_len.np[slots]]

    def _decide(self, requests: list[str]) -> None:
        """Decide whether to draft at the end of this step."""
        slots = self._decoding(requests)
        if not self.drafting_state.all_paused:
            confidence = self._stale_confidences[self._stale_idx].np[slots]
            # The confidences of a new request are 1 until it has drafts.
            drafted = (confidence < 1).any(1) & ~self.drafting_state.paused[slots]
            self.drafting_switch.learn(confidence[drafted].astype(np.float64).cumprod(1))
        draft_cost, verify_cost = self.cost_tables
        index = self.req_states.req_id_to_index
        paused = self.drafting_state.paused[[index[request] for request in requests]]
        self.drafting_state.all_paused = self.drafting_switch.decide(
            len(requests),
            draft_cost[len(requests)],
            verify_cost,
            self._gain(len(requests)),
            self._catch_up(slots),
            self.drafting_state.all_paused or len(slots) < len(requests),
            int((~paused).sum()),  # a host array
        )

    def _gain(self, requests: int) -> float | None:
        """Return measured speed with drafts over speed without; None: unknown."""
        return None

    def _catch_up(self, slots: np.ndarray) -> float:
        """Return the time drafters need to read the rows they missed; 0: unknown."""
        return 0.0

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        (drafts, others, budget), self._batch_budget = self._batch_budget, None
        counts = np.array(
            [[drafts[request] for request in req_ids], [others[request] for request in req_ids]],
            dtype=np.int32,
        )
        # Counts change only when the batch does.
        if self._counts is None or not np.array_equal(counts, self._counts):
            self._counts = counts
            self._counts_there = async_tensor_h2d(counts, device=idx_mapping.device)
        self._reallocate(
            self._confidence_probs,
            idx_mapping,
            self._counts_there,
            budget,
            self.num_bonus_tokens,
            self._cu_num_logits,
            self.query_start_loc,
        )
        return reallocated(self._cu_num_logits[: len(req_ids) + 1], self.query_start_loc, budget)

    def _reallocate(self, *args: Any) -> None:
        """Run `reallocate_drafts_triton`, or its CPU form."""
        reallocate_drafts_triton(*args)


class DeviceBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a GPU; it prices steps as trees.

    vLLM profiles steps of single-token requests, each with its own context. The nodes of a tree
    share one, so this also profiles steps of whole trees. The difference is the cost of a request.
    """

    _profiled: tuple[np.ndarray, np.ndarray] | None = None
    """Draft cost by number of requests; verify cost by tokens, less the cost of requests."""
    _per_request = 0.0  # ms

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """Add steps of whole trees at each size that vLLM profiles."""
        each = self.num_speculative_steps + 1
        for batch in super().batches_to_profile(capture_sizes):
            yield batch
            trees, rest = divmod(batch["num_tokens"], each)
            if not rest and trees <= self.req_states.max_num_reqs:
                yield {**batch, "uniform_decode": True}

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Set the costs, and compile the kernel: vLLM's warm-up requests do not reach it."""
        each = self.num_speculative_steps + 1
        trees = [s for s in samples if s.num_reqs * each == s.num_target_tokens]
        alone = [s for s in samples if s.num_reqs * each != s.num_target_tokens]
        # All ranks must use the same price.
        self._per_request = get_tp_group().broadcast_object(
            cost_per_request(_medians(alone), _medians(trees)), src=0
        )
        super().set_initial_cost_curves(
            [replace(s, forward_ms=s.forward_ms - self._per_request * s.num_reqs) for s in alone]
        )
        self._profiled = self.cost_tables
        self._batch_budget = {"": 0}, {"": 1}, 0
        # int64, as in the runner.
        self.reallocate_drafts([""], self.query_start_loc.new_zeros(1, dtype=torch.int64))

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        if self._profiled is not None:
            drafting, verifying = self._profiled
            self.cost_tables = drafting, verifying + self._per_request * len(num_tokens_per_req)
        return super().get_num_tokens(num_tokens_per_req, draft_tokens)


def _medians(samples: list[StepTimingSample]) -> dict[int, tuple[float, int]]:
    """Return tokens → (median ms over replays, requests)."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    requests: dict[int, int] = {}
    for sample in samples:
        times[sample.num_target_tokens].append(sample.forward_ms)
        requests[sample.num_target_tokens] = sample.num_reqs
    return {tokens: (float(np.median(ms)), requests[tokens]) for tokens, ms in times.items()}


def install(kind: type[TreeBudgetManager] = DeviceBudgetManager) -> None:
    """Build `kind` instead of vLLM's manager for our engines. Idempotent.

    The runner's output also gets the requests without new drafts.
    """

    def make(original: Function) -> Function:
        def build(
            req_states: RequestState, *args: Any, **kwargs: Any
        ) -> AdaptiveVerificationManager:
            ours = req_states in _SWITCHES
            return (kind if ours else original)(req_states, *args, **kwargs)

        return build

    patch(adaptive_verification, "AdaptiveVerificationManager", make)

    def naming_undrafted(original: Function) -> Function:
        def sample_tokens(self: Any, *args: Any) -> Any:
            step, state = self.execute_model_state, _SWITCHES.get(self.req_states)
            output = original(self, *args)
            if state is not None and output is not None:
                result = getattr(output, "model_runner_output", output)
                setattr(result, UNDRAFTED, state.undrafted(step.input_batch))
            return output

        return sample_tokens

    patch(model_runner.GPUModelRunner, "sample_tokens", naming_undrafted)
