"""An engine whose drafter learns while it serves, with a real trainer: the tokens stay vLLM's."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support.dashboard import unanswered
from support.engines import Engine, make_engine
from support.matrix import PROMPTS, Checker, params

from vllm_specblock.drafters.specblock.refresh import HEADS
from vllm_specblock.engine.metrics import exporter

check = Checker()
ONLY_OF_TWO = {
    f"{exporter.PREFIX}{name}_total"
    for name in (
        "agreed",
        "both_drafted",
        "second_skipped",
        "shared_nodes",
        "shared_accepted_nodes",
    )
}
"""Metrics of engines with two drafters."""
LIMIT = 240.0
"""Seconds: the trainer is started beside everything else that a machine does."""


@pytest.fixture
def learning():
    adapt = {"policy": "always", "every": 2, "lr": 1e-3, "actions": "all"}
    engine = make_engine({"num_speculative_tokens": 10, "adapt": adapt})
    yield engine
    engine.speculator.recorder.swaps.trainer.stop()


def counts(engine: Engine) -> dict[str, int]:
    return {name: count for (name, _), count in engine.speculator.recorder.counts().items()}


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    drafter = engine.speculator.draft_policy.drafters[0].model
    return {name: each.clone() for name, each in drafter.named_parameters()}


def test_it_takes_what_its_trainer_offers(learning, reference):
    """Versions are swapped in between steps, also after a trainer was killed."""
    requests, texts = params(4, max_tokens=60), PROMPTS[:4]
    expected = reference("four to learn from", requests, texts)
    trainer, before = learning.speculator.recorder.swaps.trainer, weights(learning)

    def serve_until(what) -> None:
        until = time.monotonic() + LIMIT
        while not what():
            assert time.monotonic() < until, counts(learning)
            check(learning, requests, expected, texts)
            # At the lowest priority a trainer gets nothing from cores that are never idle.
            time.sleep(2)

    serve_until(lambda: counts(learning)["adapt_swaps"] >= 2)
    after = weights(learning)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(not name.startswith(HEADS) for name in changed)
    assert set(counts(learning)) == exporter.LEARNING.keys()
    # The dashboard's, as far as one drafter has them.
    assert unanswered() == ONLY_OF_TWO
    os.kill(trainer.pid, signal.SIGKILL)
    serve_until(lambda: counts(learning)["adapt_trainer_restarts"] == 1)
    swaps = counts(learning)["adapt_swaps"]
    serve_until(lambda: counts(learning)["adapt_swaps"] > swaps)
    found = counts(learning)
    assert found["adapt_versions_refused_checksum"] == 0
    assert found["adapt_recorded_requests"] > 10 and found["adapt_swap_microseconds"] > 0
