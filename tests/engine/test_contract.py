"""What `engine/` leans on in the installed vLLM: the contract, and what only running it shows.

When this file passes with a new release, and `test_exactness.py` does, the release is supported.
"""

from __future__ import annotations

import ast
import inspect
from typing import get_args

import pytest
from support.engines import ROOT
from vllm.platforms import current_platform

from vllm_specblock.engine.contract.check import hooks
from vllm_specblock.engine.contract.sources import Sources, installed


def arguments_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(installed())


@pytest.mark.parametrize("user", sorted({hook.user for hook in hooks()}))
def test_every_hook_holds(user, sources):
    mine = [hook for hook in hooks() if hook.user == user]
    assert [trouble for hook in mine if (trouble := hook.trouble(sources))] == []


def test_entries_are_patched():
    from vllm.v1.worker.gpu import model_runner, spec_decode

    from vllm_specblock.engine.patches import PATCHES

    assert "vllm.engine.arg_utils.EngineArgs.create_speculative_config" in PATCHES
    assert model_runner.init_speculator is spec_decode.init_speculator
    original = PATCHES["vllm.v1.worker.gpu.spec_decode.init_speculator"]
    assert arguments_of(original) == arguments_of(spec_decode.init_speculator)


def test_our_overrides_take_what_the_originals_take():
    from vllm.v1.attention.backend import AttentionImpl
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from vllm_specblock.engine.attention.backend import TreeAttentionImpl
    from vllm_specblock.engine.runner.model_state import TreeModelState
    from vllm_specblock.engine.runner.sampler import TreeSampler
    from vllm_specblock.engine.runner.speculator import TreeSpeculator

    assert arguments_of(TreeSampler._verify) == arguments_of(RejectionSampler._verify)
    chunks = arguments_of(RejectionSampler._verify_in_chunks)
    mine = arguments_of(TreeSampler._verify_in_chunks)
    assert mine[:-1] == chunks[: len(mine) - 1] and mine[-2:] == ["pos", "rest"]
    call = inspect.getsource(RejectionSampler.__call__).split("self._verify_in_chunks(")[1]
    assert "=" not in call.split(")")[0]
    assert set(arguments_of(BaseSpeculator.propose)) <= set(arguments_of(TreeSpeculator.propose))
    assert arguments_of(TreeAttentionImpl.forward) == [
        *arguments_of(AttentionImpl.forward)[:8], "output_scale", "output_block_scale",
    ]  # fmt: skip
    for name in ("prepare_inputs", "prepare_dummy_inputs", "add_request", "custom_sampler"):
        theirs = arguments_of(getattr(DefaultModelState, name))
        assert arguments_of(getattr(TreeModelState, name)) == theirs


def test_imposed_acceptance():
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    assert unconditional_to_conditional_rates([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]


def test_cache_layout():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert KVCacheLayout.LBNHC.value == (0, 1, 3, 2, 4)


def test_vllms_attention_on_a_cpu():
    from vllm import envs
    from vllm.v1.attention.backends import cpu_attn

    assert 64 in cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    assert isinstance(envs.VLLM_CPU_ATTN_SPLIT_KV, bool)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="nothing is replaced elsewhere")
def test_kernels_that_are_replaced_on_a_cpu_are_there():
    from vllm.triton_utils.dispatcher import _registry

    from vllm_specblock.engine.cpu.kernels import KERNELS

    assert set(KERNELS) <= set(_registry)


def test_a_prefix_cache_can_be_reset():
    from vllm import LLM

    (_, *reset) = inspect.signature(LLM.reset_prefix_cache).parameters.values()
    assert all(parameter.default is not parameter.empty for parameter in reset)


def own_methods(tree: ast.AST) -> set[str]:
    """Names that dictionaries in a source have under "method", ours aside."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                named = isinstance(key, ast.Constant) and key.value == "method"
                if named and isinstance(value, ast.Constant):
                    found.add(value.value)
    return found - {"specblock"}


def test_methods_of_vllms_that_we_ask_for_are_there():
    """What baselines and offline engines lean on: 0.33 has no "medusa" and "mlp_speculator"."""
    from vllm.config.speculative import SpeculativeMethod

    def names(of) -> set[str]:
        inner = get_args(of)
        return {of} if isinstance(of, str) else {name for each in inner for name in names(each)}

    files = [
        path
        for folder in ("vllm_specblock", "benchmarks", "research")
        for path in (ROOT / folder).rglob("*.py")
    ]
    asked = set().union(*(own_methods(ast.parse(path.read_text())) for path in files))
    assert {"eagle3", "extract_hidden_states", "ngram_gpu"} <= asked <= names(SpeculativeMethod)
