"""Acceptance length τ: what it counts, and vLLM's metrics that give it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TOKENS = "vllm:generation_tokens"
REQUESTS = "vllm:time_to_first_token_seconds"
"""A histogram; its count is the requests that have their first token."""
STEPS = "vllm:inter_token_latency_seconds"
"""A histogram; its count is the decode steps."""


def acceptance_length(tokens: float, requests: float, steps: float) -> float:
    """Return τ, the tokens emitted per decode step; 1 where there were no decode steps.

    A decode step is a target forward that gave a request tokens, except its first such forward:
    that one ends the prompt, and its token is not counted either. Without drafts τ is 1.

    - Steps without drafts count, e.g. while drafting is paused.
    - Tokens behind max_tokens, EOS or a stop do not count: the request never gets them.
    - The recomputed prompt of a preempted request is a step of one token.
    - A forward whose result vLLM discards is no step: asynchronous scheduling runs one after a
      request's end.
    - Each of the n sequences of a request is a request here.

    Args:
        tokens: emitted, with the first one of every request.
        requests: those that were given a first token.
        steps: decode steps of all requests.
    """
    return (tokens - requests) / steps if steps else 1.0


def acceptance_length_of(counts: Iterable[Mapping[str, int]]) -> float:
    """Return τ of several counts together, each by vLLM's names.

    Raises:
        KeyError: one of them has no tokens.
    """
    rows = [(each[TOKENS], each.get(REQUESTS, 0), each.get(STEPS, 0)) for each in counts]
    return acceptance_length(*map(sum, zip(*rows)))
