"""Registration with vLLM at start-up: names, and six of the patches in `patches.py`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry
from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu import spec_decode

from vllm_specblock.config import METHOD, OptionError
from vllm_specblock.drafters.specblock.config import ARCHITECTURE
from vllm_specblock.engine import request_drafts
from vllm_specblock.engine.config.ours import WHEN_ASKED, asks_for_us, extracts_features, is_ours
from vllm_specblock.engine.device import DEVICES
from vllm_specblock.engine.patches import Function, replaces

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
    from vllm.v1.worker.gpu.states import RequestState


class SpecBlockHFConfig(EAGLEConfig):
    """An EAGLEConfig that wraps nothing: vLLM would wrap and rename any other "eagle3" config."""

    model_type = "specblock"

    def __init__(self, **kwargs: Any) -> None:
        self.model = None
        self.truncated_vocab_size = None
        PreTrainedConfig.__init__(self, **kwargs)


class SpecBlockForDrafting(nn.Module):
    """Satisfies vLLM's inspection of a text model; never built.

    vLLM's own protocol is generic in 0.32 and not in 0.33.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        raise NotImplementedError(
            "A SpecBlock drafter is not a model of its own: name it in speculative_config, "
            'e.g. {"method": "specblock", "model": DRAFTER}.'
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    embed_input_ids = compute_logits = forward


def register() -> None:
    AutoConfig.register(SpecBlockHFConfig.model_type, SpecBlockHFConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, SpecBlockForDrafting)
    if DEVICES.keys() == {"cuda"}:  # other devices bring their own
        register_backend(AttentionBackendEnum.CUSTOM, DEVICES["cuda"].attention)
    replaces(EngineArgs, "create_speculative_config")(create_speculative_config)
    replaces(EngineArgs, "_set_default_chunked_prefill_and_prefix_caching_args")(set_defaults)
    replaces(arg_utils, "maybe_override_with_speculators")(keep_method)
    replaces(spec_decode, "init_speculator")(init_speculator)
    replaces(SamplingParams, "_validate_spec_decode")(check_sampling_params)
    replaces(SchedulerConfig, "get_scheduler_cls")(get_scheduler_cls)
    # A runner that is already loaded holds the function by name. Importing it here would load it
    # in processes that never run a model.
    runner: Any = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = spec_decode.init_speculator


def create_speculative_config(
    original: Function,
    self: EngineArgs,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> SpeculativeConfig | None:
    """Translate our method, since `method` is a Literal, to "eagle3".

    That gives us the target's inner hidden states, slots for draft nodes, and asynchronous steps.
    """
    given = self.speculative_config
    if not asks_for_us(given):
        return original(self, target_model_config, target_parallel_config)
    for prepare in WHEN_ASKED:
        prepare(target_parallel_config)
    from vllm_specblock.engine import compat
    from vllm_specblock.engine.config import vllm_args
    from vllm_specblock.engine.metrics import acceptance, exporter

    compat.warn_of_broken_hooks()
    try:
        resolved = vllm_args.translate(self, target_model_config, target_parallel_config)
        config = original(self, target_model_config, target_parallel_config)
    finally:
        self.speculative_config = given  # EngineArgs may be reused, after an error, too
    vllm_args.finish(config, resolved, target_model_config)
    if not self.disable_log_stats:
        exporter.announce(config)
        acceptance.subtract_after_stops()
    return config


def keep_method(
    original: Function, *args: Any, vllm_speculative_config: Any = None, **kwargs: Any
) -> tuple[str, str | None, dict[str, Any] | None]:
    """Keep our method if a checkpoint in the speculators layout names another."""
    given = vllm_speculative_config
    model, tokenizer, found = original(*args, vllm_speculative_config=given, **kwargs)
    if found is not None and given is not None and asks_for_us(given):
        if found["method"] != METHOD and "num_speculative_tokens" not in given:
            del found["num_speculative_tokens"]  # the length of a chain
        found["method"] = METHOD
    return model, tokenizer, found


def set_defaults(original: Function, self: EngineArgs, model_config: ModelConfig) -> None:
    """Keep prefix caching off for targets with recurrent layers.

    vLLM caches the state at the end of a block, and an accepted path may pass that end.
    """
    if asks_for_us(self.speculative_config) and model_config.is_hybrid:
        if self.enable_prefix_caching:
            raise OptionError(
                "enable_prefix_caching is on, but SpecBlock does not support it for targets with "
                "recurrent layers: drop it."
            )
        self.enable_prefix_caching = False
    original(self, model_config)


def init_speculator(
    original: Function, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> BaseSpeculator:
    """Build our speculator; vLLM has no registry for them."""
    ours = is_ours(vllm_config.speculative_config)
    if ours or extracts_features(vllm_config.speculative_config):
        from vllm_specblock.engine import target_model

        target_model.install()
    if not ours:
        return original(vllm_config, device, req_states)
    from vllm_specblock.engine.runner.speculator import TreeSpeculator

    return TreeSpeculator(vllm_config, device, req_states)


def check_sampling_params(
    original: Function, self: SamplingParams, speculative_config: SpeculativeConfig | None
) -> None:
    """Accept min_p and logit_bias, which are exact with trees; check our keys."""
    if is_ours(speculative_config):
        request_drafts.check(self, getattr(speculative_config, METHOD).lora)
    else:
        original(self, speculative_config)


def get_scheduler_cls(original: Function, self: SchedulerConfig) -> Any:
    """Add `TreeScheduling` to the scheduler of our engines, vLLM's or the user's."""
    base = original(self)

    def build(vllm_config: VllmConfig, **rest: Any) -> SchedulerInterface:
        kind = base
        if is_ours(vllm_config.speculative_config):
            from vllm_specblock.engine.scheduler import TreeScheduling

            kind = type(f"Tree{base.__name__}", (TreeScheduling, base), {})
        return kind(vllm_config=vllm_config, **rest)

    return build
