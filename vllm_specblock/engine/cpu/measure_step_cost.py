"""Step cost of a few batch sizes, measured at start-up.

Learned from steps alone, costs would be known badly: at one request nearly all steps have the same
number of rows, and a busy machine's times differ by more than a few rows add.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger("vllm.specblock.costs")

_ROUNDS = 5
_SECONDS = 6.0
"""For all of it, but for the two steps that have to be seen; large models see fewer sizes."""
_MOST_TOKENS = 512


class Size(NamedTuple):
    """Of a step: its tokens, shared out evenly among its requests."""

    tokens: int
    requests: int


def round_up(tokens: int) -> int:
    """The next size in which a step's tokens come: a multiple of 16, 32 or 64.

    A processor's products take 16 rows at a time, or more, and have every new number of rows
    prepared anew, which takes as long as a step.
    """
    multiple = 16 if tokens <= 128 else 32 if tokens <= 256 else 64
    return -(-tokens // multiple) * multiple


def sizes(num_nodes: int, max_requests: int, max_tokens: int) -> list[Size]:
    """Steps to be measured, by rising tokens; that of one token and that of one tree are first.

    All in which batches of trees will come are among them.
    """
    each = num_nodes + 1
    most = min(max_tokens, _MOST_TOKENS, max_requests * each)
    first = [Size(1, 1), *([Size(each, 1)] if each <= most else [])]
    counts = {2, 4, 8, 16, 32, 64, *(round_up(tokens) for tokens in range(each + 1, most + 1))}
    return first + [
        Size(tokens, min(tokens, max_requests))
        for tokens in sorted(counts - {each})
        if tokens <= most
    ]


def measure(
    step: Callable[[Size], tuple[float, float]],
    wanted: list[Size],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[Size, float], dict[int, float]]:
    """Take sizes in turns, so that a machine that is slow for a while is slow for all of them.

    Args:
        step: takes one step; says how many seconds verification took, and drafting.

    Returns:
        Size → seconds of verification; requests → seconds of drafting. The least of the rounds.
    """
    began = clock()
    verify: dict[Size, float] = {}
    draft: dict[int, float] = {}
    for turn in range(_ROUNDS + 1):
        for place, size in enumerate(wanted):
            if clock() - began > _SECONDS and (turn or place >= 2):
                return verify, draft
            verifying, drafting = step(size)
            if turn == 0:  # a new number of rows has products to prepare
                verifying, drafting = step(size)
            verify[size] = min(verifying, verify.get(size, np.inf))
            draft[size.requests] = min(drafting, draft.get(size.requests, np.inf))
    return verify, draft


def steps_of(runner: GPUModelRunner) -> Callable[[Size], tuple[float, float]]:
    """vLLM's dummy steps of a runner whose speculator is ours; with logits for every row."""
    switch = runner.adaptive_verification.drafting_state

    def step(size: Size) -> tuple[float, float]:
        began = time.perf_counter()
        # Without being told otherwise it has as many requests as there can be.
        alone = size.requests < min(size.tokens, runner.max_num_reqs)
        hidden_states, _ = runner._dummy_run(size.tokens, uniform_decode=alone)
        runner.model.compute_logits(hidden_states[: size.tokens])
        took = time.perf_counter() - began
        return max(took - switch.draft_seconds, 1e-6), switch.draft_seconds

    return step


def measure_steps(runner: GPUModelRunner) -> None:
    """Tell a runner's budget manager what its steps take.

    Args:
        runner: ready to run, with a HostBudgetManager.
    """
    manager, began = runner.adaptive_verification, time.perf_counter()
    nodes = manager.num_speculative_steps
    wanted = sizes(nodes, runner.max_num_reqs, runner.max_num_tokens)
    verify, draft = measure(steps_of(runner), wanted)
    runner.speculator.forget_warm_up()
    found = dict(sorted((size.tokens, seconds) for size, seconds in verify.items()))
    manager.measured(found, draft)
    tree, drafting, plain = found[nodes + 1], draft[1], found[1]
    logger.info(
        "A step with a tree of %d nodes takes %.2f times a plain one, %.0f %% of it for drafting "
        "(%d sizes measured in %.1f s).",
        nodes,
        (tree + drafting) / plain,
        100 * drafting / (tree + drafting),
        len(found),
        time.perf_counter() - began,
    )
