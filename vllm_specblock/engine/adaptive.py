"""The controller in vLLM's adaptive verification: the verify budget of a step, and pauses.

vLLM's manager trims the scheduled drafts to a budget, ordered by the running product of their
confidences. Here that product is the probability of reaching a node
(`feedback/acceptance_estimator.py`). Nodes are in descending order, so any cut leaves a tree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import compress
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
from vllm_specblock.engine.draft_allocation import reallocate_drafts
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.engine.scheduler import UNDRAFTED
from vllm_specblock.feedback.acceptance_estimator import AcceptanceEstimator
from vllm_specblock.feedback.controller import Step
from vllm_specblock.feedback.step_cost import BRIEF, LOOKUP, WHOLE
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import Later, marked
from vllm_specblock.triton_kernels.verify.reallocate_drafts import DraftStarts

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
        barren: no new tree is worth verifying, so the next step is plain; on a CPU.
        undrafted: [S] bool, requests that decline drafts; samples: those at T > 0.
        clock: times the steps; marks: begin and end of the last proposal.
        brief: drafters draft their first block only; lengths: possible values of `brief`.
    """

    all_paused = barren = brief = False
    _batch_budget: Any  # vLLM's: drafts and other tokens of each request, and the step's budget
    # Drafts and other tokens of each request, as last copied to the device, and that copy.
    _counts: tuple[Any, Any] = None, None
    _unknown = 1.0  # survival until the measured one arrives, one step later on a GPU
    # The current step: its requests, its measurements, and the mark of its beginning.
    _begun: tuple[list[str], Step, Any] | None = None
    _accepted: int | None = None  # draft tokens accepted in the last step; None on a GPU
    _by = WHOLE  # the last proposal; or LOOKUP or BRIEF

    def __init__(self, req_states: RequestState, *args: Any, **kwargs: Any) -> None:
        super().__init__(req_states, *args, **kwargs)
        speculator: TreeSpeculator = getattr(req_states, OURS)
        self.on_host, self.clock = speculator.parts.on_host, speculator.parts
        self.marks = self.clock.mark(), self.clock.mark()
        self._timed: deque[tuple[Step, Any, Any, tuple[Any, Any], bool]] = deque()
        self.controller, states = speculator.controller, speculator.tree_states
        self.controller.selective = self.on_host
        # [requests, N] fp32, in batch order.
        self.confidence, self.skipped = speculator.draft_token_confidence_probs, speculator.skipped
        self.resumes = self.on_host or not self.skipped.has_caches
        self.waits = self.on_host and not speculator.adapts  # adaptation learns from prompts, too
        self.acceptance = AcceptanceEstimator(speculator.device)
        self.undrafted, self.samples = speculator.undrafted, speculator.samples
        # The controller decides whether drafters draft all of their blocks.
        blocks = [drafter.first_block for drafter in speculator.draft_policy.drafters]
        first, others = max(blocks), sum(1 << at for at, each in enumerate(blocks) if not each)
        self.lengths = [False, True] if first else [False]
        self.later = Later(states.depth, states.origin, first or states.max_depth, others)

    # ---- before a step: its budget ----

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        index, requests = self.req_states.req_id_to_index, list(num_tokens_per_req)
        slots = [index[request] for request in requests]
        drafts = {request: len(draft_tokens.get(request, ())) for request in requests}
        others = {request: num_tokens_per_req[request] - drafts[request] for request in requests}
        count, rows, nodes = len(requests), sum(others.values()), 0
        decodes = rows == count  # the last token of a prompt costs as much
        sampling = self._sampling(slots)
        now, begun, self._begun = self.clock.mark() if decodes else None, self._begun, None
        if decodes and begun is not None and begun[0] == requests:
            self._observe(*begun[1:], now, sampling)
        trees = bool(draft_tokens) and not self.all_paused
        if trees:
            nodes = max(0, self._nodes(slots, np.array([*drafts.values()]), rows))
        self._batch_budget = drafts, others, nodes
        if decodes:
            behind = self.skipped.behind(slots)
            self.all_paused = not self.controller.drafts(count, sampling, behind)
            if len(self.lengths) > 1 and not self.all_paused:
                self.brief = self.controller.brief(count, sampling)
            step = Step(count, rows + nodes, trees, not self.all_paused, read=behind)
            self._begun = requests, step, now
        return rows + nodes

    def _sampling(self, slots: Sequence[int] | np.ndarray) -> bool:
        """Return whether most requests sample."""
        return bool(2 * self.samples[slots].sum() > len(slots))  # a host array

    def _nodes(self, slots: list[int], drafts: np.ndarray, rows: int) -> int:
        """Return the budget of a step of `rows` without nodes; drafts: [R], how many there are."""
        confidence = self._stale_confidences[self._stale_idx].np[slots]
        survival = confidence.cumprod(axis=1, dtype=np.float64)
        # The confidences of a new request are 1 until it has drafts.
        survival[survival[:, -1] == 1] = self._unknown
        survival[np.arange(survival.shape[1]) >= drafts[:, None]] = 0
        most = max(0, min(int(drafts.sum()), self._max_total_logits - len(slots)))  # a host array
        limits = len(slots), rows, most, self._sampling(slots), self._padded
        return self.controller.budget(survival, *limits, marked(confidence))

    def _observe(self, step: Step, start: Any, now: Any, sampling: bool) -> None:
        """Learn from the steps that ended; a step is timed to the beginning of the next one."""
        if get_tp_group().world_size > 1:
            return  # ranks must decide alike, but each one measures its own times
        accepted = self._accepted if step.rows > step.requests else 0
        read = step.read if self._by != LOOKUP else 0
        step = step._replace(accepted=accepted, by=self._by, read=read)
        self._timed.append((step, start, now, self.marks, sampling))
        while self._timed and self.clock.passed(self._timed[0][2]):
            step, start, end, drafted, sampled = self._timed.popleft()
            seconds = self.clock.seconds(start, end)
            drafting = self.clock.seconds(*drafted) if step.drafted else 0.0
            self.controller.observe(step._replace(seconds=seconds, draft_seconds=drafting), sampled)

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Return the padded number of rows for each batch size, [n]."""
        return np.maximum(rows, self._sizes.take(np.searchsorted(self._sizes, rows), mode="clip"))

    def decide(self, batch: InputBatch) -> None:
        """Observe a plain step, too: vLLM asks for a budget only if drafts are scheduled."""
        is_dummy = batch.req_ids[0] not in self.req_states.req_id_to_index
        plain = self.all_paused or self.barren
        if plain and not is_dummy and not batch.is_prefilling_np.all():  # a host array
            tokens = batch.num_scheduled_tokens[: batch.num_reqs].tolist()  # a host array
            self.get_num_tokens(dict(zip(batch.req_ids, tokens)), {})

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        (*both, budget), self._batch_budget = self._batch_budget, None
        counts = [[each[request] for request in req_ids] for each in both]
        if counts != self._counts[0]:  # they change only when the batch does
            there = async_tensor_h2d(np.array(counts, dtype=np.int32), device=idx_mapping.device)
            self._counts = counts, there
        starts = self._cu_num_logits, self.query_start_loc
        drafts = DraftStarts(self._confidence_probs, self._counts[1], *starts)
        reallocate_drafts(drafts, idx_mapping, budget)
        return reallocated(self._cu_num_logits[: len(req_ids) + 1], self.query_start_loc, budget)

    # ---- within a step: what the speculator reports ----

    def is_paused(self, batch: InputBatch) -> bool:
        """Return `all_paused`; a batch of prompts that drafters cannot read later ends a pause.

        On a CPU drafters do not read prompts where the batch will have no gain.
        """
        prompts = batch.is_prefilling_np[: batch.num_reqs]
        if not self.resumes and prompts.all():  # a host array
            self.all_paused = self.controller.paused = False
        elif self.waits and not self.all_paused and prompts.any():  # a host array
            sampling = self._sampling(batch.idx_mapping_np)
            self.all_paused = self.controller.stops(batch.num_reqs, sampling)
        return self.all_paused

    def learn(self, verified: VerifiedTrees) -> None:
        self.acceptance.learn_from(verified)
        if self.on_host:
            self._accepted = int(verified.accepted.sum())  # a host tensor

    def drafted(self, began: Any, asked: bool, prompts: int = 0) -> None:
        """Note a proposal that ends now; `began`: mark of `clock`.

        asked: a drafter with weights took part. prompts: requests of the batch if drafters have
        read prompts in it, else 0.
        """
        self._by = LOOKUP if not asked else BRIEF if self.brief else WHOLE
        self.marks = began, self.clock.mark()
        if prompts and self.on_host:
            self.controller.observe_prompts(prompts, self._by, self.clock.seconds(*self.marks))

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
        for place, sample in enumerate(samples):
            times[0][sample.num_target_tokens].append(sample.forward_ms)
            if sample.full_cudagraph:
                by = 1 + place * len(self.lengths) // len(samples)
                times[by][sample.num_reqs].append(sample.drafter_ms)
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
            batch, result = step.input_batch, getattr(output, "model_runner_output", output)
            plain = manager.all_paused or manager.barren
            without = manager.undrafted[batch.idx_mapping_np] | plain
            setattr(result, UNDRAFTED, frozenset(compress(batch.req_ids, without)))
        return output
