"""Options of SpecBlock, their defaults and error messages.

`speculative_config` holds the keys of the first drafter (`drafters/options.py`) and of the
combination beside vLLM's own, and those of the second drafter under `second_drafter`. Nothing here
imports vLLM; `engine/config/vllm_args.py` checks options against the target.
"""

from __future__ import annotations

from typing import Any, Literal

from vllm_specblock.drafters.registry import DRAFTERS, drafter_kind
from vllm_specblock.options import OptionError as OptionError
from vllm_specblock.options import Options, parse_options
from vllm_specblock.tree import MAX_NODES

METHOD = "specblock"
"""The value of `speculative_config["method"]` that selects SpecBlock."""

DEFAULT_NODES = 60
"""Draft nodes per request and step when `num_speculative_tokens` is not given (paper, §4.1)."""


def default_nodes(on_cpu: bool) -> int:
    """Return the nodes of a tree when `num_speculative_tokens` is not given.

    With AVX-512, products of a root and 12 nodes cost about as much as of one row, those beyond 16
    rows more; with AVX2 they cost twice to three times as much.
    """
    return 12 if on_cpu else DEFAULT_NODES


VLLM_KEYS = frozenset(
    {
        "method",
        "model",
        "revision",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "enable_adaptive_verification",
        "rejection_sample_method",
    }
)
"""Keys of `speculative_config` that vLLM itself reads and that work with draft trees."""

SOURCE_KEYS = frozenset({"kind", "model", "revision"})
"""Keys for a drafter's kind and checkpoint."""


class CombineConfig(Options):
    """Combination of two drafters' trees (routing and merged-tree papers)."""

    draft_policy: Literal["route", "merge"] = "route"
    """Verify the tree of the more confident drafter, or both trees under one root."""

    confidence: Literal["mean", "sum"] = "mean"
    """Confidence of a tree: the mean of its nodes' probabilities, as in the paper, or their sum,
    the expected number of accepted tokens. The mean favours small trees."""

    merge: Literal["disjoint", "trie"] = "trie"
    """Keep both trees apart, as in the paper, or join equal paths."""

    budget: Literal["split", "joint"] = "joint"
    """Each drafter fills half of the N nodes, or each drafts N and the best N are verified."""

    skip_drafter: bool | None = None
    """Skip the drafter with weights in steps where n-gram lookup is confident enough. Default: true
    where possible: a merge with a joint budget, on a CPU, in one process."""

    def shares(self, num_nodes: int) -> tuple[int, int]:
        """Return the nodes that each drafter drafts, for a verified tree of `num_nodes`.

        With routing or a joint budget, either drafter may need all of them. Raises OptionError for
        a split of fewer than two.
        """
        if self.draft_policy == "route" or self.budget == "joint":
            return num_nodes, num_nodes
        if num_nodes < 2:
            raise OptionError(
                f"A budget of {num_nodes} cannot be split between two drafters, each of which "
                "needs at least one node: raise num_speculative_tokens to 2 or more, or set budget "
                "to 'joint'."
            )
        return num_nodes - num_nodes // 2, num_nodes // 2


AT_THE_TOP = frozenset({*VLLM_KEYS, *CombineConfig.model_fields, "second_drafter"})
"""Keys beside those of the first drafter."""


def parse_drafter(
    given: dict[str, Any], kind: str, where: str = "", num_nodes: int | None = None
) -> Any:
    """Return the checked options of one drafter, of its kind's class; raises as `parse_options`.

    Args:
        given: its keys, without those of `SOURCE_KEYS`.
        where: put before a key in messages, e.g. "second_drafter.".
        num_nodes: of its trees; some defaults depend on it.
    """
    named = drafter_kind(kind)
    if num_nodes is not None:
        given = named.options.defaults_for(num_nodes) | given
    beside = SOURCE_KEYS | frozenset({"adapt"} if named.adapts else ())
    if not where:
        beside |= AT_THE_TOP
    return parse_options(named.options, given, where, f" of a drafter of kind {kind!r}", beside)


def parse_combine(given: dict[str, Any]) -> CombineConfig:
    """Return the checked options of a combination; see `parse_drafter`."""
    return parse_options(CombineConfig, given, "", "", AT_THE_TOP)


def split_keys(
    given: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """Split a `speculative_config` into (first drafter, second or None, combination).

    Raises OptionError if they do not go together.
    """
    ours = {k: v for k, v in given.items() if k not in VLLM_KEYS or k in SOURCE_KEYS}
    second = ours.pop("second_drafter", None)
    combine = {k: ours.pop(k) for k in list(ours) if k in CombineConfig.model_fields}
    if second is not None and not isinstance(second, dict):
        raise OptionError(
            f"speculative_config key 'second_drafter' is {second!r}, but must be a dictionary, "
            'such as {"model": DRAFTER} or {"kind": "ngram"}.'
        )
    if combine and second is None:
        raise OptionError(
            f"speculative_config key '{next(iter(combine))}' combines two drafters, but there is "
            "one: add 'second_drafter', or drop the key."
        )
    if second is not None:
        second = {key.replace("-", "_"): value for key, value in second.items()}
    for drafter, where in ((ours, ""), (second or {}, "second_drafter.")):
        kind = drafter.get("kind")
        if kind is not None and not (isinstance(kind, str) and kind in DRAFTERS):
            raise OptionError(
                f"speculative_config key '{where}kind' is {kind!r}, but must be one of "
                f"{', '.join(DRAFTERS)}."
            )
    return ours, second, combine


def check_num_nodes(value: Any) -> int:
    """Return `num_speculative_tokens`, the nodes N of one request's tree, or raise OptionError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NODES:
        raise OptionError(
            f"speculative_config key 'num_speculative_tokens' is {value!r}, but it must be a "
            f"whole number from 1 to {MAX_NODES} (nodes of one request's draft tree)."
        )
    return value
