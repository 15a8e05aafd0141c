"""Counters against a slow oracle, and their export from the model's process."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from support.dashboard import asked, of_adaptation, unanswered
from support.engines import TARGET, Engine, make_engine, prompts
from support.trees import nodes, path_to
from support.verification import to_be_counted
from vllm import SamplingParams
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm_specblock.triton_kernels.feedback.count_step import Drafted

from vllm_specblock.engine.metrics import acceptance, exporter
from vllm_specblock.engine.metrics.counters import DRAFTING_NS, DRAFTING_STEPS, DrafterCounters

quick = settings(deadline=None, max_examples=100)
SLOTS, DEPTH = 12, 6


# ---- what is counted ----


@st.composite
def steps(draw):
    """One step as plain lists: per request a tree, its origins, what was run, what was accepted."""
    step = []
    for _ in range(draw(st.integers(1, 4))):
        tree = draw(nodes(max_nodes=SLOTS))
        scheduled = draw(st.integers(0, SLOTS))
        ends = [
            node
            for node in range(min(scheduled, len(tree)) + 1)
            if len(path_to(tree, node)) <= DEPTH + 1
        ]
        size = [draw(st.integers(0, 5)), draw(st.integers(0, 5))]
        second = draw(st.booleans())
        step.append(
            SimpleNamespace(
                origin=[draw(st.integers(1, 3)) for _ in tree],
                scheduled=scheduled,
                path=path_to(tree, draw(st.sampled_from(ends))),
                size=[size[0], size[1] * second],
                second=second,
                agreed=bool(size[0] and size[1] and second and draw(st.booleans())),
                live=draw(st.booleans()),
                beta=[draw(st.sampled_from((0.25, 1.0, 1.7, 16.0))) for _ in range(2)],
            )
        )
    return step


def oracle(all_steps, num_heads: int) -> dict[str, int]:
    """One node after the other."""
    out = Counter()
    for request in (each for step in all_steps for each in step):
        run = request.origin[: request.scheduled]
        accepted = [request.origin[node - 1] for node in request.path[1:]] if run else []
        for head in range(1, num_heads + 1):
            mine = [1, 3] if head == 1 else [2, 3]
            out[f"verified_nodes_{head}"] += sum(kind in mine for kind in run)
            out[f"accepted_nodes_{head}"] += sum(kind in mine for kind in accepted)
            out[f"chosen_trees_{head}"] += run[:1] != [] and run[0] in mine
            size = request.size[head - 1] if request.live else 0
            out[f"drafted_nodes_{head}"] += size
            out[f"drafted_trees_{head}"] += size > 0
            beta = round(1000 * request.beta[head - 1])
            out[f"calibration_thousandths_{head}"] += beta * (size > 0)
        out["tree_nodes"] += len(run)
        if num_heads == 2:
            out["shared_nodes"] += run.count(3)
            out["shared_accepted_nodes"] += accepted.count(3)
            out["both_drafted"] += request.live and min(request.size) > 0
            out["agreed"] += request.live and request.agreed
            out["second_skipped"] += request.live and not request.second
    return dict(out)


def count(counters: DrafterCounters, step) -> None:
    """One step into `counters`; what must not be looked at holds something that would count."""
    shape = len(step), SLOTS
    origin = torch.zeros(shape, dtype=torch.uint8)
    path = torch.zeros(len(step), DEPTH + 1, dtype=torch.int64)
    for index, request in enumerate(step):
        origin[index, : len(request.origin)] = torch.tensor(request.origin, dtype=torch.uint8)
        path[index, : len(request.path)] = torch.tensor(request.path)
        if not request.scheduled:
            path[index, 1:] = 1  # a verdict of an earlier tree
    sizes = torch.tensor([request.size for request in step], dtype=torch.int32).T
    flags = torch.tensor([(request.second, request.agreed, request.live) for request in step])
    scheduled = torch.tensor([request.scheduled for request in step])
    # Slots are not in the batch's order, and one is unused.
    req_idx = torch.arange(len(step)).flip(0)
    origin = torch.cat([origin.flip(0), origin[:1]])
    verified = to_be_counted(origin, req_idx, scheduled, path)
    betas = torch.tensor([request.beta for request in step]).T
    second, agreed, live = flags.T
    trees = [(size, beta) for size, beta in zip(sizes, betas)][: counters.num_drafters]
    flags = (live, second, agreed) if counters.num_drafters == 2 else (live, None, None)
    counters.count(verified, Drafted(*flags, *chain.from_iterable(trees)))


def only_first(step):
    """The same step of an engine with one head."""
    return [
        SimpleNamespace(
            **{
                **vars(request),
                "origin": [1] * len(request.origin),
                "size": request.size[:1],
                "second": False,
                "agreed": False,
            }
        )
        for request in step
    ]


@quick
@given(st.lists(steps(), min_size=1, max_size=3))
def test_counts_are_the_oracles(all_steps):
    two = DrafterCounters(2, "cpu")
    one = DrafterCounters(1, "cpu")
    for step in all_steps:
        count(two, step)
        count(one, only_first(step))
    assert two.as_dict() == oracle(all_steps, 2)
    assert one.as_dict() == oracle([only_first(step) for step in all_steps], 1)


# ---- how it is shown ----


def vllm_config(config, engine: int = 0):
    """What `make_sink` reads of vLLM's config."""
    return SimpleNamespace(
        speculative_config=config,
        model_config=SimpleNamespace(served_model_name="target"),
        parallel_config=SimpleNamespace(data_parallel_index=engine),
    )


def shown() -> dict[tuple[str, ...], int]:
    """Our part of `LLM.get_metrics()`: (name, engine[, head]) → value."""
    return {
        (metric.name.removeprefix("vllm:specblock_"), *sorted_labels(metric.labels)): metric.value
        for metric in get_metrics_snapshot()
        if metric.name.startswith("vllm:specblock_")
    }


def sorted_labels(labels: dict[str, str]) -> list[str]:
    assert labels["model_name"] == "target"
    return [labels[name] for name in ("engine", "head") if name in labels]


class Config:
    """Stands for vLLM's SpeculativeConfig: a plain object."""


@pytest.fixture
def config():
    made = Config()
    exporter.announce(made)
    return made


COUNTS = {("drafted_nodes", 1): 7, ("drafted_nodes", 2): 5, ("agreed", 0): 2}


def test_metrics_of_two_engines(config):
    assert shown() == {}
    for engine in range(2):
        sink = exporter.make_sink(vllm_config(config, engine), rank=0)
        sink(COUNTS)
        sink({key: value + engine for key, value in COUNTS.items()})
    # As vLLM does when an engine starts: ours are to outlive it.
    unregister_vllm_metrics()
    assert shown() == {
        ("drafted_nodes", "0", "1"): 7,
        ("drafted_nodes", "0", "2"): 5,
        ("agreed", "0"): 2,
        ("drafted_nodes", "1", "1"): 8,
        ("drafted_nodes", "1", "2"): 6,
        ("agreed", "1"): 3,
    }


def test_counters_reach_the_reader_with_every_name(config):
    sink = exporter.make_sink(vllm_config(config), rank=0)
    counters = DrafterCounters(2, "cpu", sink)
    counters.publish()
    assert set(shown().values()) == {0}
    one = torch.ones(1, dtype=torch.bool)
    verified = to_be_counted(
        torch.tensor([[1, 2, 3] + [0] * (SLOTS - 3)], dtype=torch.uint8),
        torch.tensor([0]),
        torch.tensor([3]),
        torch.tensor([[0, 1, 3] + [0] * (DEPTH - 2)]),
    )
    size = torch.tensor([4], dtype=torch.int32)
    counters.count(verified, Drafted(one, one, one, size, None, size, None))
    counters.clock.begin()
    counters.clock.end()
    counters.publish()
    named = {"_".join([name, *labels[1:]]): value for (name, *labels), value in shown().items()}
    assert {name for name, *_ in shown()} == exporter.HELP.keys() - exporter.LEARNING.keys()
    assert named.pop(DRAFTING_STEPS) == 1 and named.pop(DRAFTING_NS) > 0
    assert named == counters.as_dict()
    assert named["accepted_nodes_1"] == 2 and named["shared_accepted_nodes"] == 1


def test_a_filtered_scrape_finds_them(config):
    """`/metrics?name[]=...` asks a registry for names, which a collector has to declare."""
    exporter.make_sink(vllm_config(config), rank=0)(COUNTS)
    name = "vllm:specblock_agreed_total"
    (metric,) = REGISTRY.restricted_registry([name]).collect()
    assert [sample.name for sample in metric.samples] == [name]


def test_the_newest_engine_of_a_process_is_shown(config):
    exporter.make_sink(vllm_config(config), rank=0)(COUNTS)
    other = Config()
    exporter.announce(other)
    assert shown() == {}
    exporter.make_sink(vllm_config(other), rank=0)({("agreed", 0): 1})
    assert shown() == {("agreed", "0"): 1}
    # The end of the first takes nothing of the second.
    del config
    gc.collect()
    assert shown() == {("agreed", "0"): 1}


def test_files_go_with_the_config():
    config = Config()
    exporter.announce(config)
    folder = Path(config.specblock_metrics).parent
    exporter.make_sink(vllm_config(config), rank=0)(COUNTS)
    assert [path.suffix for path in folder.iterdir()] == [".db"]
    child = os.fork()
    if not child:
        del config
        os._exit(gc.collect() < 0)
    os.waitpid(child, 0)
    assert folder.is_dir(), "a fork's copy took the files along"
    del config
    gc.collect()
    assert not folder.exists() and shown() == {}


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BESIDE = """
import json, os
from types import SimpleNamespace as Some
from prometheus_client import Counter, generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm_specblock.engine.metrics import exporter as metrics
config = type("Config", (), {})()
metrics.announce(config)
for engine in range(2):
    metrics.make_sink(Some(
        speculative_config=config, model_config=Some(served_model_name="target"),
        parallel_config=Some(data_parallel_index=engine),
    ), 0)({("agreed", 0): 3, ("drafted_nodes", 2): 4})
theirs = Counter("vllm:theirs", metrics.HELP["agreed"], ["model_name", "engine"])
for engine in range(2):
    theirs.labels("target", str(engine)).inc(3)
print(generate_latest(get_prometheus_registry()).decode())
"""


@pytest.mark.parametrize("several_servers", [False, True])
def test_they_read_like_vllms_own(tmp_path, several_servers):
    """The page of `/metrics`, with one API server and with several."""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if several_servers else {}
    page = run_python(BESIDE, **environment).splitlines()
    theirs = [line for line in page if "vllm:theirs" in line and "_created" not in line]
    ours = [line for line in page if "specblock_agreed" in line]
    assert len(ours) == 4  # help, type, two engines
    assert sorted(ours) == sorted(line.replace("theirs", "specblock_agreed") for line in theirs)
    assert 'vllm:specblock_drafted_nodes_total{engine="1",head="2",model_name="target"} 4.0' in page
    assert not list(tmp_path.glob("counter_specblock*")), "left behind"


def test_the_path_travels_and_leaves_the_compile_cache_its_name():
    """As vLLM makes, hashes and pickles its config; a SpecBlock one is not needed for that."""
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(
        model=str(TARGET),
        dtype="float32",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ).create_engine_config()
    before = made.compute_hash()
    exporter.announce(made.speculative_config)
    assert made.compute_hash() == before
    there = pickle.loads(pickle.dumps(made))
    exporter.make_sink(there, rank=0)({("agreed", 0): 1})
    (sample,) = [metric for metric in get_metrics_snapshot() if "specblock" in metric.name]
    assert sample.labels == {"model_name": str(TARGET), "engine": "0"}


def counted(engine: Engine) -> dict[tuple[str, str | None], int]:
    """Every counter by its name, without "vllm:", and its head."""
    values = [m for m in engine.llm.get_metrics() if hasattr(m, "value")]
    return {(m.name.removeprefix("vllm:"), m.labels.get("head")): m.value for m in values}


def behind_the_end(engine: Engine) -> int:
    """Return the accepted nodes after the end of requests; drafters' counters include them.

    Every decode step must verify a tree.
    """
    values = {m.name: m for m in engine.llm.get_metrics()}
    drafts, accepted = (
        values[f"vllm:spec_decode_num_{each}"].value for each in ("drafts", "accepted_tokens")
    )
    steps = values[acceptance.STEPS].count
    given = values[acceptance.TOKENS].value - values[acceptance.REQUESTS].count
    assert drafts == steps and drafts + accepted == given
    total = engine.speculator.counters.total[:9].view(3, 3)
    return int(total[:, 1].sum()) - accepted


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
NGRAM = {"second_drafter": {"kind": "ngram"}}
SHARED = ("shared_nodes", "shared_accepted_nodes")
"""Counted for both drafters."""
ENGINES = {"alone": {}, "merged": NGRAM | {"draft_policy": "merge"}}


@pytest.mark.parametrize("how", ENGINES)
def test_a_real_run_agrees_with_vllms_own_counters(how):
    """And the dashboard asks for nothing that a merging engine, or one that learns, lacks."""
    engine = make_engine({"num_speculative_tokens": 24, **ENGINES[how]})
    engine.generate(prompts(4), GREEDY)
    got, heads = counted(engine), "1" if how == "alone" else "12"

    def total(name: str) -> int:
        return sum(got[f"specblock_{name}", head] for head in heads)

    shared = {name: got.get((f"specblock_{name}", None), 0) for name in SHARED}
    accepted = total("accepted_nodes") - shared["shared_accepted_nodes"] - behind_the_end(engine)
    assert accepted == got["spec_decode_num_accepted_tokens", None] > 0
    verified = total("verified_nodes") - shared["shared_nodes"]
    assert verified == got["specblock_tree_nodes", None] > 0
    if how == "merged":
        assert shared["shared_nodes"] > 0
        assert unanswered() == {name for name in asked() if of_adaptation(name)}
        return
    assert total("chosen_trees") == got["spec_decode_num_drafts", None] > 0
    # While every tree fills its slots.
    assert verified == got["spec_decode_num_draft_tokens", None]
