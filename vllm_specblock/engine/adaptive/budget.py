"""The controller in vLLM's adaptive verification: the verify budget of a step, and pauses.

vLLM's manager trims the scheduled drafts to a budget, ordered by the running product of their
confidences. Here that product is the probability of reaching a node
(`feedback/acceptance_estimator.py`). Nodes are in descending order, so any cut leaves a tree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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

from vllm_specblock.engine.compat import reallocated
from vllm_specblock.engine.patches import Function, patch
from vllm_specblock.engine.scheduler import UNDRAFTED
from vllm_specblock.feedback.acceptance_estimator import marked
from vllm_specblock.feedback.controller import Step
from vllm_specblock.feedback.step_cost import LOOKUP
from vllm_specblock.triton_kernels.verify.reallocate_drafts import reallocate_drafts

if TYPE_CHECKING:
    from vllm_specblock.engine.adaptive.trees import AdaptiveTrees

OURS = "adaptive_trees"
"""Attribute of the states of our engines: all that vLLM gives its manager are the states."""


class TreeBudgetManager(AdaptiveVerificationManager):
    """AdaptiveVerificationManager whose budgets and pauses are the controller's.

    It allocates drafts in one launch instead of vLLM's twenty or so, with the same result up to
    rounding and ties (`triton_kernels/verify/reallocate_drafts.py`).
    """

    _counts: np.ndarray | None = None
    """[2, R] int32, drafts and other tokens of each request, as last copied to the device."""
    _counts_there: torch.Tensor
    _batch_budget: Any
    """vLLM's: drafts and other tokens of each request, and the budget of the step."""
    _unknown = 1.0
    """Survival assumed until the measured one arrives, one step later on a GPU."""

    _begun: tuple[list[str], Step, Any] | None = None
    """The step under way: its requests, what is known of it, and the mark of its beginning."""

    def __init__(self, req_states: RequestState, *args: Any, **kwargs: Any) -> None:
        super().__init__(req_states, *args, **kwargs)
        self._timed: deque[tuple[Step, Any, Any, tuple[Any, Any] | None, bool]] = deque()
        self.trees: AdaptiveTrees = getattr(req_states, OURS)
        self.trees.decide = self.decide_without_drafts
        self.controller = self.trees.controller

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        state, requests = self.trees, list(num_tokens_per_req)
        index = self.req_states.req_id_to_index
        slots = np.array([index[request] for request in requests], dtype=np.int64)
        drafts = np.array([len(draft_tokens.get(request, ())) for request in requests])
        others = np.array(list(num_tokens_per_req.values())) - drafts
        rows, nodes = int(others.sum()), 0  # a host array
        computed, prompts = self.req_states.num_computed_prefill_tokens, self.req_states.prefill_len
        decodes = bool((computed[slots] >= prompts.np[slots]).all())  # a host array
        sampling = bool(state.samples[slots].mean() > 0.5)  # a host array
        now = state.clock.mark() if decodes else None
        self._observe(requests, now, sampling)
        trees = bool(draft_tokens) and not state.all_paused
        if trees:
            survival, later = self._survival(slots, drafts)
            room = self._max_total_logits - len(requests) * self.num_bonus_tokens
            most = max(0, min(int(drafts.sum()), room))  # a host array
            nodes = self.controller.budget(
                survival, len(requests), rows, most, sampling, self._padded, later
            )
        self._batch_budget = (
            dict(zip(requests, drafts.tolist())),  # a host array
            dict(zip(requests, others.tolist())),  # a host array
            nodes,
        )
        if decodes:
            behind = state.missed(slots)
            state.all_paused = not self.controller.drafts(len(requests), sampling, behind)
            drafts_now = not state.all_paused
            if drafts_now and state.later is not None:
                state.brief = self.controller.brief(len(requests), sampling)
            step = Step(len(requests), rows + nodes, trees, drafts_now, None, read=behind)
            self._begun = requests, step, now
        return rows + nodes

    def _survival(
        self, slots: np.ndarray, drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the survival of scheduled nodes, [R, N], 0 elsewhere; which are of later blocks.

        The second is None if there are none.
        """
        confidence = self._stale_confidences[self._stale_idx].np[slots]
        later = None if self.trees.later is None else marked(confidence)
        survival = confidence.astype(np.float64).cumprod(axis=1)
        # The confidences of a new request are 1 until it has drafts.
        survival[(confidence == 1).all(1)] = self._unknown
        survival[np.arange(survival.shape[1]) >= drafts[:, None]] = 0
        return survival, later

    def _observe(self, requests: list[str], now: Any, sampling: bool) -> None:
        """Learn from the steps that ended: times are taken from one decode step to the next.

        Args:
            now: mark of the clock; None: the next step reads prompts.
        """
        begun, self._begun = self._begun, None
        state = self.trees
        # Ranks have to decide alike, and each has times of its own.
        if begun is None or now is None or begun[0] != requests or _ranks() > 1:
            return
        _, step, start = begun
        accepted = state.accepted if step.rows > step.requests else 0
        step = step._replace(
            tokens=None if accepted is None else len(requests) + accepted,
            by=state.by,
            read=step.read + state.read if state.by != LOOKUP else 0,
        )
        self._timed.append((step, start, now, state.marks, sampling))
        while self._timed and state.clock.passed(self._timed[0][2]):
            step, start, end, drafted, sampled = self._timed.popleft()
            seconds = state.clock.seconds(start, end)
            drafting = state.clock.seconds(*drafted) if drafted else 0.0
            self.controller.observe(step._replace(seconds=seconds, draft_seconds=drafting), sampled)

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Return the padded number of rows for each batch size, [n]."""
        raise NotImplementedError

    def decide_without_drafts(self, batch: InputBatch) -> None:
        """Decide whether a pause ends: vLLM asks for a budget only if drafts are scheduled."""
        is_dummy = batch.req_ids[0] not in self.req_states.req_id_to_index
        if self.trees.all_paused and not is_dummy and not batch.is_prefilling_np.all():
            tokens = batch.num_scheduled_tokens[: batch.num_reqs].tolist()  # a host array
            self.get_num_tokens(dict(zip(batch.req_ids, tokens)), {})
            self._batch_budget = None

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
        reallocate_drafts(
            self._confidence_probs,
            idx_mapping,
            self._counts_there,
            budget,
            self.num_bonus_tokens,
            self._cu_num_logits,
            self.query_start_loc,
        )
        return reallocated(self._cu_num_logits[: len(req_ids) + 1], self.query_start_loc, budget)


class DeviceBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a GPU, whose first costs are those that vLLM profiles."""

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        self._sizes = np.array(capture_sizes)
        for brief in self.trees.lengths:
            self.trees.brief = brief
            yield from super().batches_to_profile(capture_sizes)
        self.trees.brief = False

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self._sizes, rows)
        return np.where(
            place < len(self._sizes), self._sizes[place.clip(max=len(self._sizes) - 1)], rows
        )

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Set the costs to begin with, and compile the kernel: warm-up requests do not reach it."""
        super().set_initial_cost_curves(samples)  # raises if there are none
        times: list[defaultdict[int, list[float]]] = [defaultdict(list) for _ in range(3)]
        whole = len(samples) // len(self.trees.lengths)
        for place, sample in enumerate(samples):
            times[0][sample.num_target_tokens].append(sample.forward_ms)
            if sample.full_cudagraph:
                times[1 if place < whole else 2][sample.num_reqs].append(sample.drafter_ms)
        costs = [{size: float(np.median(ms)) for size, ms in each.items()} for each in times]
        # All ranks must use the same costs.
        verify, draft, brief = get_tp_group().broadcast_object(costs, src=0)
        self.controller.cost.measured(verify, draft, brief, noisy=False)
        self._batch_budget = {"": 0}, {"": 1}, 0
        # int64, as in the runner.
        self.reallocate_drafts([""], self.query_start_loc.new_zeros(1, dtype=torch.int64))


def _ranks() -> int:
    return int(get_tp_group().world_size)


def install(kind: type[TreeBudgetManager] = DeviceBudgetManager) -> None:
    """Build `kind` instead of vLLM's manager for our engines. Idempotent.

    The runner's output also gets the requests without new drafts.
    """

    def make(original: Function) -> Function:
        def build(
            req_states: RequestState, *args: Any, **kwargs: Any
        ) -> AdaptiveVerificationManager:
            return (kind if hasattr(req_states, OURS) else original)(req_states, *args, **kwargs)

        return build

    patch(adaptive_verification, "AdaptiveVerificationManager", make)

    def naming_undrafted(original: Function) -> Function:
        def sample_tokens(self: Any, *args: Any) -> Any:
            step, state = self.execute_model_state, getattr(self.req_states, OURS, None)
            output = original(self, *args)
            if state is not None and output is not None:
                result = getattr(output, "model_runner_output", output)
                setattr(result, UNDRAFTED, state.undrafted(step.input_batch))
            return output

        return sample_tokens

    patch(model_runner.GPUModelRunner, "sample_tokens", naming_undrafted)
