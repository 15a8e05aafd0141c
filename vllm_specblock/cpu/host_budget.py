"""Adaptive verification on a CPU: step costs are measured at start-up and in the steps."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.worker.gpu import model_runner

from vllm_specblock.engine import adaptive
from vllm_specblock.engine.adaptive import TreeBudgetManager
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.feedback.controller import PLAIN

if TYPE_CHECKING:
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.worker_base import CompilationTimes

logger = init_logger("vllm.specblock.costs")

_ROUNDS = 3
_SECONDS = 6.0  # of all rounds; large models see fewer
_MOST_ROWS = 512


def padded(rows: np.ndarray) -> np.ndarray:
    """Return the padded number of rows for each batch size, [n].

    Above 16 rows these are multiples of 16, 32 and 64: CPU matrix products process 16 rows or more
    at a time, and set up each new number of rows, which takes as long as a step.
    """
    multiple = np.where(rows <= 16, 1, np.where(rows <= 128, 16, np.where(rows <= 256, 32, 64)))
    return -(-rows // multiple) * multiple


def sizes(num_nodes: int, max_requests: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return steps to measure as (rows, requests), from one row to trees of all requests."""
    each = num_nodes + 1
    most = min(max_tokens, _MOST_ROWS, max_requests * each)
    rows = {1, 2, 4, 8, 16, each, *padded(np.arange(17, most + 1)).tolist()}  # a host array
    return [(n, 1 if n == each else min(n, max_requests)) for n in sorted(rows) if n <= most]


def measure_steps(runner: model_runner.GPUModelRunner) -> None:
    """Measure step costs of a runner with a HostBudgetManager, by dummy steps with all logits.

    Sizes take turns, so that a slow phase of the machine affects all of them; the fastest round
    counts.
    """
    manager = runner.adaptive_verification
    num_nodes, clock = manager.num_speculative_steps, manager.clock
    began = clock.mark()
    verify: dict[int, float] = {}
    drafts: list[dict[int, float]] = [{}, {}]  # of all blocks, and of the first
    wanted = sizes(num_nodes, runner.max_num_reqs, runner.max_num_tokens)
    # Data-parallel ranks of an MoE synchronise every step, so all of them measure as many.
    rounds = _ROUNDS if runner.parallel_config.data_parallel_size == 1 else 1
    for turn, (rows, requests) in product(range(rounds), wanted):
        if turn and clock.seconds(began, clock.mark()) > _SECONDS:
            break
        # A new number of rows has set-up costs.
        for brief in manager.lengths * (1 if turn else 2):
            manager.brief, start = brief, clock.mark()
            # It has as many requests as there can be, or one of a whole tree.
            uniform = requests < min(rows, runner.max_num_reqs)
            hidden_states, _ = runner._dummy_run(rows, uniform_decode=uniform)
            runner.model.compute_logits(hidden_states[:rows])
            drafting = clock.seconds(*manager.marks)
            took = max(clock.seconds(start, clock.mark()) - drafting, 1e-6)
            verify[rows] = min(took, verify.get(rows, np.inf))
            drafts[brief][requests] = min(drafting, drafts[brief].get(requests, np.inf))
    manager.brief = False
    runner.speculator.forget_warm_up()
    manager.controller.cost.measured(verify, *drafts)
    tree = verify.get(num_nodes + 1, verify[max(verify)]) + drafts[0][1]
    logger.info(
        "A step with a tree of %d nodes takes %.2f times a plain one, %.0f %% of it for drafting "
        "(%d sizes measured in %.1f s).",
        num_nodes,
        tree / verify[1],
        100 * drafts[0][1] / tree,
        len(verify),
        clock.seconds(began, clock.mark()),
    )


class HostBudgetManager(TreeBudgetManager):
    """Computes budgets from the trees to be verified, not from those of the previous step."""

    _unknown = 0.0
    _padded = staticmethod(padded)
    # The budget of the next step, if these are its drafts, by slot.
    _planned: tuple[dict[int, int] | None, int] = None, 0

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        self._confidence_probs[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]
        # Host memory.
        self._stale_confidences[self._stale_idx].np[:] = self._confidence_probs.numpy()
        self.barren, self._planned = False, (None, 0)
        if self._begun is not None and not self.all_paused:
            slots = input_batch.idx_mapping_np
            drafts = np.where(self.undrafted[slots], 0, self.num_speculative_steps)
            nodes = self._nodes(slots.tolist(), drafts, len(slots))
            self._planned = dict(zip(slots.tolist(), drafts.tolist())), nodes
            self.barren = nodes == PLAIN

    def _nodes(self, slots: list[int], drafts: np.ndarray, rows: int) -> int:
        planned, nodes = self._planned
        if rows == len(slots) and planned == dict(zip(slots, drafts.tolist())):
            return nodes
        return super()._nodes(slots, drafts, rows)


def install() -> None:
    """Allow adaptive verification without CUDA graphs. Idempotent."""
    from vllm.v1.worker.cpu_worker import CPUWorker  # process-wide: replaces copies to a device

    @replaces(model_runner, "resolve_adaptive_cudagraph_mode")
    def resolve(original: Function, mode: CUDAGraphMode, **kwargs: Any) -> CUDAGraphMode:
        return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode

    @replaces(CPUWorker, "compile_or_warm_up_model")
    def compile_or_warm_up_model(original: Function, self: CPUWorker) -> CompilationTimes:
        manager = getattr(self.model_runner, "adaptive_verification", None)
        if isinstance(manager, HostBudgetManager):
            measure_steps(self.model_runner)
        return original(self)

    adaptive.install(HostBudgetManager)
