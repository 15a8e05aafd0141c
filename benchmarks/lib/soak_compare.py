"""Whether an answer under fire is plain vLLM's, and in what it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from lib.soak_client import Choice, Logprob, Reply
from lib.soak_traffic import Call

LOGPROB_TOLERANCE = 1e-3
"""Nats: the two engines attend in another order of summation."""


def difference(call: Call, ours: Reply, plain: Reply) -> str | None:
    """What differs between two replies to one request; None: nothing.

    What came of a request that was cut has to be the beginning of plain vLLM's answer.
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
    if not ours.cut and ours.choices.keys() != plain.choices.keys():
        return f"answers {[*ours.choices]}, not {[*plain.choices]}"
    for index, choice in ours.choices.items():
        said = _of_choice(choice, plain.choices[index], ours.left or choice.aborted)
        if said is not None:
            return f"answer {index}: {said}"
    if not ours.cut and ours.usage != plain.usage:
        return f"usage {ours.usage}, not {plain.usage}"
    return None


def _of_choice(ours: Choice, plain: Choice, cut: bool) -> str | None:
    for name in ("tokens", "text"):
        mine, right = getattr(ours, name), getattr(plain, name)
        if mine != (right[: len(mine)] if cut else right):
            at = next((i for i, (a, b) in enumerate(zip(mine, right)) if a != b), None)
            where = min(len(mine), len(right)) if at is None else at
            return f"{name} differ from place {where} on"
    if cut:
        return None
    for name in ("finish_reason", "stop_reason"):
        mine, right = getattr(ours, name), getattr(plain, name)
        if mine != right:
            return f"{name} is {mine!r}, not {right!r}"
    return _of_logprobs(ours.logprobs, plain.logprobs) or _of_prompt(
        ours.prompt_logprobs, plain.prompt_logprobs
    )


def _of_logprobs(ours: Sequence[Logprob], plain: Sequence[Logprob]) -> str | None:
    if len(ours) != len(plain):
        return f"{len(ours)} log-probabilities, not {len(plain)}"
    for place, (mine, right) in enumerate(zip(ours, plain)):
        if mine.token != right.token:
            return f"log-probability {place} is of {mine.token!r}, not of {right.token!r}"
        both = ({"value": each.value} if each.value is not None else {} for each in (mine, right))
        said = _apart(*both) or _apart(mine.best, right.best)
        if said is not None:
            return f"log-probability {place}: {said}"
    return None


def _of_prompt(
    ours: Sequence[Mapping[str, float] | None], plain: Sequence[Mapping[str, float] | None]
) -> str | None:
    if len(ours) != len(plain):
        return f"{len(ours)} log-probabilities of the prompt, not {len(plain)}"
    for place, (mine, right) in enumerate(zip(ours, plain)):
        said = _apart(mine or {}, right or {})
        if said is not None:
            return f"log-probability {place} of the prompt: {said}"
    return None


def _apart(ours: Mapping[str, float], plain: Mapping[str, float]) -> str | None:
    """Values of the same tokens, and who is among the best: only a tie may swap the last."""
    if len(ours) != len(plain):
        return f"{len(ours)} tokens, not {len(plain)}"
    for token in ours.keys() & plain.keys():
        if abs(ours[token] - plain[token]) > LOGPROB_TOLERANCE:
            return f"{token!r} has {ours[token]:.5f}, not {plain[token]:.5f}"
    for token in ours.keys() ^ plain.keys():
        if abs({**ours, **plain}[token] - min(plain.values())) > LOGPROB_TOLERANCE:
            return f"{token!r} is among the best of one only"
    return None


def record(call: Call, said: str, ours: Reply, plain: Reply) -> dict[str, object]:
    """A difference as JSON's types: the request, what differs, and both replies."""
    body = call.body.decode() if isinstance(call.body, bytes) else call.body
    return {
        "request": call.key,
        "kinds": call.kinds,
        "says": said,
        "path": call.path,
        "body": body,
        "ours": asdict(ours),
        "plain": asdict(plain),
    }
