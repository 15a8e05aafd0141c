"""Defaults of ours in the arguments of an engine: sizes of steps and graphs, the method."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from support.eagle3 import speculators_json
from support.engines import TARGET
from vllm.config import CompilationConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_specblock.engine.config.vllm_args import capture_trees, make_room

LLM, SERVER = UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER
DEVICES = {
    "H200": ({LLM: 16384, SERVER: 8192}, {LLM: 1024, SERVER: 1024}),
    "small": ({LLM: 8192, SERVER: 2048}, {LLM: 256, SERVER: 256}),
}


def arguments(speculative=None, **changes) -> EngineArgs:
    given = {"method": "specblock"} | (speculative or {})
    return EngineArgs(model=str(TARGET), speculative_config=given, **changes)


@pytest.mark.parametrize(
    ("device", "nodes", "changes", "tokens"),
    [
        ("H200", 60, {}, 16384),
        ("small", 60, {}, 256 * 61),
        ("small", 60, {"max_num_seqs": 64}, 8192),
        ("small", 255, {}, 256 * 256),
        # What is given or suffices stays.
        ("small", 60, {"max_num_batched_tokens": 4096}, 4096),
        ("small", 60, {"enable_chunked_prefill": False}, None),
        ("small", 60, {"max_num_seqs": 16}, None),
    ],
)
def test_as_many_requests_run_as_without_trees(monkeypatch, device, nodes, changes, tokens):
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", lambda self, size: DEVICES[device])
    args = arguments(**changes)
    make_room(args, nodes, SimpleNamespace(world_size=1))
    assert args.max_num_batched_tokens == tokens


def sizes(nodes: int, **changes) -> list[int] | None:
    args = arguments(**changes)
    capture_trees(args, nodes)
    return args.cudagraph_capture_sizes


def test_steps_of_whole_trees_are_captured():
    found = sizes(60)
    assert found == sorted(found) and {61, 3 * 61, 8 * 61, 12 * 61, 32 * 61} <= set(found)
    assert {1, 2, 4, 8, 248, 256, 512} <= set(found) and max(found) == 32 * 61
    assert max(sizes(60, max_num_seqs=16)) == 16 * 61
    assert max(sizes(4)) == 512  # vLLM's own grid goes on beyond these
    assert 9 * 25 not in sizes(24, max_num_seqs=8) and 12 * 25 not in sizes(24, max_num_seqs=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": CompilationConfig(cudagraph_capture_sizes=[1, 2])},
        {"compilation_config": CompilationConfig(max_cudagraph_capture_size=32)},
        # A schedule has graphs of its own.
        {"speculative": {"num_speculative_tokens_per_batch_size": [[1, 8, 60], [9, 64, 10]]}},
    ],
)
def test_given_sizes_stay(changes):
    assert sizes(60, **changes) is None


# ---- A checkpoint in the speculators layout that is served by itself: whose method counts ----
def overridden(folder, raw, given):
    (folder / "config.json").write_text(json.dumps(raw))
    return arg_utils.maybe_override_with_speculators(
        model=str(folder), tokenizer=None, trust_remote_code=False, vllm_speculative_config=given
    )


@pytest.mark.parametrize(
    ("given", "method", "tokens"),
    [
        (None, "eagle3", 3),
        ({"method": "ngram", "num_speculative_tokens": 2}, "eagle3", 2),  # as vLLM does it
        # Of a tree the plugin knows how many nodes are good.
        ({"method": "specblock"}, "specblock", None),
        ({"method": "specblock", "num_speculative_tokens": 24}, "specblock", 24),
        ({"method": "specblock", "num-speculative-tokens": 7}, "specblock", 7),
    ],
)
def test_ours_is_kept_where_it_is_asked_for(given, method, tokens, tmp_path):
    model, tokenizer, found = overridden(tmp_path, speculators_json({"model_type": "llama"}), given)
    assert model == tokenizer == "org/target"
    assert (found["model"], found["method"]) == (str(tmp_path), method)
    counts = [value for key, value in found.items() if key.startswith("num")]
    assert counts == ([] if tokens is None else [tokens])


def test_other_models_are_left_alone(tmp_path):
    given = {"method": "specblock", "model": "org/drafter"}
    found = overridden(tmp_path, {"model_type": "llama"}, given)
    assert found == (str(tmp_path), None, given)
