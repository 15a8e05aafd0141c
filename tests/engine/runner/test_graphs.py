"""The proposal from graphs: the same drafts as eagerly, also where a batch has to be filled up."""

from __future__ import annotations

import pytest
import torch
from support.engines import FULL_GRAPHS, ROOT, make_engine
from support.matrix import PROMPTS, params
from support.recorded_graph import CaptureError, RecordedGraph, recording, stand_in
from vllm.config.compilation import CUDAGraphMode

NUM_NODES = 10
SIZES = (1, 3, 6)
"""Requests of the captured graphs: batches of 2, 4 and 5 have to be filled up."""
SECOND = {"model": str(ROOT / "examples/two_heads/eagle3")}
HEADS = {
    "SpecBlock": {},
    "EAGLE-3": SECOND,
    "n-gram": {"kind": "ngram", "model": None},
    "route": {"second_drafter": SECOND},
    # As on a GPU, where nobody may decide on the host whether a drafter is left out.
    "trie": {"second_drafter": {"kind": "ngram"}, "draft_policy": "merge", "skip_drafter": False},
}

stands_in = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a recording knows nothing of compiled kernels"
)


def capture(engine) -> None:
    """Capture the speculator's graphs as vLLM does after its own."""
    config = engine.speculator.vllm_config.compilation_config
    config.cudagraph_capture_sizes = [(NUM_NODES + 1) * size for size in SIZES]
    config.max_cudagraph_capture_size = max(config.cudagraph_capture_sizes)
    engine.speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    engine.speculator.capture()


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


def look_at_fillers(engine, monkeypatch) -> None:
    """Those who fill up a batch have nothing to attend to, which would be time for nobody."""
    manager = engine.speculator.graphs
    original = manager.run_fullgraph

    def looking(desc):
        original(desc)
        rows = manager.rows[desc.num_reqs]
        filler = rows.known[:, 0] == engine.speculator.scratch_idx
        assert (rows.batch.positions[rows.accepted_rows.query_start][filler] == 0).all()

    monkeypatch.setattr(manager, "run_fullgraph", looking)


@pytest.fixture(scope="module", params=HEADS)
def engine(request):
    return make_engine({"num_speculative_tokens": NUM_NODES, **HEADS[request.param]})


@stands_in
def test_graphs_draft_what_runs_eagerly(engine, monkeypatch):
    monkeypatch.setattr(engine.speculator, "pad_rows", True)
    wanted = {count: run(engine, monkeypatch, count) for count in (1, 4, 7)}
    stand_in(monkeypatch)
    capture(engine)
    graphs = engine.speculator.graphs.graphs
    look_at_fillers(engine, monkeypatch)
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


@stands_in
def test_graphs_of_as_many_rows_as_the_device_gives(engine, monkeypatch):
    """With drafts shared out on the device, a size is a number of requests."""
    monkeypatch.setattr(engine.speculator, "enable_adaptive_verification", True)
    stand_in(monkeypatch)
    config = engine.speculator.vllm_config.compilation_config
    monkeypatch.setattr(config, "cudagraph_capture_sizes", [2, 5, 40])
    monkeypatch.setattr(config, "max_cudagraph_capture_size", 40)
    engine.speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    engine.speculator.capture()
    graphs = engine.speculator.graphs.graphs
    assert sorted(desc.num_reqs for desc in graphs) == [2, 5]
    monkeypatch.setattr(engine.speculator, "enable_adaptive_verification", False)
    run(engine, monkeypatch, 3)  # 33 rows
    assert sum(graph.replays for graph in graphs.values()) > 5
    before = sum(graph.replays for graph in graphs.values())
    monkeypatch.setattr(engine.speculator.graphs, "most_rows", 10)
    run(engine, monkeypatch, 3)  # more rows than the buffers hold
    assert sum(graph.replays for graph in graphs.values()) == before


# ---- what the stand-in for a graph holds, and what it refuses ----


def recorded(step) -> RecordedGraph:
    graph = RecordedGraph()
    with recording(graph):
        step()
    return graph


def test_a_replay_reads_the_memory_of_the_capture():
    source, target, index = torch.zeros(3), torch.zeros(2), torch.tensor([0, 2])

    def step():
        view = source.view(3, 1)[:, 0]
        target.copy_((view * 2 + 1)[index])
        target.index_fill_(0, index[:1], 7.0)

    graph = recorded(step)
    source.copy_(torch.tensor([1.0, 2.0, 3.0]))
    index.copy_(torch.tensor([1, 2]))
    target.zero_()
    graph.replay()
    assert target.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.tensor([1, 2]),
        lambda x: torch.as_tensor([3]),
    ],
)
def test_tensors_from_host_values_are_refused(step):
    x = torch.ones(2)
    with pytest.raises(CaptureError):
        recorded(lambda: step(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_real_graphs_draft_what_runs_eagerly():
    """Both engines in turn on the GPU, every head and policy: equal answers, and graphs ran."""
    for heads in HEADS.values():
        speculative = {"num_speculative_tokens": NUM_NODES, **heads}
        eager = make_engine(speculative, dtype="float32")
        # Without Inductor, whose fused kernels round otherwise than eager steps.
        graphs = {"enforce_eager": False, "compilation_config": FULL_GRAPHS}
        graphed = make_engine(speculative, dtype="float32", **graphs)
        assert graphed.speculator.graphs.graphs
        for count in (1, 4, 7):
            wanted, found = (
                [each[0].tokens for each in engine.generate(PROMPTS[:count], params(count))]
                for engine in (eager, graphed)
            )
            assert found == wanted, (heads, count)
