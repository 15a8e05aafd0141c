"""Every option of ours, its default, and the sentence for a wrong one.

The keys stand beside vLLM's own in `speculative_config`: those of the first head and those that
say how two heads go together at the top, those of the second head under `second_head`. Nothing
here imports vLLM; what must be held against the target is in `engine/config/vllm_args.py`.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_specblock.tree import MAX_NODES

logger = logging.getLogger(__name__)

METHOD = "specblock"
"""The value of `speculative_config["method"]` that asks for this plugin."""

DEFAULT_NODES = 60
DEFAULT_NODES_ON_CPU = 12
"""A root and 12 nodes cost a processor's products what one row costs; every row beyond 16 costs."""
"""Draft nodes per request and step when `num_speculative_tokens` is not given (paper, §4.1)."""

VLLM_KEYS = frozenset(
    {
        "method",
        "model",
        "revision",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "enable_adaptive_verification",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)
"""Keys of `speculative_config` that vLLM itself reads and that hold with draft trees."""

SOURCE_KEYS = frozenset({"head", "model", "revision"})
"""Keys that say where a head comes from: its kind, and its checkpoint."""


class OptionError(ValueError):
    """A key of `speculative_config` that cannot be followed; the message is one sentence."""


class Options(BaseModel):
    """Keys of one thing; others are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_Kind = TypeVar("_Kind", bound=Options)


class _DrafterOptions(Options):
    """What holds for every head with weights."""

    calibrate_drafts: bool = True
    """Learn from what is accepted how much surer the target is than the drafter says, and grow
    trees by that. Off: by the drafter's own probabilities, as the papers do."""

    quantization: Literal["fp8"] | None = None
    """Keep the drafter's weights in 8 bits (float8 e4m3, a scale per output): half the bytes that a
    draft has to read. Drafts differ a little from those of the full weights, outputs do not."""


class SpecBlockConfig(_DrafterOptions):
    """How a SpecBlock drafter grows its tree (paper, §3.2; `K` is fixed by the checkpoint)."""

    num_blocks: Annotated[int, Field(ge=1, le=8)] = 2
    """M: drafter forwards per step. The deepest path holds M × K draft tokens. While serving 1 by
    default for trees of fewer than 16 nodes, which one forward fills: with 12 nodes the second took
    two fifths of a step on a processor, for a few per cent more tokens."""

    num_starts: Annotated[int, Field(ge=1, le=32)] = 8
    """S: nodes from which the next block grows; one is always the chain's end."""

    start_order: Literal["score", "rank"] = "score"
    """Which nodes the next block grows from: those of the highest score, or those at positions of
    the lowest predicted rank bucket (the paper's words), by score among equals."""

    branching: Annotated[
        list[Annotated[int, Field(ge=0, le=32)]], Field(min_length=4, max_length=4)
    ] = [4, 8, 16, 16]
    """Children to attach per rank bucket (rank 1, 2–4, 5–10, beyond). 0: neither children
    besides the chain's own node nor a start for the next block. The paper's [2, 4, 6, 4] is
    narrower than what a budget of 60 nodes can hold where the target samples."""


class Eagle3Config(_DrafterOptions):
    """How an EAGLE-3 drafter grows its tree: EAGLE-2's, level by level (arXiv 2406.16858).

    The defaults are those of the authors' release, which counts its `depth` of 7 without the
    first level; but for trees of fewer than 32 nodes, which do not reach so far.
    """

    depth: Annotated[int, Field(ge=1, le=32)] | None = None
    """Drafter forwards per step, and tokens on the longest path. By default a quarter of the tree's
    nodes, from 2 to 8: a tree of 12 accepted no more at depth 8 than at depth 3, and took 1.4 times
    as long on a processor."""

    top_k: Annotated[int, Field(ge=1, le=32)] = 10
    """Nodes of a level that grow children, and children of each. Growing takes a cache slot per
    such node and level after the first, of which there are as many as the tree has nodes: with
    fewer than (depth − 1) × top_k, fewer nodes per level grow."""


class MedusaConfig(_DrafterOptions):
    """Medusa heads draft the best nodes of the product of their distributions."""


class ParallelSpecConfig(_DrafterOptions):
    """ParallelSpec drafts as Medusa does, from positions of one forward."""


class FalconConfig(_DrafterOptions):
    """Falcon drafts a tree of fixed shape, which the checkpoint's hit rates give."""


class SpSConfig(_DrafterOptions):
    """How a small language model drafts, as speculative sampling has it."""

    depth: Annotated[int, Field(ge=1, le=32)] = 5
    """Tokens of its chain. More nodes (`num_speculative_tokens`) than that stay empty."""


class NGramConfig(Options):
    """How the request's own text is looked up."""

    min_match: Annotated[int, Field(ge=1, le=32)] = 1
    """Tokens at the text's end that must have occurred before."""

    max_match: Annotated[int, Field(ge=1, le=32)] = 8
    """Tokens beyond which a longer match counts no more."""

    depth: Annotated[int, Field(ge=1, le=64)] = 16
    """Tokens to take over from an occurrence: the longest path."""

    branches: Annotated[int, Field(ge=1, le=32)] = 8
    """Occurrences that are followed, the longest matches first, the latest of equals."""

    @model_validator(mode="after")
    def _ascending(self) -> NGramConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match is {self.min_match}, but must not be above max_match, {self.max_match}"
            )
        return self


HEADS: dict[str, type[Options]] = {
    "specblock": SpecBlockConfig,
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "parallelspec": ParallelSpecConfig,
    "falcon": FalconConfig,
    "sps": SpSConfig,
    "ngram": NGramConfig,
}
"""Kinds of heads and their options."""


class CombineConfig(Options):
    """How the trees of two heads become one (routing and merged-tree papers)."""

    head_policy: Literal["route", "merge"] = "route"
    """Verify the tree of the surer head, or both trees at once under the root they share."""

    route: Literal["eager", "lazy"] = "eager"
    """Draft both heads in every step, or the second one only where the first is not sure."""

    second_head_cost: Annotated[float, Field(ge=0, le=4)] | None = None
    """For a lazy route: what drafting the second head adds to a step, as a share of its time.
    None: 0.15, or 0.02 for an n-gram head. `benchmarks/two_heads.py` shows how to find it. With
    `skip_drafter` the same of the head that is left out; None: 0.2."""

    confidence: Literal["mean", "sum"] = "mean"
    """What makes a head the surer one: the mean of its nodes' probabilities, as the paper has
    it, or their sum, the number of tokens it expects to be accepted. The mean favours small
    trees."""

    merge: Literal["disjoint", "trie"] = "trie"
    """Keep both trees apart, as the paper does, or join what both of them say."""

    budget: Literal["split", "joint"] = "joint"
    """Half of the nodes for each head, or the best nodes of both, each drafting all of them."""

    skip_drafter: bool | None = None
    """For a merge with an n-gram head and a joint budget, on a CPU: leave the other head out of
    steps for which what was looked up is sure enough. None: there, yes."""


ONE_BLOCK = 16
"""Trees of fewer nodes are one forward's, unless somebody says otherwise."""


OLD_NAMES = {"learn_sharpness": "calibrate_drafts"}
"""Keys that are called otherwise now, and are still taken."""


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
