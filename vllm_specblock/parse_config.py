"""From the keys of `speculative_config` to options, and one sentence for a wrong key.

Nothing here imports vLLM; what must be held against the target is in
`engine/config/vllm_args.py`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar, overload

from pydantic import ValidationError

from vllm_specblock.config import (
    HEADS,
    SOURCE_KEYS,
    VLLM_KEYS,
    CombineConfig,
    Eagle3Config,
    OptionError,
    Options,
    SpecBlockConfig,
)
from vllm_specblock.tree import MAX_NODES

logger = logging.getLogger(__name__)

ONE_BLOCK = 16
"""Trees of fewer nodes are one forward's, unless somebody says otherwise."""

OLD_NAMES = {"learn_sharpness": "calibrate_drafts"}
"""Keys that are called otherwise now, and are still taken."""

_Kind = TypeVar("_Kind", bound=Options)


def _with_new_names(given: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    for old, new in OLD_NAMES.items():
        if old not in given or new not in HEADS[kind].model_fields:
            continue
        if new in given:
            raise OptionError(
                f"speculative_config keys '{where}{old}' and '{where}{new}' are one option, but "
                "both are given: drop the former."
            )
        logger.warning(
            "speculative_config key '%s%s' is deprecated: it is called '%s' now.", where, old, new
        )
        given = {new if key == old else key: value for key, value in given.items()}
    return given


@overload
def parse_head(
    given: dict[str, Any],
    kind: Literal["specblock"],
    where: str = "",
    num_nodes: int | None = None,
) -> SpecBlockConfig: ...
@overload
def parse_head(
    given: dict[str, Any], kind: Literal["eagle3"], where: str = "", num_nodes: int | None = None
) -> Eagle3Config: ...
@overload
def parse_head(
    given: dict[str, Any], kind: str, where: str = "", num_nodes: int | None = None
) -> Options: ...
def parse_head(
    given: dict[str, Any], kind: str, where: str = "", num_nodes: int | None = None
) -> Options:
    """The options of one head, checked.

    Args:
        given: its keys, without those of `SOURCE_KEYS`.
        kind: one of `HEADS`.
        where: put before a key in messages, e.g. "second_head.".
        num_nodes: of its trees, by which the default of `num_blocks` goes.

    Raises:
        OptionError: an unknown key, a wrong type or a value out of range. One sentence that
            names the key, what was given and what is accepted.
    """
    given = _with_new_names(given, kind, where)
    if kind == "specblock" and num_nodes is not None and num_nodes < ONE_BLOCK:
        given = {"num_blocks": 1} | given
    return parse_options(HEADS[kind], given, where, f" of a head of kind {kind!r}")


def parse_combine(given: dict[str, Any]) -> CombineConfig:
    """How two heads go together; as `parse_head`."""
    return parse_options(CombineConfig, given, "", "")


def split_keys(
    given: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """A `speculative_config` as (first head, second head or None, how they go together).

    Raises:
        OptionError: `second_head` is no dictionary; keys for two heads are given without it;
            an unknown kind of head.
    """
    ours = {k: v for k, v in given.items() if k not in VLLM_KEYS or k in SOURCE_KEYS}
    second = ours.pop("second_head", None)
    combine = {k: ours.pop(k) for k in list(ours) if k in CombineConfig.model_fields}
    if second is not None and not isinstance(second, dict):
        raise OptionError(
            f"speculative_config key 'second_head' is {second!r}, but must be a dictionary, such "
            'as {"model": DRAFTER} or {"head": "ngram"}.'
        )
    if combine and second is None:
        raise OptionError(
            f"speculative_config key '{next(iter(combine))}' says how two heads go together, but "
            "there is one: name the other under 'second_head', or drop the key."
        )
    if second is not None:
        second = {key.replace("-", "_"): value for key, value in second.items()}
    for head, where in ((ours, ""), (second or {}, "second_head.")):
        kind = head.get("head")
        if kind is not None and kind not in HEADS:
            raise OptionError(
                f"speculative_config key '{where}head' is {kind!r}, but must be one of "
                f"{', '.join(HEADS)}."
            )
    return ours, second, combine


def check_num_nodes(value: Any) -> int:
    """`num_speculative_tokens`: the nodes N of one request's tree.

    Raises:
        OptionError: not a whole number in 1 … 256 (the ancestor mask holds 256 nodes).
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NODES:
        raise OptionError(
            f"speculative_config key 'num_speculative_tokens' is {value!r}, but it must be a "
            f"whole number from 1 to {MAX_NODES} (nodes of one request's draft tree)."
        )
    return value


def parse_options(model: type[_Kind], given: dict[str, Any], where: str, whose: str) -> _Kind:
    """Keys as a model has them.

    Args:
        where: put before a key in messages.
        whose: says after "accepted" what accepts them.

    Raises:
        OptionError: one sentence on the first wrong one.
    """
    try:
        return model(**given)
    except ValidationError as error:
        raise OptionError(_sentence(error, model, where, whose)) from None


def _sentence(error: ValidationError, model: type[Options], where: str, whose: str) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":
        return f"speculative_config: {where}{first['ctx']['error']}."
    key, *inside = first["loc"]
    name = f"'{where}{key}'" + (f" (entry {inside[0]})" if inside else "")
    if first["type"] == "extra_forbidden":
        known = set(model.model_fields)
        if model in HEADS.values():
            known |= SOURCE_KEYS | ({"adapt"} if model is SpecBlockConfig else set())
        if not where:
            known |= {*VLLM_KEYS, *CombineConfig.model_fields, "second_head"}
        return (
            f"speculative_config key {name} is not known; accepted{whose} are: "
            f"{', '.join(sorted(known))}."
        )
    expected = first["msg"].removeprefix("Input should be ").removeprefix("List should have ")
    return f"speculative_config key {name} is {first['input']!r}, but must be {expected}."
