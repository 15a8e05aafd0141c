"""vLLM's adaptive verification over trees: the verify budget of a step, and whether to draft.

vLLM gives a batch's drafts to whoever gains most by them, and takes as many as maximise expected
tokens per second. It orders drafts by the running product of their confidences, which for a chain
is the probability to survive, and for us is that of reaching a node
(`feedback/acceptance_estimator.py`): nodes stand in descending order, so what it keeps of a tree is
a tree.
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
    """What the manager tells the speculator; both live on the host, in one process.

    Attributes:
        all_paused: the drafters do not draft at the end of this step.
        paused: [request slots] bool, requests for which they rested without being able to catch
            up: their drafters' caches have holes, and nothing is drafted for them any more.
        samples: [request slots] bool, requests at T > 0.
        can_resume: whether some can.
        draft_seconds: host time of the last proposal; of use where the host is the device, as
        accepted: draft tokens that the last step has accepted.
        missed: request slot → committed rows that its drafters have missed and can catch up with.
        decide: called in a step that has no drafts scheduled, with its batch.
    """

    def __init__(self, num_slots: int, can_resume: bool) -> None:
        self.all_paused, self.can_resume = False, can_resume
        self.paused, self.samples = np.zeros((2, num_slots), dtype=bool)
        self.draft_seconds, self.accepted = 0.0, 0
        self.missed: Callable[[int], int] = lambda slot: 0
        self.decide: Callable[[InputBatch], None] = lambda batch: None

    def undrafted(self, batch: InputBatch) -> frozenset[str]:
        """Requests of a batch for which nothing was drafted at its end."""
        if self.all_paused:
            return frozenset(batch.req_ids)
        paused = self.paused[batch.idx_mapping_np]
        return frozenset(request for request, is_paused in zip(batch.req_ids, paused) if is_paused)


_SWITCHES: weakref.WeakKeyDictionary[RequestState, DraftingState] = weakref.WeakKeyDictionary()


def drafting_state_of(states: RequestState, num_slots: int, can_resume: bool) -> DraftingState:
    """Make the switch of an engine, known to the manager by the engine's request states."""
    return _SWITCHES.setdefault(states, DraftingState(num_slots, can_resume))


class TreeBudgetManager(AdaptiveVerificationManager):
    """AdaptiveVerificationManager that can also do without drafting.

    Differs in two things. It compares the best budget with plain decoding, of which drafting is no
    part: where that is quicker, drafting is paused. And one launch, or loop, and a copy where the
    batch is not that of the step before, does what takes vLLM some twenty. Who gets a draft is as
    vLLM has it, up to the rounding of survivals: `triton_kernels/verify/reallocate_drafts.py` says
    how, and who wins ties.
    """

    _counts: np.ndarray | None = None
    """[2, R] int32, every request's drafts and its other tokens, as they lie on the device."""
    _counts_there: torch.Tensor
    _batch_budget: Any
    """vLLM's: what each request has of drafts and of other tokens, and the budget of a step."""

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
        if self.drafting_state.all_paused:  # there are no trees, whatever was scheduled
            drafts = {req: len(draft_tokens.get(req, ())) for req in num_tokens_per_req}
            others = {req: count - drafts[req] for req, count in num_tokens_per_req.items()}
            self._batch_budget = drafts, others, 0
        else:
            super().get_num_tokens(num_tokens_per_req, draft_tokens)
        _, others, budget = self._batch_budget
        self._decide(list(num_tokens_per_req))
        return sum(others.values()) + budget

    def decide_without_drafts(self, batch: InputBatch) -> None:
        """Decide whether a pause ends: vLLM asks for a budget only where drafts are scheduled."""
        is_dummy = batch.req_ids[0] not in self.req_states.req_id_to_index
        if self.drafting_state.all_paused and not is_dummy and not batch.is_prefilling_np.all():
            tokens = batch.num_scheduled_tokens[: batch.num_reqs].tolist()  # a host array
            self.get_num_tokens(dict(zip(batch.req_ids, tokens)), {})
            self._batch_budget = None

    def _decoding(self, requests: list[str]) -> np.ndarray:
        """Slots of the requests whose prompts were finished before this step."""
        states, index = self.req_states, self.req_states.req_id_to_index
        slots = np.array([index[request] for request in requests], dtype=np.int64)
        return slots[states.num_computed_prefill_tokens[slots] >= states.prefill_len.np[slots]]

    def _decide(self, requests: list[str]) -> None:
        """Whether the proposal at the end of this step takes place."""
        slots = self._decoding(requests)
        if not self.drafting_state.all_paused:
            confidence = self._stale_confidences[self._stale_idx].np[slots]
            # New requests stand at 1 until something is drafted for them.
            drafted = (confidence < 1).any(1) & ~self.drafting_state.paused[slots]
            self.drafting_switch.learn(confidence[drafted].astype(np.float64).cumprod(1))
        draft_cost, verify_cost = self.cost_tables
        self.drafting_state.all_paused = self.drafting_switch.decide(
            len(requests),
            draft_cost[len(requests)],
            verify_cost,
            self._gain(len(requests)),
            self._catch_up(slots),
            self.drafting_state.all_paused or len(slots) < len(requests),
        )

    def _gain(self, requests: int) -> float | None:
        """Measured speed with drafts over that without; None: not known."""
        return None

    def _catch_up(self, slots: np.ndarray) -> float:
        """Time that drafters would take to read what these requests' have missed; 0: not known."""
        return 0.0

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        (drafts, others, budget), self._batch_budget = self._batch_budget, None
        counts = np.array(
            [[drafts[request] for request in req_ids], [others[request] for request in req_ids]],
            dtype=np.int32,
        )
        # Requests that go on decoding count the same in every step.
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
        """`reallocate_drafts_triton`, or what does the same here."""
        reallocate_drafts_triton(*args)


class DeviceBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a device with memory of its own.

    Differs in that steps are priced as trees. vLLM profiles steps in which every token is a request
    with a context of its own; a tree's nodes share one, so steps of whole trees are profiled, too,
    and the difference is what a request costs.
    """

    _profiled: tuple[np.ndarray, np.ndarray] | None = None
    """Drafting by requests, verification by tokens without what their requests cost."""
    _per_request = 0.0  # ms

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """Also steps of whole trees, of the sizes that steps of single tokens are profiled with."""
        each = self.num_speculative_steps + 1
        for batch in super().batches_to_profile(capture_sizes):
            yield batch
            if batch["num_tokens"] % each == 0:
                yield {**batch, "uniform_decode": True}

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Also compiles, which vLLM's requests for warming up do not: they have no manager."""
        each = self.num_speculative_steps + 1
        trees = [s for s in samples if s.num_reqs * each == s.num_target_tokens]
        alone = [s for s in samples if s.num_reqs * each != s.num_target_tokens]
        # Every rank has to price alike.
        self._per_request = get_tp_group().broadcast_object(
            cost_per_request(_medians(alone), _medians(trees)), src=0
        )
        super().set_initial_cost_curves(
            [replace(s, forward_ms=s.forward_ms - self._per_request * s.num_reqs) for s in alone]
        )
        self._profiled = self.cost_tables
        self._batch_budget = {"": 0}, {"": 1}, 0
        # Of the dtype that the runner's have.
        self.reallocate_drafts([""], self.query_start_loc.new_zeros(1, dtype=torch.int64))

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        if self._profiled is not None:
            drafting, verifying = self._profiled
            self.cost_tables = drafting, verifying + self._per_request * len(num_tokens_per_req)
        return super().get_num_tokens(num_tokens_per_req, draft_tokens)


def _medians(samples: list[StepTimingSample]) -> dict[int, tuple[float, int]]:
    """Tokens → (ms, requests): medians over the replays of a step."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    requests: dict[int, int] = {}
    for sample in samples:
        times[sample.num_target_tokens].append(sample.forward_ms)
        requests[sample.num_target_tokens] = sample.num_reqs
    return {tokens: (float(np.median(ms)), requests[tokens]) for tokens, ms in times.items()}


def install(kind: type[TreeBudgetManager] = DeviceBudgetManager) -> None:
    """P4: the runner builds vLLM's manager by its name; engines of ours get `kind`. Idempotent.

    Their runner's output names the requests for which nothing was drafted.
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
