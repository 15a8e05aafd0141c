"""The proposal from graphs: the same drafts as eagerly, also where a batch has to be filled up.

On a GPU: `benchmarks/exactness.py --graphs`. Drafts shared out on the device, and more rows than
graphs hold: tests/emulated_gpu.
"""

from __future__ import annotations

import pytest
import torch
from support.engines import KINDS, shared_engine
from support.matrix import PROMPTS, params
from support.recorded_graph import capture

NUM_NODES = 10
SIZES = (1, 3, 6)
"""Requests of the captured graphs: batches of 2, 4 and 5 have to be filled up."""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a recording knows nothing of compiled kernels"
)


def run(engine, monkeypatch, count: int) -> tuple[list[list[int]], list[tuple]]:
    """Answers to `count` prompts, and what every step proposed and counted.

    Some sample, one verifies a chain, and one is not drafted for.
    """
    engine.llm.reset_prefix_cache()
    engine.speculator.counters.total.zero_()
    requests = params(count)
    for index, request in enumerate(requests):
        request.max_tokens = 12 + 3 * index
        request.temperature = index % 2
    requests[0].presence_penalty = 0.1
    if count > 2:
        requests[2].extra_args = {"specblock_draft": 0}
    slots, steps = engine.speculator.tree_states, []
    propose = engine.speculator.propose

    def noting(batch, *args, **kwargs):
        proposed = tokens = propose(batch, *args, **kwargs)
        # Placeholder tokens may differ: in 0.33 at the end of an answer, and without drafts.
        undrafted = engine.speculator.undrafted[batch.idx_mapping_np].all()
        if undrafted or kwargs.get("num_speculative_tokens") == 0:
            tokens = torch.zeros_like(tokens)
        trees = (tokens, slots.parent[batch.idx_mapping], slots.origin[batch.idx_mapping])
        counts = engine.speculator.counters.total
        steps.append(tuple(each.tolist() for each in (*trees, counts)))
        return proposed

    with monkeypatch.context() as patch:
        patch.setattr(engine.speculator, "propose", noting)
        answers = engine.generate(PROMPTS[:count], requests)
    return [each[0].tokens for each in answers], steps


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    return shared_engine({"num_speculative_tokens": NUM_NODES, **KINDS[request.param]})


def test_graphs_draft_what_runs_eagerly(engine, monkeypatch):
    monkeypatch.setattr(engine.speculator, "pad_rows", True)
    wanted = {count: run(engine, monkeypatch, count) for count in (1, 4, 7)}
    graphs = capture(engine, monkeypatch, [(NUM_NODES + 1) * size for size in SIZES])
    assert sorted(desc.num_reqs for desc in graphs) == sorted(SIZES)
    for count, (answers, steps) in wanted.items():
        before = sum(graph.replays for graph in graphs.values())
        found, proposed = run(engine, monkeypatch, count)
        assert found == answers
        assert len(proposed) == len(steps)
        for step, (mine, other) in enumerate(zip(proposed, steps)):
            assert mine == other, (count, step)
        replays = sum(graph.replays for graph in graphs.values()) - before
        # Prompts run eagerly, and so do seven requests until one of them is done.
        assert 5 < replays < len(steps)
