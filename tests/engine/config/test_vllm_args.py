"""Unsupported options fail with one sentence before any weight is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.engines import DRAFTER, ROOT, TARGET, configure
from support.targets import edit_config
from vllm import envs
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_specblock.adapt.options import check_adapt
from vllm_specblock.config import OptionError
from vllm_specblock.engine.config import resolved_config, vllm_args
from vllm_specblock.engine.config.resolved_config import ResolvedConfig

on_a_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="of a CPU build")


def refused(*parts: str, **kwargs) -> None:
    with pytest.raises(ValueError) as error:
        configure(**kwargs)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith("."), sentence
    for part in parts:
        assert part in sentence, sentence


def plan_of(speculative=None, **changes) -> ResolvedConfig:
    return configure(speculative, **changes).speculative_config.specblock


def put_on_a_gpu(monkeypatch) -> SimpleNamespace:
    """Let vLLM's platform be another one from now on."""
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    for module in (vllm_args, resolved_config):
        monkeypatch.setattr(module, "current_platform", gpu)
    return gpu


def test_one_drafter():
    config = configure({"num_blocks": 3, "branching": [1, 2, 3, 4]})
    assert config.speculative_config.num_speculative_tokens == 24
    assert config.num_lookahead_tokens >= 24, "later blocks borrow these slots"
    plan = config.speculative_config.specblock
    (head,) = plan.drafters
    assert head.kind == "specblock" and head.folder == str(DRAFTER)
    assert head.options.num_blocks == 3 and head.options.branching == [1, 2, 3, 4]
    assert plan.combine is None
    draft = config.speculative_config.draft_model_config
    assert draft.hf_config.eagle_aux_hidden_state_layer_ids == [2, 3, 4]


def test_a_drafter_without_weights():
    config = configure({"kind": "ngram", "model": None}).speculative_config
    assert config.specblock.drafters[0].folder is None and config.specblock.layers == ()
    draft = config.draft_model_config
    assert (draft.get_hidden_size(), draft.get_vocab_size()) == (192, 2048)


def test_two_drafters_in_keys_with_dashes_as_on_a_command_line():
    second = {"kind": "ngram", "max-match": 5}
    plan = plan_of({"second-drafter": second, "draft-policy": "merge", "budget": "split"})
    assert [drafter.kind for drafter in plan.drafters] == ["specblock", "ngram"]
    assert plan.drafters[1].options.max_match == 5
    assert plan.combine.draft_policy == "merge" and plan.combine.budget == "split"
    assert plan.layers == (2, 3, 4)


def test_default_numbers_of_nodes_and_blocks():
    given = {"method": "specblock", "model": str(DRAFTER)}
    args = EngineArgs(model=str(TARGET), max_model_len=512, speculative_config=given)
    for _ in range(2):  # arguments may be used again
        nodes = args.create_engine_config().speculative_config.num_speculative_tokens
        assert nodes == (12 if current_platform.is_cpu() else 60)
    args.speculative_config = given | {"num_speculative_tokens_per_batch_size": "x"}
    with pytest.raises(ValueError, match="per_batch_size"):  # by vLLM
        args.create_engine_config()
    assert args.speculative_config["model"] == str(DRAFTER)
    for nodes, wanted, blocks in ((15, {}, 1), (16, {}, 2), (12, {"num_blocks": 2}, 2)):
        (head,) = plan_of({"num_speculative_tokens": nodes, **wanted}).drafters
        assert head.options.num_blocks == blocks


NGRAM = {"kind": "ngram"}
SECOND = {"second_drafter": NGRAM}
TABLES, EAGLE3 = ROOT / "examples/two_heads/tables", ROOT / "examples/two_heads/eagle3"
ADAPT, LEARNS = {"adapt": {"policy": "watch", "requests": "marked"}}, {"adapt": True}
ADAPTIVE = {"enable_adaptive_verification": True}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


# Options of one drafter or of `adapt` alone: tests/test_config.py and tests/adapt/test_options.py.
@pytest.mark.parametrize(
    ("speculative", "parts"),
    [
        ({"model": None}, ["'model' is missing"]),
        ({"enable_adaptive_verification": "yes"}, ["_verification' is 'yes'", "true or false"]),
        ({"model": "no/such"}, ["'model' is 'no/such'", "neither a folder"]),
        ({"rejection_sample_method": "block"}, ["'block' rejection", "drop rejection_sample_"]),
        ({"draft_sample_method": "probabilistic"}, ["'draft_sample_method'", "not known"]),
        (
            {"num_speculative_tokens": 60, "num_blocks": 8, "num_starts": 32},
            ["num_blocks", "num_starts"],
        ),
        # Combinations.
        ({"second_drafter": {}}, ["'second_drafter.model' is missing"]),
        ({"second_drafter": NGRAM | {"model": "x"}}, ["'ngram'", "no weights"]),
        ({"second_drafter": NGRAM | {"revision": "main"}}, ["'second_drafter.revision' is 'main'"]),
        ({"kind": "eagle3"}, ["'kind' is 'eagle3'", "kind 'specblock'"]),
        ({"kind": "ngram", "model": None, **SECOND}, ["Both drafters", "n-gram"]),
        (SECOND | {"merge": "trie"}, ["'merge'", "draft_policy is 'route'"]),
        (SECOND | {"skip_drafter": True}, ["'skip_drafter' is true, but", "drop the key"]),
        (
            SECOND | {"draft_policy": "merge", "budget": "split", "num_speculative_tokens": 1},
            ["cannot be split", "num_speculative_tokens"],
        ),
        # Adaptation.
        ({"second_drafter": NGRAM | {"adapt": True}}, ["'second_drafter.adapt'", "kind 'ngram'"]),
        (
            ADAPT | {"second_drafter": {"model": str(TABLES), "adapt": {"policy": "watch"}}},
            ["both drafters", "one can adapt"],
        ),
    ],
)
def test_wrong_options(speculative, parts):
    refused(*parts, speculative=speculative)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"max_num_batched_tokens": 20}, ["max_num_batched_tokens is 20", "25 tokens"]),
        (
            {"attention_backend": "TRITON_ATTN"},
            ["attention backends besides its own", "drop attention_backend"],
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype is 'fp8_e5m2'", "use 'auto'"]),
        pytest.param(
            {"enable_lora": True, "speculative": ADAPTIVE},
            ["'enable_adaptive_verification' is true and enable_lora", "drop one of them"],
            marks=on_a_cpu,
        ),
        pytest.param(
            {"enable_lora": True, "speculative": {"adapt": True}},
            ["'adapt' is given and enable_lora", "drop one of them"],
            marks=on_a_cpu,
        ),
        pytest.param(  # vLLM wants as many GPUs
            {"pipeline_parallel_size": 2},
            ["does not support pipeline parallelism", "drop pipeline_parallel_size"],
            marks=on_a_cpu,
        ),
        ({"runner": "pooling"}, ["runner 'pooling'", "drafts generated text only"]),
        ({"enable_return_routed_experts": True}, ["support routed experts: drop enable_return_"]),
        ({"kv_offloading_size": 1.0}, ["KV connectors", "drop kv_transfer_config"]),
        (
            {"disable_hybrid_kv_cache_manager": False},
            ["a block table per layer type", "drop disable_hybrid_kv_cache_manager"],
        ),
        pytest.param(
            {"speculative": ADAPTIVE, **TWO_RANKS},
            ["'enable_adaptive_verification' is true", "tensor_parallel_size is 2"],
            marks=on_a_cpu,
        ),
    ],
)
def test_wrong_surroundings(changes, parts):
    refused(*parts, **changes)


FLAGS = (
    "is_encoder_decoder use_mla is_hybrid is_attention_free supports_multimodal_inputs uses_alibi"
)
TARGET_KIND = dict.fromkeys(FLAGS.split(), False)
TARGET_KIND |= {"runner_type": "generate", "attention_chunk_size": None}
IN_8_BITS = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
EACH_HEAD = {"kv_cache_scheme": {"strategy": "attn_head"}}
TARGET_KIND |= {"get_head_size": lambda: 64, "dtype": torch.bfloat16, "hf_config": None}


def check_engine(parallel=None, kind=None, **given) -> None:
    args, target = EngineArgs(model=str(TARGET), **given), TARGET_KIND | (kind or {})
    parallel = parallel or ParallelConfig()
    vllm_args.check_engine(args, {}, SimpleNamespace(**target), parallel)


def test_a_head_size_that_a_cache_of_8_bits_cannot_have(monkeypatch):
    monkeypatch.setattr(vllm_args, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    with pytest.raises(OptionError, match=r"multiples of 32 \(here 40 and 32\): use 'bfloat16'\.$"):
        check_engine(kv_cache_dtype="fp8", kind={"get_head_size": lambda: 40})


def test_what_a_gpu_does_not_support(monkeypatch):
    target, gpu = configure().model_config, put_on_a_gpu(monkeypatch)
    says = r"FlashAttention 3 \(Hopper\).* multiples of 16 \(here 64 and 32\): use 'b?float16'\.$"
    for version, dtype, kind in (
        (2, "fp8", {}),
        (2, "auto", {"hf_config": SimpleNamespace(quantization_config=IN_8_BITS)}),
        (3, "fp8_e5m2", {}),
        (3, "fp8", {"dtype": torch.float16}),
        (3, "fp8", {"use_mla": True}),
    ):
        monkeypatch.setattr(vllm_args, "get_flash_attn_version", lambda head_size, v=version: v)
        with pytest.raises(OptionError, match=says):
            check_engine(kv_cache_dtype=dtype, kind=kind)
        check_engine(kv_cache_dtype="bfloat16", kind={**kind, "dtype": torch.bfloat16})
    check_engine(kv_cache_dtype="fp8")
    with pytest.raises(OptionError, match=says):
        check_engine(kv_cache_dtype="fp8", attention_config={"flash_attn_version": 2})
    with pytest.raises(OptionError, match=r"micro-batches.*drop enable_dbo and ubatch_size\.$"):
        check_engine(replace(ParallelConfig(), enable_dbo=True))
    with pytest.raises(OptionError, match=r"ReplaySSM: drop use_replayssm\.$"):
        check_engine(use_replayssm=True)
    with pytest.raises(OptionError, match=r"is true and the target has recurrent layers"):
        given = EngineArgs(model=str(TARGET)), SimpleNamespace(is_hybrid=True), ParallelConfig()
        resolved_config._is_adaptive(ADAPTIVE, *given)
    drafter = {"model": str(DRAFTER), "quantization": "fp8"}, target, "", {}, 24
    gpu.has_device_capability = lambda wanted: wanted <= 89
    resolved_config._resolve_drafter(*drafter)
    gpu.has_device_capability = lambda wanted: wanted <= 80
    with pytest.raises(OptionError, match=r"'fp8', but this GPU has no float8.*drop the key"):
        resolved_config._resolve_drafter(*drafter)


def test_the_other_runner(monkeypatch):
    envs.disable_envs_cache()  # an engine of an earlier test switches it on
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    refused("does not support Model Runner V1", "drop VLLM_USE_V2_MODEL_RUNNER=0")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        pytest.param({"use_mla": True}, "MLA", marks=on_a_cpu),
        ({"is_attention_free": True}, "no attention layers"),
        ({"supports_multimodal_inputs": True}, "multimodal inputs"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"uses_alibi": True}, "ALiBi"),
        ({"hf_config": SimpleNamespace(quantization_config=EACH_HEAD)}, "per-head KV cache scales"),
    ],
)
def test_targets_that_cannot_be_verified_as_trees(monkeypatch, kind, says):
    check_engine()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pytest.raises(OptionError, match=f"The target has .*{says}.*cannot verify"):
        check_engine(kind=kind)


def test_a_drafter_of_another_target(tmp_path):
    copied = shutil.copytree(DRAFTER, tmp_path / "drafter")
    target = json.loads((copied / "config.json").read_text())["target"]
    edit_config(copied, vocab_size=2049, target=target | {"vocab_size": 2049})
    given = {"second_drafter": {"model": str(copied)}}
    refused("second_drafter", "vocabulary size 2049", "has 2048", speculative=given)
    edit_config(copied, vocab_size=2048, target=target | {"layer_ids": [2, 3, 7]})
    refused("[2, 3, 7]", "0 to 6", speculative={"model": str(copied)})
    other = shutil.copytree(TARGET, tmp_path / "target")
    edit_config(other, hidden_size=384, head_dim=64)
    refused("hidden size 192", "has 384", target=other)


@on_a_cpu
@pytest.mark.parametrize(
    ("given", "changes", "adaptive", "skips"),
    [
        ({}, {}, True, True),
        ({"enable_adaptive_verification": False, "skip_drafter": False}, {}, False, False),
        ({"draft_policy": "route"}, {}, True, False),
        ({"budget": "split"}, {}, True, False),
        ({"second_drafter": {"model": str(TABLES)}}, {}, True, False),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 24]]}, {}, False, True),
        ({}, {"tensor_parallel_size": 2}, False, False),
        ({}, {"enable_lora": True}, False, True),
    ],
)
def test_budgets_and_skipped_drafters_on_a_cpu_by_default(given, changes, adaptive, skips):
    plan = plan_of(SECOND | {"draft_policy": "merge"} | given, **changes)
    assert (plan.adaptive, plan.combine.skip_drafter) == (adaptive, skips)


@pytest.mark.parametrize(
    ("changes", "adapts"),
    [
        ({}, True),
        ({"tensor_parallel_size": 2}, True),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, True),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, False),
        ({"optimization_level": 1}, False),
        ({"enforce_eager": True}, False),
        ({"data_parallel_size": 2}, True),
        ({"enable_lora": True}, False),
    ],
)
def test_budgets_follow_from_costs_on_a_gpu_with_full_graphs(monkeypatch, changes, adapts):
    put_on_a_gpu(monkeypatch)
    args = EngineArgs(model=str(TARGET), **changes)
    dense, hybrid, experts = (
        SimpleNamespace(is_hybrid=is_hybrid, is_moe=is_moe)
        for is_hybrid, is_moe in ((False, False), (True, False), (False, True))
    )
    assert resolved_config._is_adaptive({}, args, dense, args) == adapts
    assert not resolved_config._is_adaptive({}, args, hybrid, args)
    alone = args.data_parallel_size == 1  # ranks with experts run as many rows as the largest
    assert resolved_config._is_adaptive({}, args, experts, args) == (adapts and alone)
    if not args.enable_lora:
        assert resolved_config._is_adaptive(ADAPTIVE, args, experts, args)


def test_adaptation_of_one_drafter_among_ranks_and_of_a_target_elsewhere():
    watch, learns = plan_of(ADAPT), plan_of({"second_drafter": {"model": str(TABLES), **LEARNS}})
    assert (watch.adapting, learns.adapting) == (watch.drafters[0], learns.drafters[1])
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "nnodes": 1}
    here, there = SimpleNamespace(model=str(TARGET)), SimpleNamespace(model="some/target")
    check_adapt(watch, SimpleNamespace(**two), there, ())
    check_adapt(learns, SimpleNamespace(**two), here, ())
    for apart in ({"nnodes": 2}, {"distributed_executor_backend": "ray"}):
        with pytest.raises(OptionError, match=r"size is 2.* one machine.*drop one of them\.$"):
            check_adapt(watch, SimpleNamespace(**two | apart), here, ())
    with pytest.raises(OptionError, match=r"'some/target' is not a folder.*drop the key\.$"):
        check_adapt(learns, SimpleNamespace(**two), there, ())


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int"}])
def test_rounded_activations_are_warned_of(monkeypatch, activations):
    warnings = []
    monkeypatch.setattr(vllm_args.logger, "warning", warnings.append)
    group = {"weights": {"type": "int", "num_bits": 8}, "input_activations": activations}
    said = {"config_groups": {"group_0": group}}
    vllm_args.warn_of_rounding(SimpleNamespace(hf_config=SimpleNamespace(quantization_config=said)))
    assert len(warnings) == (activations is not None)
