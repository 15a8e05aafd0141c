"""Patches of vLLM: each callable once, with the original kept.

Only what vLLM has no registry for is patched. Calls that do not concern SpecBlock go to the
original.

At start-up (`registration.py`):
    EngineArgs.create_speculative_config: `method` is a Literal.
    arg_utils.maybe_override_with_speculators: the checkpoint's method overrides the user's.
    EngineArgs._set_default_chunked_prefill_and_prefix_caching_args: caches recurrent states.
    spec_decode.init_speculator: speculators cannot be registered.
    SamplingParams._validate_spec_decode: refuses min_p and logit_bias; ours checks our keys.
    SchedulerConfig.get_scheduler_cls: does not depend on the method; see `scheduler.py`.
With our first engine in a frontend (`metrics/acceptance.py`):
    OutputProcessor.process_outputs: counts the tokens after a stop string that it drops.
At start-up on a CPU (`cpu/runner.py`):
    VllmConfig.use_v2_model_runner, VllmConfig._validate_v2_model_runner: settled by whether Triton
        was there when vLLM was imported, not by what an engine asks for.
With the first engine on a CPU (`cpu/install.py`, `cpu/sleeping_waits.py`):
    kernels of Model Runner V2, block tables, top-k/top-p: have no CPU form.
    CpuPlatform.get_attn_backend_cls: always returns CPU_ATTN.
    SpinCondition: waiting processes use the cores that the model needs.
There, and in a plain engine that is measured beside ours (`compile_cache.py`):
    torch.compiler.load_compiled_function: misses the cache of compiled models on a CPU.
With the first engine on a CPU with LoRA adapters (`cpu/device.py`):
    bgmv_shrink, bgmv_expand, bgmv_expand_slice: take −1, no adapter, for the last adapter.
With the first engine with adaptive budgets (`adaptive.py`, on a CPU `host_budget.py`):
    AdaptiveVerificationManager: a speculator cannot provide its own.
    GPUModelRunner.sample_tokens: its output does not name requests without new drafts.
    resolve_adaptive_cudagraph_mode: requires CUDA graphs, even on a CPU.
    CPUWorker.compile_or_warm_up_model: does not profile steps, as a GPU worker does.
With each of our engines, and in `specblock features` (`target_model.py`):
    BaseModelLoader.create_model: builds the layers that are checked before weights are loaded.
    attn_utils.add_kv_sharing_layers_to_kv_cache_groups: leaves a sharing layer without a spec.
With each of our engines (`draft_models.py`):
    Worker.start_draft_weight_update, finish_weight_update: a folded drafter lacks the parameters.
    Worker.sleep: level 2 discards weights that the drafter cannot reload.
In `specblock features` (`offline/target.py`):
    ExtractHiddenStatesSpeculator.propose: does not keep the state after the final norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

Function = Callable[..., Any]

PATCHES: dict[str, Function] = {}
"""Patched name → the original callable."""


def patch(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace `owner.name` by `make(original)`, once."""
    label = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if label in PATCHES:
        return
    static = inspect.getattr_static(owner, name)
    original: Any = static.fget if isinstance(static, property) else getattr(owner, name)
    PATCHES[label] = original
    replacement: Any = wraps(original)(make(original))
    if isinstance(static, classmethod | property):
        replacement = type(static)(replacement)
    setattr(owner, name, replacement)


def replaces(owner: Any, name: str) -> Callable[[Function], Function]:
    """Decorate the function that replaces `owner.name`, once; its first argument is the original.

    Each call costs one more than with `patch`, which is for what runs in every step.
    """

    def decorate(function: Function) -> Function:
        patch(owner, name, lambda given: lambda *args, **more: function(given, *args, **more))
        return function

    return decorate
