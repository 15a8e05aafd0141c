"""Resolved configuration: drafters, checkpoints and options, parsed before weights are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
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
from vllm_specblock.engine.config import validate
from vllm_specblock.engine.step_observer import ADAPT, adaptation
from vllm_specblock.options import Options
from vllm_specblock.tree import MAX_NODES


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

    @property
    def adapting(self) -> ResolvedDrafter | None:
        """The drafter that learns while it serves."""
        return next((drafter for drafter in self.drafters if drafter.adapt is not None), None)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the target that some drafter reads, low first."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.layers}))


def keys_of(args: EngineArgs) -> dict[str, Any]:
    """Return the user's `speculative_config`, dashes in keys replaced."""
    return {key.replace("-", "_"): value for key, value in args.speculative_config.items()}


def resolve(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """Return the options, checked against the target and the device.

    Raises:
        OptionError: a wrong key or value; a drafter of another target; drafters or options that do
            not go together.
        CheckpointError: a drafter's files do not match their config.
    """
    given = keys_of(args)
    nodes = given.get("num_speculative_tokens", default_nodes(current_platform.is_cpu()))
    num_speculative_tokens = check_num_nodes(nodes)
    first, second, combining = split_keys(given)
    combine = None if second is None else parse_combine(combining)
    if combine is not None:
        _check_policy(combine, num_speculative_tokens)
    hub = {"token": args.hf_token, "cache_dir": args.download_dir}
    drafters = [
        _resolve_drafter(drafter, target, where, hub, num_speculative_tokens)
        for drafter, where in ((first, ""), (second, "second_drafter."))
        if drafter is not None
    ]
    if second is not None and drafters[0].folder == drafters[1].folder:
        what = drafters[0].folder or "the request's own text (n-gram)"
        raise OptionError(
            f"Both drafters use {what} and would draft the same tokens: change one of them, or "
            "drop second_drafter."
        )
    scheduled = given.get("num_speculative_tokens_per_batch_size") is not None
    default = not scheduled and _can_adapt(args, parallel)
    adaptive = given.get("enable_adaptive_verification", default)
    if not isinstance(adaptive, bool):
        raise OptionError(
            f"speculative_config key 'enable_adaptive_verification' is {adaptive!r}, but must be "
            "true or false."
        )
    resolved = ResolvedConfig(tuple(drafters), num_speculative_tokens, adaptive, combine)
    validate.check_combination(args, resolved, given, parallel)
    resolved = _with_skipping(resolved, parallel)
    validate.check_adapt(resolved, parallel, target)
    return resolved


def _can_adapt(args: EngineArgs, parallel: ParallelConfig) -> bool:
    """Return whether adaptive verification can run; a GPU needs full CUDA graphs for decoding."""
    if args.enable_lora:
        return False
    if current_platform.is_cpu():
        return parallel.tensor_parallel_size == 1
    mode, by_level = args.compilation_config.cudagraph_mode, OptimizationLevel.O2
    full = args.optimization_level >= by_level if mode is None else mode.has_full_cudagraphs()
    return full and not args.enforce_eager and parallel.data_parallel_size == 1


def _with_skipping(resolved: ResolvedConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """Set the default of `skip_drafter`, or raise OptionError if it is true but not supported."""
    combine = resolved.combine
    if combine is None or combine.skip_drafter is False:
        return resolved
    without_weights = sum(drafter.folder is None for drafter in resolved.drafters)
    can = (
        current_platform.is_cpu()
        and parallel.tensor_parallel_size == 1
        and (combine.draft_policy, combine.budget) == ("merge", "joint")
        and without_weights == 1
    )
    if combine.skip_drafter and not can:
        raise OptionError(
            "speculative_config key 'skip_drafter' is true, but it needs a CPU, one process, and "
            "a merge ('draft_policy' 'merge', 'budget' 'joint') with an n-gram drafter: drop the "
            "key."
        )
    return replace(resolved, combine=combine.model_copy(update={"skip_drafter": can}))


def _fetch(model: Any, where: str, **hub: Any) -> Path:
    """Return a drafter's local folder; a hub id is downloaded (config and tensors only)."""
    if not isinstance(model, str) or not model:
        raise OptionError(
            f"speculative_config key '{where}model' is missing: name a SpecBlock, EAGLE-3, "
            "DFlash or JetSpec drafter, as a folder or as a hub id, or give kind 'ngram', which "
            "needs none."
        )
    if os.path.isdir(model):
        return Path(model).resolve()
    try:
        return snapshot(model, DRAFTER_FILES, **hub)
    except CheckpointError as error:
        raise OptionError(
            f"speculative_config key '{where}model' is {model!r}, which is {error}"
        ) from None


def _resolve_drafter(
    given: dict[str, Any],
    target: ModelConfig,
    where: str,
    hub: dict[str, Any],
    num_speculative_tokens: int,
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
    options = parse_drafter(keys, kind, where, num_speculative_tokens)
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
        _check_window(options, config, where)
    return ResolvedDrafter(kind, options, str(folder), layers, adapt)


def _check_policy(combine: CombineConfig, num_speculative_tokens: int) -> None:
    policy = combine.draft_policy
    for key, other in (("confidence", "route"), ("merge", "merge"), ("budget", "merge")):
        if key in combine.model_fields_set and other != policy:
            raise OptionError(
                f"speculative_config key '{key}' goes with draft_policy '{other}', but "
                f"draft_policy is '{policy}': change the one or drop the other."
            )
    combine.shares(num_speculative_tokens)


def _check_window(options: SpecBlockConfig, config: Any, where: str) -> None:
    positions = (options.num_blocks - 1) * options.num_starts * config.block_size
    if positions > MAX_NODES:
        raise OptionError(
            f"{where}num_blocks {options.num_blocks} and {where}num_starts {options.num_starts} "
            f"draft {positions} positions after block 1, but at most {MAX_NODES} are supported "
            f"((num_blocks − 1) × num_starts × {config.block_size}): lower one of them."
        )


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
