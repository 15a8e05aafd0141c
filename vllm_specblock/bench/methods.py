"""Methods of the table by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specblock.bench.config import BenchConfig, BenchError, MethodSpec
from vllm_specblock.config import METHOD

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_V2: dict[str, str | None] = {RUNNER: "1"}
_FOLDER = re.compile(r'"\{([\w-]+)\}"')


def _tree(**keys: Any) -> MethodSpec:
    fixed = {"method": METHOD, "enable_adaptive_verification": False}
    return MethodSpec(speculative=fixed | keys, env=_V2)


def _two(second: dict[str, str], **how: str) -> MethodSpec:
    return _tree(model="{specblock}", second_drafter=second, **how)


_EAGLE, _LOOKUP = {"model": "{eagle3}"}, {"kind": "ngram"}

BUILT_IN: dict[str, MethodSpec] = {
    # vLLM's default runner.
    "plain": MethodSpec(env={RUNNER: None}),
    "plain-v2": MethodSpec(env=_V2),
    "ngram": _tree(kind="ngram"),
    **{
        name: _tree(model=f"{{{name}}}")
        for name in ("medusa", "parallelspec", "falcon", "eagle3", "dflash", "jetspec", "specblock")
    },
    # vLLM's own drafting and rejection sampling: one path.
    "eagle3-chain": MethodSpec(
        speculative={"method": "eagle3", "model": "{eagle3}", "num_speculative_tokens": 3}, env=_V2
    ),
    "sps": MethodSpec(
        speculative={"method": "draft_model", "model": "{sps}", "num_speculative_tokens": 5},
        env=_V2,
    ),
    "route": _two(_EAGLE, draft_policy="route"),
    "route-ngram": _two(_LOOKUP, draft_policy="route"),
    "merge": _two(_EAGLE, draft_policy="merge"),
    "merge-ngram": _two(_LOOKUP, draft_policy="merge"),
    # The pair of the merged-tree paper itself.
    "merge-disjoint": _two(_EAGLE, draft_policy="merge", merge="disjoint", budget="split"),
    "adaptive": _tree(model="{specblock}", enable_adaptive_verification=True),
}


def resolve(config: BenchConfig) -> dict[str, MethodSpec]:
    """Return the chosen methods by name, plain vLLM first, without bases and "{NAME}".

    Raises BenchError: an unknown method or base, a missing drafter, or no plain vLLM.
    """
    found = {name: _resolve(name, config) for name in config.method}
    if all(method.speculative for method in found.values()):
        raise BenchError(
            "Speed-ups are relative to plain vLLM, which is not among the methods: add --method "
            "plain or --method plain-v2."
        )
    return dict(sorted(found.items(), key=lambda named: bool(named[1].speculative)))


def _resolve(name: str, config: BenchConfig) -> MethodSpec:
    spec = _known(name, BUILT_IN | config.define)
    if spec.base is not None:
        base = _known(spec.base, BUILT_IN)
        spec = MethodSpec(
            speculative=_changed(base.speculative, spec.speculative),
            engine=_changed(base.engine, spec.engine),
            env=base.env | spec.env,
        )
    speculative = json.loads(_put_folders(json.dumps(spec.speculative), name, config.drafter))
    if speculative and "method" not in speculative:
        raise BenchError(
            f"The method {name} has a speculative_config without 'method': give it "
            f'"method": "{METHOD}", or a base.'
        )
    if speculative.get("method") == METHOD and config.nodes is not None:
        speculative = {"num_speculative_tokens": config.nodes} | speculative
    return spec.model_copy(update={"speculative": speculative})


def _known(name: str, methods: Mapping[str, MethodSpec]) -> MethodSpec:
    if name not in methods:
        raise BenchError(f"There is no method {name}; there are {', '.join(methods)}.")
    return methods[name]


def _changed(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (base | change).items() if value is not None}


def _put_folders(text: str, name: str, drafters: dict[str, Path]) -> str:
    """Return JSON text with folders in place of "{NAME}"."""

    def folder_of(found: re.Match[str]) -> str:
        folder = drafters.get(found[1])
        if folder is None:
            raise BenchError(f"The method {name} needs --drafter {found[1]}=FOLDER.")
        if not folder.is_dir():
            raise BenchError(f"The drafter {found[1]}={folder} is not a folder.")
        return json.dumps(str(folder))

    return _FOLDER.sub(folder_of, text)
