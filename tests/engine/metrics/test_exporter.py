"""Counters against a slow oracle, and their export from the model's process."""

from __future__ import annotations

import gc
import os
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY
from support.dashboard import asked, unanswered
from support.engines import configure, make_engine, prompts
from support.processes import run_python
from support.verification import to_be_counted
from vllm import SamplingParams
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm_specblock.triton_kernels.feedback.count_step import Drafted

from vllm_specblock.engine.metrics import acceptance, exporter
from vllm_specblock.engine.metrics.counters import DRAFTING_NS, DRAFTING_STEPS, DrafterCounters
from vllm_specblock.engine.offline.answering import stopwatch_of


def sink_of(config, engine: int = 0):
    """The sink of one engine of a deployment."""
    made = SimpleNamespace(
        speculative_config=config,
        model_config=SimpleNamespace(served_model_name="target"),
        parallel_config=SimpleNamespace(data_parallel_index=engine),
    )
    return exporter.make_sink(made, rank=0)


def shown() -> dict[tuple[str, ...], int]:
    """Our part of `LLM.get_metrics()`: (name, engine[, head]) → value."""
    found = {}
    for metric in get_metrics_snapshot():
        if metric.name.startswith("vllm:specblock_"):
            labels = {**metric.labels}
            assert labels.pop("model_name") == "target"
            name = metric.name.removeprefix("vllm:specblock_")
            found[name, *map(labels.get, sorted(labels))] = metric.value
    return found


class Config:
    """Stands for vLLM's SpeculativeConfig: a plain object."""


@pytest.fixture
def config():
    made = Config()
    exporter.announce(made)
    return made


def test_counters_reach_the_reader_with_every_name(config):
    """Three requests: one whose drafters agree, one that ran no node, and one that has ended."""
    counters = DrafterCounters(2, "cpu", sink_of(config))
    counters.publish()
    assert set(shown().values()) == {0}
    verified = to_be_counted(
        torch.tensor([[3, 2, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0], [1, 2, 3, 1]], dtype=torch.uint8),
        torch.tensor([3, 2, 0]),  # slots are not in the batch's order, and one is free
        torch.tensor([4, 0, 2]),
        torch.tensor([[0, 1, 3], [0, 1, 1], [0, 2, 0]]),
    )
    live, second, agreed = torch.tensor(
        [[True, True, False], [True, False, True], [True, False, False]]
    )
    sizes = torch.tensor([[3, 2, 4], [2, 0, 4]], dtype=torch.int32)
    betas = torch.tensor([[1.0, 1.7, 1.0], [0.25, 16.0, 1.0]])
    trees = chain.from_iterable(zip(sizes, betas))
    counters.count(verified, Drafted(live, second, agreed, *trees))
    counters.clock.begin()
    counters.clock.end()
    counters.publish()
    named = {(name, int(*labels[1:])): value for (name, *labels), value in shown().items()}
    assert {name for name, *_ in shown()} == exporter.HELP.keys() - exporter.LEARNING.keys()
    assert named.pop((DRAFTING_STEPS, 0)) == 1 and named.pop((DRAFTING_NS, 0)) > 0
    assert named == counters.as_dict()
    by_drafter = {
        "verified_nodes": (4, 4),
        "accepted_nodes": (2, 2),
        "chosen_trees": (2, 1),
        "drafted_nodes": (5, 2),
        "drafted_trees": (2, 1),
        "calibration_thousandths": (2700, 250),
    }
    of_all = {"tree_nodes": 6, "shared_nodes": 2, "shared_accepted_nodes": 1}
    of_all |= {"both_drafted": 1, "agreed": 1, "second_skipped": 1}
    assert named == {(name, 0): value for name, value in of_all.items()} | {
        (name, drafter): value
        for name, values in by_drafter.items()
        for drafter, value in enumerate(values, 1)
    }


def test_time_of_any_drafter_in_steps_without_prompts():
    speculator = SimpleNamespace(propose=lambda batch, after: time.sleep(0.01) or after)
    runner = SimpleNamespace(speculator=speculator, device="cpu")
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    engine.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    watch = stopwatch_of(SimpleNamespace(llm_engine=engine))
    for has_prefill in (False, True, False):
        assert speculator.propose(SimpleNamespace(has_prefill=has_prefill), "drafts") == "drafts"
    nanoseconds, steps = watch.take()
    assert steps == 2 and 20e6 <= nanoseconds < 200e6
    assert watch.take() == [0, 0]


def test_a_filtered_scrape_finds_them(config):
    """`/metrics?name[]=...` asks a registry for names, which a collector has to declare."""
    sink_of(config)({("agreed", 0): 2})
    name = "vllm:specblock_agreed_total"
    (metric,) = REGISTRY.restricted_registry([name]).collect()
    assert [sample.name for sample in metric.samples] == [name]


def test_the_newest_engine_of_a_process_is_shown_until_its_end():
    first, newest = Config(), Config()
    exporter.announce(first)
    sink_of(first)({("agreed", 0): 2})
    exporter.announce(newest)
    assert shown() == {}
    sink_of(newest)({("agreed", 0): 1})
    folder = Path(newest.specblock_metrics).parent
    assert [path.suffix for path in folder.iterdir()] == [".db"]
    del first
    gc.collect()
    child = os.fork()
    if not child:  # a fork's copy takes nothing along
        del newest
        os._exit(gc.collect() < 0)
    os.waitpid(child, 0)
    assert shown() == {("agreed", "0"): 1}
    del newest
    gc.collect()
    assert not folder.exists() and shown() == {}


BESIDE = """
import json, os
from types import SimpleNamespace as Some
from prometheus_client import Counter, generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
from vllm_specblock.engine.metrics import exporter as metrics
config = type("Config", (), {})()
metrics.announce(config)
for engine in range(2):
    sink = metrics.make_sink(Some(
        speculative_config=config, model_config=Some(served_model_name="target"),
        parallel_config=Some(data_parallel_index=engine),
    ), 0)
    for count in (2, 3 + engine):
        sink({("agreed", 0): count, ("drafted_nodes", 2): 4})
unregister_vllm_metrics()  # as vLLM does when an engine starts
theirs = Counter("vllm:theirs", metrics.HELP["agreed"], ["model_name", "engine"])
for engine in range(2):
    theirs.labels("target", str(engine)).inc(3 + engine)
print(generate_latest(get_prometheus_registry()).decode())
"""


@pytest.mark.parametrize("several_servers", [False, True])
def test_they_read_like_vllms_own(tmp_path, several_servers):
    """The page of `/metrics` of two engines, with one API server and with several."""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if several_servers else {}
    page = run_python("-c", BESIDE, **environment)
    theirs = [line for line in page if "vllm:theirs" in line and "_created" not in line]
    ours = [line for line in page if "specblock_agreed" in line]
    assert len(ours) == 4  # help, type, two engines
    assert sorted(ours) == sorted(line.replace("theirs", "specblock_agreed") for line in theirs)
    assert 'vllm:specblock_drafted_nodes_total{engine="1",head="2",model_name="target"} 4.0' in page
    assert not list(tmp_path.glob("counter_specblock*")), "left behind"


def test_it_leaves_the_compile_cache_its_name():
    made = configure()
    before = made.compute_hash()
    exporter.announce(made.speculative_config)  # by another path
    assert made.compute_hash() == before


def test_a_real_run_agrees_with_vllms_own_counters():
    """And the dashboard asks for nothing that a merging engine, or one that learns, lacks."""
    merged = {"second_drafter": {"kind": "ngram"}, "draft_policy": "merge"}
    # Asynchronously, requests verify trees behind their end, and vLLM does not count them.
    engine = make_engine({"num_speculative_tokens": 24, **merged}, async_scheduling=False)
    engine.generate(prompts(4), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    engine.speculator.counters.publish()  # a GPU's last step
    values = [m for m in engine.llm.get_metrics() if hasattr(m, "value")]
    got = {(m.name.removeprefix("vllm:"), m.labels.get("head")): m.value for m in values}

    def total(name: str) -> int:
        return sum(got[f"specblock_{name}", head] for head in "12")

    # Nodes of both drafters are counted for each, and those behind a request's end by us alone.
    shared, shared_accepted = (
        got[f"specblock_{name}_nodes", None] for name in ("shared", "shared_accepted")
    )
    counts = {m.name: m.count for m in engine.llm.get_metrics() if hasattr(m, "count")}
    tokens, steps = got["generation_tokens", None], counts[acceptance.STEPS]
    accepted = got["spec_decode_num_accepted_tokens", None]
    assert accepted == tokens - counts[acceptance.REQUESTS] - steps > 0
    assert got["spec_decode_num_drafts", None] == steps
    counted = int(engine.speculator.counters.total[:9].view(3, 3)[:, 1].sum())
    assert total("accepted_nodes") - shared_accepted == counted >= accepted
    assert total("verified_nodes") - shared == got["specblock_tree_nodes", None] > 0
    assert shared > 0
    assert unanswered() == {name for name in asked() if name.startswith("vllm:specblock_adapt_")}
