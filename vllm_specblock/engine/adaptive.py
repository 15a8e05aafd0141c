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
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.engine.scheduler import UNDRAFTED
from vllm_specblock.feedback.acceptance_estimator import AcceptanceEstimator, marked
from vllm_specblock.feedback.controller import Step
from vllm_specblock.feedback.step_cost import BRIEF, LOOKUP, WHOLE
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import Later
from vllm_specblock.triton_kernels.verify.reallocate_drafts import reallocate_drafts

if TYPE_CHECKING:
    from vllm_specblock.engine.runner.speculator import TreeSpeculator

OURS = "tree_speculator"
"""Attribute of a RequestState that holds our speculator: vLLM gives its manager only the state."""


class TreeBudgetManager(AdaptiveVerificationManager):
    """AdaptiveVerificationManager whose budgets and pauses come from the controller.

    It allocates drafts in one launch instead of vLLM's twenty or so, with the same result up to
    rounding and ties (`triton_kernels/verify/reallocate_drafts.py`).

    Attributes (S request slots):
        all_paused: drafting is paused at the end of this step.
        undrafted: [S] bool, requests that decline drafts; samples: those at T > 0.
        clock: times the steps; marks: begin and end of the last proposal.
        accepted: draft tokens accepted in the last step; None on a GPU.
        brief: drafters draft their first block only; lengths: possible values of `brief`.
        by: LOOKUP, BRIEF or WHOLE, the last proposal.
    """

    _counts: np.ndarray | None = None
    """[2, R] int32, drafts and other tokens of each request, as last copied to the device."""
    _counts_there: torch.Tensor
    _batch_budget: Any
    """vLLM's: drafts and other tokens of each request, and the budget of the step."""
    _unknown = 1.0
    """Survival assumed until the measured one arrives, one step later on a GPU."""
    _begun: tuple[list[str], Step, Any] | None = None
    """The current step: its requests, its measurements, and the mark of its beginning."""

    marks: tuple[Any, Any] | None = None
    accepted: int | None = None
    by, brief = WHOLE, False

    def __init__(self, req_states: RequestState, *args: Any, **kwargs: Any) -> None:
        super().__init__(req_states, *args, **kwargs)
        self._timed: deque[tuple[Step, Any, Any, tuple[Any, Any] | None, bool]] = deque()
        speculator: TreeSpeculator = getattr(req_states, OURS)
        parts, self.skipped = speculator.parts, speculator.skipped
        self.on_host, self.clock = parts.on_host, parts
        self.all_paused = False
        self.controller, states = speculator.controller, speculator.tree_states
        # [requests, N] fp32, in batch order.
        self.confidence = speculator.draft_token_confidence_probs
        self.resumes = self.on_host or not self.skipped.has_caches
        self.acceptance = AcceptanceEstimator(speculator.device)
        self.undrafted, self.samples = speculator.undrafted, speculator.samples
        # The controller decides whether drafters draft all of their blocks.
        drafters = speculator.draft_policy.drafters
        first = max(drafter.first_block for drafter in drafters)
        others = sum(1 << at for at, each in enumerate(drafters) if not each.first_block)
        self.lengths = [False, True] if first else [False]
        self.later = Later(states.depth, states.origin, first, others) if first else None

    # ---- before a step: its budget ----

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        requests = list(num_tokens_per_req)
        index = self.req_states.req_id_to_index
        slots = np.array([index[request] for request in requests], dtype=np.int64)
        drafts = np.array([len(draft_tokens.get(request, ())) for request in requests])
        others = np.array(list(num_tokens_per_req.values())) - drafts
        rows, nodes = int(others.sum()), 0  # a host array
        computed, prompts = self.req_states.num_computed_prefill_tokens, self.req_states.prefill_len
        decodes = bool((computed[slots] >= prompts.np[slots]).all())  # a host array
        sampling = bool(self.samples[slots].mean() > 0.5)  # a host array
        now = self.clock.mark() if decodes else None
        self._observe(requests, now, sampling)
        trees = bool(draft_tokens) and not self.all_paused
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
            behind = self.skipped.behind(slots.tolist())  # a host array
            self.all_paused = not self.controller.drafts(len(requests), sampling, behind)
            drafts_now = not self.all_paused
            if drafts_now and self.later is not None:
                self.brief = self.controller.brief(len(requests), sampling)
            step = Step(len(requests), rows + nodes, trees, drafts_now, None, read=behind)
            self._begun = requests, step, now
        return rows + nodes

    def _survival(
        self, slots: np.ndarray, drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the survival of scheduled nodes, [R, N], 0 elsewhere, and a mask of later blocks.

        The mask is None if no drafter can draft its first block alone.
        """
        confidence = self._stale_confidences[self._stale_idx].np[slots]
        later = None if self.later is None else marked(confidence)
        survival = confidence.astype(np.float64).cumprod(axis=1)
        # The confidences of a new request are 1 until it has drafts.
        survival[(confidence == 1).all(1)] = self._unknown
        survival[np.arange(survival.shape[1]) >= drafts[:, None]] = 0
        return survival, later

    def _observe(self, requests: list[str], now: Any, sampling: bool) -> None:
        """Learn from the steps that ended; a step is timed to the beginning of the next one.

        Args:
            now: mark of the clock; None: the next step reads prompts.
        """
        begun, self._begun = self._begun, None
        # Ranks must decide alike, but each one measures its own times.
        if begun is None or now is None or begun[0] != requests or get_tp_group().world_size > 1:
            return
        _, step, start = begun
        accepted = self.accepted if step.rows > step.requests else 0
        step = step._replace(
            tokens=None if accepted is None else len(requests) + accepted,
            by=self.by,
            read=step.read if self.by != LOOKUP else 0,
        )
        self._timed.append((step, start, now, self.marks, sampling))
        while self._timed and self.clock.passed(self._timed[0][2]):
            step, start, end, drafted, sampled = self._timed.popleft()
            seconds = self.clock.seconds(start, end)
            drafting = self.clock.seconds(*drafted) if drafted else 0.0
            self.controller.observe(step._replace(seconds=seconds, draft_seconds=drafting), sampled)

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Return the padded number of rows for each batch size, [n]."""
        place = np.searchsorted(self._sizes, rows)
        return np.where(
            place < len(self._sizes), self._sizes[place.clip(max=len(self._sizes) - 1)], rows
        )

    def decide(self, batch: InputBatch) -> None:
        """Decide whether a pause ends: vLLM asks for a budget only if drafts are scheduled."""
        is_dummy = batch.req_ids[0] not in self.req_states.req_id_to_index
        if self.all_paused and not is_dummy and not batch.is_prefilling_np.all():
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

    # ---- within a step: what the speculator reports ----

    def without_drafts(self, batch: InputBatch) -> frozenset[str]:
        """Return the requests of a batch without new drafts."""
        without = self.undrafted[batch.idx_mapping_np] | self.all_paused
        return frozenset(request for request, each in zip(batch.req_ids, without) if each)

    def is_paused(self, batch: InputBatch) -> bool:
        """Whether drafting is paused at the end of this step.

        A batch of prompts ends the pause if drafters could not read it later.
        """
        if not self.resumes and batch.is_prefilling_np[: batch.num_reqs].all():  # a host array
            self.all_paused = self.controller.paused = False
        return self.all_paused

    def learn(self, verified: VerifiedTrees) -> None:
        self.acceptance.learn_from(verified)
        if self.on_host:
            self.accepted = int(verified.accepted.sum())  # a host tensor

    def drafted(self, began: Any, asked: bool, prompts: int = 0) -> None:
        """Note a proposal that ends now.

        Args:
            began: mark of `clock`.
            asked: a drafter with weights took part.
            prompts: requests of the batch if drafters have read prompts in it, else 0.
        """
        self.by = LOOKUP if not asked else BRIEF if self.brief else WHOLE
        self.marks = began, self.clock.mark()
        if prompts and self.on_host:
            cost = self.controller.cost
            usual = cost.draft(prompts, self.by) / cost.of(1.0)
            self.controller.observe_prompts(self.clock.seconds(*self.marks) - usual)

    # ---- on a GPU: initial costs from vLLM's profile ----

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        self._sizes = np.array(capture_sizes)
        for brief in self.lengths:
            self.brief = brief
            yield from super().batches_to_profile(capture_sizes)
        self.brief = False

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Set the initial costs, and compile the kernel: warm-up requests do not reach it."""
        super().set_initial_cost_curves(samples)  # raises if there are none
        times: list[defaultdict[int, list[float]]] = [defaultdict(list) for _ in range(3)]
        whole = len(samples) // len(self.lengths)
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


def install(kind: type[TreeBudgetManager] = TreeBudgetManager) -> None:
    """Build `kind` instead of vLLM's manager for our engines. Idempotent.

    Also add the requests without new drafts to the runner's output.
    """

    @replaces(adaptive_verification, "AdaptiveVerificationManager")
    def build(
        original: Function, req_states: RequestState, *args: Any, **kwargs: Any
    ) -> AdaptiveVerificationManager:
        speculator: TreeSpeculator | None = getattr(req_states, OURS, None)
        if speculator is None:
            return original(req_states, *args, **kwargs)
        manager = kind(req_states, *args, **kwargs)
        speculator.adaptive = manager
        return manager

    @replaces(model_runner.GPUModelRunner, "sample_tokens")
    def sample_tokens(original: Function, self: Any, *args: Any) -> Any:
        step, manager = self.execute_model_state, self.adaptive_verification
        output = original(self, *args)
        if isinstance(manager, TreeBudgetManager) and output is not None:
            result = getattr(output, "model_runner_output", output)
            setattr(result, UNDRAFTED, manager.without_drafts(step.input_batch))
        return output
