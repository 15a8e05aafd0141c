"""Replies held against each other: what is the same, and every way in which one is not."""

from __future__ import annotations

from copy import deepcopy

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

from lib.soak_replies import Choice, Reply, difference
from lib.soak_traffic import COMPLETIONS, Call

CALL = Call("0.1", ("short",), COMPLETIONS, {"prompt": "x"})


BEST = {"token_id:5": -0.5, "token_id:9": -2.0}


def reply() -> Reply:
    said = Choice(
        text="a tree",
        tokens=[5, 6, 7],
        finish_reason="stop",
        stop_reason=7,
        logprobs=[{"token": "token_id:5", "logprob": -0.5, "best": BEST}],
        prompt_logprobs=[None, {"3": -1.0, "4": -3.0}],
    )
    return Reply(200, {0: said, 1: deepcopy(said)}, {"completion_tokens": 3})


def change(path: str, value):
    changed = reply()
    *parts, last = path.split(".")
    at = changed
    for part in parts:
        at = at[int(part)] if part.isdigit() else getattr(at, part)
    if last.isdigit() or isinstance(at, dict):
        at[int(last) if last.isdigit() else last] = value
    else:
        setattr(at, last, value)
    return changed


CHANGES = {
    "status": 500,
    "choices.1.tokens.2": 8,
    "choices.0.tokens": [5, 6],
    "choices.0.text": "a trees",
    "choices.1.finish_reason": "length",
    "choices.0.stop_reason": None,
    "choices.0.logprobs": [],
    "choices.0.logprobs.0.logprob": -0.502,
    "choices.0.logprobs.0.token": "token_id:6",
    "choices.0.logprobs.0.best": {"token_id:5": -0.5, "token_id:8": -1.5},
    "choices.0.prompt_logprobs.1": {"3": -1.1, "4": -3.0},
    "choices.0.prompt_logprobs": [None],
    "usage": {"completion_tokens": 4},
    "error": "the stream broke off",
    "choices": {},
}


@pytest.mark.parametrize("path", CHANGES)
def test_every_difference_is_seen(path):
    assert difference(CALL, change(path, CHANGES[path]), reply()) is not None


def test_rounding_is_no_difference():
    path = "choices.0.logprobs.0"
    assert difference(CALL, change(f"{path}.logprob", -0.5002), reply()) is None
    tied = {"token_id:5": -0.5, "token_id:8": -2.0003}
    assert difference(CALL, change(f"{path}.best", tied), reply()) is None


def test_a_reply_whose_client_left_has_to_be_a_beginning():
    ours = reply()
    del ours.choices[1]
    ours.choices[0] = Choice("a t", [5, 6])
    ours.usage, ours.left = {}, True
    assert difference(CALL, ours, reply()) is None
    ours.choices[0].tokens = [5, 7]
    assert "answer 0 is no beginning" in difference(CALL, ours, reply())
    assert difference(CALL, Reply(left=True), reply()) is None, "nothing had come"
    assert difference(CALL, Reply(error="ServerDisconnectedError"), reply()) is not None
