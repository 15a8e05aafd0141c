"""The difference between a reply and plain vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lib.soak_client import Choice, Reply
from lib.soak_traffic import Call

LOGPROB_TOLERANCE = 1e-3
"""Nats: the two engines attend in another order of summation."""


def difference(call: Call, ours: Reply, plain: Reply) -> str | None:
    """Return what differs between two replies to one request; None: nothing.

    A reply whose client left has to be the beginning of plain vLLM's.
    """
    if ours.left and not ours.choices:
        return None
    if ours.status != plain.status:
        return f"status {ours.status}, not {plain.status}: {ours.error}"
    if call.refused:
        return None if 400 <= ours.status < 500 else f"status {ours.status} for a wrong request"
    if plain.error is not None:
        return f"plain vLLM failed: {plain.error}"
    if ours.status != 200 or ours.error:
        return f"status {ours.status}: {ours.error}"
    if not ours.left and ours.choices.keys() != plain.choices.keys():
        return f"answers {[*ours.choices]}, not {[*plain.choices]}"
    for index, choice in ours.choices.items():
        said = _of_choice(choice, plain.choices[index], ours.left)
        if said is not None:
            return f"answer {index}: {said}"
    return None if ours.left else _apart(ours.usage, plain.usage, "usage")


def _of_choice(ours: Choice, plain: Choice, cut: bool) -> str | None:
    for name in ("tokens", "text"):
        mine, right = getattr(ours, name), getattr(plain, name)
        if mine != (right[: len(mine)] if cut else right):
            at = next((i for i, (a, b) in enumerate(zip(mine, right)) if a != b), None)
            where = min(len(mine), len(right)) if at is None else at
            return f"{name} differ from place {where} on"
    return None if cut else _apart(asdict(ours), asdict(plain))


def _apart(ours: Any, plain: Any, where: str = "") -> str | None:
    """Return where two values of JSON's types differ, log-probabilities by more than rounding."""
    if isinstance(ours, float) and isinstance(plain, float):
        if abs(ours - plain) <= LOGPROB_TOLERANCE:
            return None
    elif isinstance(ours, list) and isinstance(plain, list) and len(ours) == len(plain):
        found = (_apart(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(ours, plain)))
        return next(filter(None, found), None)
    elif isinstance(ours, dict) and isinstance(plain, dict):
        if _same_keys(ours, plain):
            both = [key for key in ours if key in plain]
            found = (_apart(ours[key], plain[key], f"{where}.{key}") for key in both)
            return next(filter(None, found), None)
    elif ours == plain:
        return None
    return f"{where.lstrip('.')} is {ours!r}, not {plain!r}"


def _same_keys(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Whether both have the same keys; among the best tokens a tie may replace the last."""
    apart = [{**ours, **plain}[key] for key in ours.keys() ^ plain.keys()]
    if len(ours) != len(plain) or not all(isinstance(each, float) for each in apart):
        return not apart
    return all(abs(each - min(plain.values())) <= LOGPROB_TOLERANCE for each in apart)
