"""The target's answers and features, through vLLM."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from vllm import LLM, SamplingParams, envs
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.platforms import current_platform

from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target.feature_store import Features

_DONE: Any = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
"""Stands for the CUDA event of a finished copy."""


class VllmAnswerer:
    """A vLLM engine that answers token prompts; `train.answering.Answerer`.

    Args:
        max_length: most tokens of a prompt and its answer.
        engine: further arguments of vLLM's `LLM`, such as `gpu_memory_utilization`.

    Raises:
        TrainError: vLLM does not take these options.
    """

    def __init__(
        self,
        target: Path,
        *,
        max_length: int,
        dtype: str = "auto",
        top_p: float = 1.0,
        seed: int = 0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.top_p = top_p
        settings = {"model": str(target), "max_model_len": max_length, "dtype": dtype, "seed": seed}
        # After a chunk of a prompt, vLLM's first model runner rewinds a seeded request's generator,
        # which a CPU's generator cannot do.
        if current_platform.is_cpu() and envs.VLLM_USE_V2_MODEL_RUNNER is not True:
            settings["enable_chunked_prefill"] = False
        self.llm = start(settings, engine)

    def generate(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_tokens: list[int],
        seeds: list[int],
    ) -> list[list[int]]:
        """Answers as token ids, with the end token where one was generated."""
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=self.top_p,
                max_tokens=most,
                seed=seed,
                detokenize=False,
            )
            for temperature, most, seed in zip(temperatures, max_tokens, seeds)
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        """Drop the cached prefixes: a restarted run has none either."""
        self.llm.reset_prefix_cache()


def start(settings: dict[str, Any], engine: Mapping[str, Any] | None) -> LLM:
    """Start an engine; raises TrainError where vLLM does not take these arguments of `LLM`."""
    # An engine in a process of its own outlives a killed parent and keeps its memory, and requests
    # reach it at uneven times, so that no two runs compute the same batches.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return LLM(**settings | dict(engine or {}))
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TrainError(f"vLLM cannot run the target {settings['model']}: {reason}") from error


class FeatureExtractor:
    """A vLLM engine that gives the features of token sequences.

    vLLM's method `extract_hidden_states` keeps the states of chosen layers in a paged cache, and
    its example connector writes a file per request. `FeatureConnector` adds the input of the LM
    head, and support for CPUs.

    Args:
        layer_ids: feature layers; i is the residual stream after i layers, 0 the embeddings.
        length: tokens of the longest sequence.
        scratch: folder for one file per request, emptied now and by `close`.
        engine: further arguments of vLLM's `LLM`, such as `tensor_parallel_size`.

    Raises:
        TrainError: vLLM does not take these options.
    """

    def __init__(
        self,
        target: Path,
        layer_ids: tuple[int, int, int],
        length: int,
        dtype: str,
        scratch: Path,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.scratch = scratch
        shutil.rmtree(scratch, ignore_errors=True)
        # vLLM keeps one state per id. The last id is repeated to reserve a slot that
        # `FeatureConnector` fills with the LM head's input.
        kept = [*layer_ids, layer_ids[-1]]
        hf_config = {"eagle_aux_hidden_state_layer_ids": kept, "specblock_features": True}
        settings: dict[str, Any] = {
            "model": str(target),
            "dtype": dtype,
            # One token has to be sampled.
            "max_model_len": length + 1,
            # Every row is computed: nothing rests on what a cached prefix holds of these states.
            "enable_prefix_caching": False,
            "skip_tokenizer_init": not any(target.glob("tokenizer*")),
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": hf_config},
            },
            "kv_transfer_config": {
                "kv_connector": FeatureConnector.__name__,
                "kv_connector_module_path": __name__,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(scratch)},
            },
        }
        if current_platform.is_cpu():  # vLLM's default there is nearly all of the memory
            settings["kv_cache_memory_bytes"] = 2 << 30
        self.llm = start(settings, engine)
        self.params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def __call__(self, sequences: Sequence[Tensor]) -> Iterator[Features]:
        """Run the target over `sequences` (each [T] int64) now; read what it wrote when asked.

        Raises:
            TrainError: a file that vLLM should have written is not there, or not whole.
        """
        prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in sequences]
        answers = self.llm.generate(prompts, self.params, use_tqdm=False)
        # Step an engine in this process until its connector has written the last requests.
        client = self.llm.llm_engine.engine_core
        core = getattr(client, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            client.get_output()
        paths = [answer.kv_transfer_params["hidden_states_path"] for answer in answers]
        return map(_take, paths, sequences)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _take(path: str, tokens: Tensor) -> Features:
    """Read and delete the file of one request."""
    try:
        stored = load_hidden_states(path)
    except (OSError, SafetensorError) as error:
        raise TrainError(
            f"vLLM wrote no whole features to {path} ({error}); its log says why, a full disk is "
            "the usual cause."
        ) from None
    cleanup_hidden_states(path)
    states = stored["hidden_states"]  # [T, 4, Ht]
    if not torch.equal(stored["token_ids"], tokens.cpu()):
        raise TrainError(f"The features in {path} belong to other tokens: delete it and run again.")
    return Features(states[:, :-1].flatten(1), states[:, -1])


class FeatureConnector(ExampleHiddenStatesConnector):
    """vLLM's connector; the last of the states is the target's output. Works on a CPU, too."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Also store the LM head's input as the last of the kept states, in every worker."""
        from vllm.v1.worker.gpu.spec_decode import extract_hidden_states

        super().register_kv_caches(kv_caches)

        @replaces(extract_hidden_states.ExtractHiddenStatesSpeculator, "propose")
        def propose(original: Function, *args: Any, **kwargs: Any) -> Tensor:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if (states := given["aux_hidden_states"]) is not None:
                given["aux_hidden_states"] = [*states, given["last_hidden_states"]]
            return original(**given)

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        # The original copies through pinned memory, which only accelerators have.
        blocks = self._kv_cache[torch.tensor(pending.block_ids)]  # [n, states, block, Ht]
        states = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)]
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
        lock = self._lock_fds.pop(pending.req_id, None)
        self._write_tensors(tensors, _DONE, pending.filename, lock)
        self._req_copy_events[pending.req_id] = _DONE
