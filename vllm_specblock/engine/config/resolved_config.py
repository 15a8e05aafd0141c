"""Resolved configuration: drafters, checkpoints and options, parsed before weights are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, ParallelConfig
from vllm.config.vllm import OptimizationLevel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_specblock.config import (
    SOURCE_KEYS,
    CombineConfig,
    OptionError,
    check_num_nodes,
    default_nodes,
    parse_combine,
    parse_drafter,
    split_keys,
)
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.common.hub import DRAFTER_FILES, snapshot
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.registry import DrafterOptions, drafter_kind
from vllm_specblock.engine.step_observer import ADAPT, adaptation
from vllm_specblock.options import Options
from vllm_specblock.tree import MAX_NODES

BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
"""vLLM's key for a schedule of tree sizes."""


@dataclass(frozen=True)
class ResolvedDrafter:
    """One drafter."""

    kind: str
    options: DrafterOptions
    folder: str | None = None  # of its checkpoint; None: it has no weights
    # The target's layers that it reads; i is the state after i layers, and the number of layers is
    # the input of the LM head.
    layers: tuple[int, ...] = ()
    adapt: Options | None = None  # how it learns while it serves; None: not at all


@dataclass(frozen=True)
class ResolvedConfig:
    """The options of an engine, parsed once; its SpeculativeConfig carries them to its workers."""

    drafters: tuple[ResolvedDrafter, ...]  # one or two
    num_speculative_tokens: int  # N, nodes of one request's tree
    adaptive: bool  # verify as many nodes of the trees as pay, step by step, or always all
    combine: CombineConfig | None = None  # how two drafters go together
    lora: bool = False  # the target has adapters

    @property
    def adapting(self) -> ResolvedDrafter | None:
        """The drafter that learns while it serves."""
        return next((drafter for drafter in self.drafters if drafter.adapt is not None), None)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the target that some drafter reads, low first."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.layers}))


def resolve(
    given: dict[str, Any], args: EngineArgs, target: ModelConfig, parallel: ParallelConfig
) -> ResolvedConfig:
    """Return the options, checked against the target and the device.

    Args:
        given: the user's `speculative_config`, dashes in keys replaced.

    Raises:
        OptionError: a wrong key or value; a drafter of another target; drafters or options that do
            not go together.
        CheckpointError: a drafter's files do not match their config.
    """
    nodes = given.get("num_speculative_tokens", default_nodes(current_platform.is_cpu()))
    num_nodes = check_num_nodes(nodes)
    first, second, combining = split_keys(given)
    hub = {"token": args.hf_token, "cache_dir": args.download_dir}
    drafters = tuple(
        _resolve_drafter(drafter, target, where, hub, num_nodes)
        for drafter, where in ((first, ""), (second, "second_drafter."))
        if drafter is not None
    )
    combine = None
    if second is not None:
        combine = _resolve_combination(combining, drafters, num_nodes, parallel)
    adaptive = _is_adaptive(given, args, target, parallel)
    resolved = ResolvedConfig(drafters, num_nodes, adaptive, combine, args.enable_lora)
    tokens = args.max_num_batched_tokens
    if tokens is not None and tokens <= num_nodes:
        raise OptionError(
            f"max_num_batched_tokens is {tokens}, but one tree needs {num_nodes + 1} tokens "
            f"({num_nodes} nodes and a root): raise it, or lower num_speculative_tokens."
        )
    if resolved.adapting is not None:
        if args.enable_lora:
            raise OptionError(
                "speculative_config key 'adapt' is given and enable_lora is set, but the trainer "
                "loads the target without adapters: drop one of them."
            )
        count = parallel.world_size * parallel.data_parallel_size_local
        gpus = range(0 if current_platform.is_cpu() else count)
        adaptation("options").check_adapt(resolved, parallel, target, gpus)
    return resolved


def _is_adaptive(
    given: dict[str, Any], args: EngineArgs, target: ModelConfig, parallel: ParallelConfig
) -> bool:
    """Return whether steps verify adaptively; by default where it can, on a GPU in full graphs."""
    ranks, on_cpu, conflict = parallel.tensor_parallel_size, current_platform.is_cpu(), ""
    if args.enable_lora:
        conflict = "enable_lora is set, but vLLM maps tokens to adapters before budgets are known"
    elif on_cpu and ranks > 1:  # and they might decide differently
        conflict = f"tensor_parallel_size is {ranks}, but CPU ranks would measure their own costs"
    elif target.is_hybrid and not on_cpu:
        conflict = "the target has recurrent layers, which a GPU runs outside of full CUDA graphs"
    mode, by_level = args.compilation_config.cudagraph_mode, OptimizationLevel.O2
    full = args.optimization_level >= by_level if mode is None else mode.has_full_cudagraphs()
    # Data-parallel ranks of an MoE all run as many rows as the largest of them.
    padded = parallel.data_parallel_size > 1 and target.is_moe
    graphs = full and not args.enforce_eager and not padded
    default = (on_cpu or graphs) and not conflict and given.get(BY_BATCH_SIZE) is None
    adaptive = given.get("enable_adaptive_verification", default)
    key = "speculative_config key 'enable_adaptive_verification' is"
    if not isinstance(adaptive, bool):
        raise OptionError(f"{key} {adaptive!r}, but must be true or false.")
    if adaptive and conflict:
        raise OptionError(f"{key} true and {conflict}: drop one of them.")
    return adaptive


def _resolve_combination(
    given: dict[str, Any],
    drafters: tuple[ResolvedDrafter, ...],
    num_nodes: int,
    parallel: ParallelConfig,
) -> CombineConfig:
    """Return how two drafters go together, with the default of `skip_drafter`."""
    combine, folders = parse_combine(given), [drafter.folder for drafter in drafters]
    if folders[0] == folders[1]:
        what = folders[0] or "the request's own text (n-gram)"
        raise OptionError(
            f"Both drafters use {what} and would draft the same tokens: change one of them, or "
            "drop second_drafter."
        )
    policy = combine.draft_policy
    for key, other in (("confidence", "route"), ("merge", "merge"), ("budget", "merge")):
        if key in combine.model_fields_set and other != policy:
            raise OptionError(
                f"speculative_config key '{key}' goes with draft_policy '{other}', but "
                f"draft_policy is '{policy}': change draft_policy, or drop {key}."
            )
    combine.shares(num_nodes)  # raises
    alone = current_platform.is_cpu() and parallel.tensor_parallel_size == 1
    joint = (policy, combine.budget) == ("merge", "joint")
    can = alone and joint and None in folders
    if combine.skip_drafter and not can:
        raise OptionError(
            "speculative_config key 'skip_drafter' is true, but it needs a CPU, one process, and "
            "a merge ('draft_policy' 'merge', 'budget' 'joint') with an n-gram drafter: drop the "
            "key."
        )
    skips = can and combine.skip_drafter is not False
    return combine.model_copy(update={"skip_drafter": skips})


def _resolve_drafter(
    given: dict[str, Any], target: ModelConfig, where: str, hub: dict[str, Any], num_nodes: int
) -> ResolvedDrafter:
    kind, folder = given.get("kind"), None
    if kind is None or drafter_kind(kind).checkpoint is not None:
        folder = _fetch(given.get("model"), where, revision=given.get("revision"), **hub)
        found = kind_of(folder)
        if kind not in (None, found):
            raise OptionError(
                f"speculative_config key '{where}kind' is {kind!r}, but {given['model']!r} holds a "
                f"drafter of kind {found!r}: drop 'kind', or name another drafter."
            )
        kind = found
    keys = {key: value for key, value in given.items() if key not in SOURCE_KEYS}
    adapt = keys.pop(ADAPT, False)
    adapt = None if adapt is False else adaptation("options").parse_adapt(adapt, kind, where)
    options = parse_drafter(keys, kind, where, num_nodes)
    if folder is None:
        for key in ("model", "revision"):
            if given.get(key) is not None:
                raise OptionError(
                    f"speculative_config key '{where}{key}' is {given[key]!r}, but a drafter "
                    f"of kind {kind!r} has no weights: drop the one or the other."
                )
        return ResolvedDrafter(kind, options)
    files = drafter_kind(kind).load_checkpoint_module()
    config = files.read_config(folder)
    layers = _check_match(config, target, where)
    files.check_tensors(folder, config)
    if isinstance(options, SpecBlockConfig):
        positions = (options.num_blocks - 1) * options.num_starts * config.block_size
        if positions > MAX_NODES:
            raise OptionError(
                f"{where}num_blocks {options.num_blocks} and {where}num_starts "
                f"{options.num_starts} draft {positions} positions after block 1, but at most "
                f"{MAX_NODES} are supported ((num_blocks − 1) × num_starts × {config.block_size}): "
                "lower one of them."
            )
    old = current_platform.is_cuda() and not current_platform.has_device_capability(89)
    if old and getattr(options, "quantization", None) == "fp8":
        raise OptionError(
            f"speculative_config key '{where}quantization' is 'fp8', but this GPU has no float8 "
            "(compute capability 8.9 or later): drop the key."
        )
    return ResolvedDrafter(kind, options, str(folder), layers, adapt)


def _fetch(model: Any, where: str, **hub: Any) -> Path:
    """Return a drafter's local folder; a hub id is downloaded (config and tensors only)."""
    if not isinstance(model, str) or not model:
        raise OptionError(
            f"speculative_config key '{where}model' is missing: name a drafter, SpecBlock's or "
            "another method's, as a folder or as a hub id, or give kind 'ngram', which needs none."
        )
    if os.path.isdir(model):
        return Path(model).resolve()
    try:
        return snapshot(model, DRAFTER_FILES, **hub)
    except CheckpointError as error:
        raise OptionError(
            f"speculative_config key '{where}model' is {model!r}, which is {error}"
        ) from None


def _check_match(config: Any, target: ModelConfig, where: str) -> tuple[int, ...]:
    """Check a drafter against the target; return the target layers that it reads."""
    whose = "The drafter of second_drafter" if where else "The drafter"
    for what, made_for, found in (
        ("hidden size", config.target_hidden_size, target.get_hidden_size()),
        ("vocabulary size", config.vocab_size, target.get_vocab_size()),
    ):
        if made_for not in (None, found):  # None: a drafter that reads no states
            raise OptionError(
                f"{whose} was made for a target of {what} {made_for}, but "
                f"{target.model!r} has {found}: use a drafter of this target."
            )
    layers = target.hf_text_config.num_hidden_layers
    layer_ids = config.target_layers(layers)
    # The output of all layers is only read for what follows it.
    if layer_ids != (layers,) and max(layer_ids, default=0) >= layers:
        raise OptionError(
            f"{whose} reads target layers {list(layer_ids)}, but {target.model!r} has only "
            f"layers 0 to {layers - 1}: use a drafter of this target."
        )
    return tuple(layer_ids)
