"""HTTP clients of a server, some of which leave early, and the difference between two replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from lib.soak_traffic import Call

PATIENCE = 600.0
"""Seconds after which a missing answer is an error."""
LOGPROB_TOLERANCE = 1e-3
"""Nats: the two engines attend in another order of summation."""


@dataclass
class Choice:
    """One of a request's answers, as far as it came."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[str, float] | None] = field(default_factory=list)


@dataclass
class Reply:
    """A reply as its client has it.

    Attributes:
        status: of HTTP; 0: the connection broke.
        left: the client went before the end.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    left: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Add a whole response, or one event of a stream."""
        if "error" in event:
            self.error = json.dumps(event["error"])
        for said in event.get("choices", ()):
            choice = self.choices.setdefault(said["index"], Choice())
            message = said.get("message") or said.get("delta") or said
            choice.text += message.get("text") or message.get("content") or ""
            choice.tokens += said.get("token_ids") or []
            choice.finish_reason = said.get("finish_reason") or choice.finish_reason
            if said.get("stop_reason") is not None:
                choice.stop_reason = said["stop_reason"]
            choice.logprobs += _logprobs(said.get("logprobs") or {"tokens": ()})
            choice.prompt_logprobs += [
                place and {token: each["logprob"] for token, each in place.items()}
                for place in said.get("prompt_logprobs") or ()
            ]
        usage = event.get("usage") or {}
        self.usage |= {name: usage[name] for name in usage if name.endswith("_tokens")}


def _logprobs(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Each place's token, its log-probability and the best tokens', of a completion or a chat."""
    if "content" in said:
        places = [
            (
                each["token"],
                each["logprob"],
                {b["token"]: b["logprob"] for b in each["top_logprobs"]},
            )
            for each in said["content"] or ()
        ]
    else:
        places = [*zip(*(said.get(k, ()) for k in ("tokens", "token_logprobs", "top_logprobs")))]
    return [dict(zip(("token", "logprob", "best"), place)) for place in places]


async def ask(session: aiohttp.ClientSession, address: str, call: Call) -> Reply:
    """Return the reply to one request, as far as its client waits for it."""
    reply = Reply()
    raw = call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(call.patience or PATIENCE),
            session.post(f"{address}{call.path}", data=raw, headers=headers) as response,
        ):
            reply.status = response.status
            if response.content_type == "text/event-stream":
                await _read_stream(response, call, reply)
            else:
                reply.take(await response.json())
    except TimeoutError:
        reply.left = call.patience is not None
        reply.error = None if reply.left else f"no answer within {PATIENCE:.0f} s"
    except (aiohttp.ClientError, ValueError) as error:
        reply.status, reply.error = 0, f"{type(error).__name__}: {error}"
    return reply


async def _read_stream(response: aiohttp.ClientResponse, call: Call, reply: Reply) -> None:
    events = 0
    while line := await response.content.readline():
        if events == call.leaves_after:
            reply.left = True
            response.close()  # or the connection would be read to its end and kept
            return
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            events += 1
            reply.take(json.loads(line.removeprefix(b"data: ")))
    reply.error = reply.error or "the stream broke off"


async def ask_all(address: str, calls: Sequence[Call], clients: int) -> list[Reply]:
    """Return the replies to all requests in order; `clients` of them run at a time."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    free = asyncio.Semaphore(clients)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(call: Call) -> Reply:
            async with free:
                return await ask(session, address, call)

        return await asyncio.gather(*map(one, calls))


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
    if not ours.left:
        names = ("choices", "usage")
        return _apart(*({name: asdict(each)[name] for name in names} for each in (ours, plain)))
    for index, mine in ours.choices.items():
        right = plain.choices[index]
        if right.tokens[: len(mine.tokens)] != mine.tokens or not right.text.startswith(mine.text):
            return f"answer {index} is no beginning of plain vLLM's"
    return None


def _apart(ours: Any, plain: Any, where: str = "") -> str | None:
    """Return where two values of JSON's types differ, log-probabilities by more than rounding."""
    found: Any = ()
    if isinstance(ours, float) and isinstance(plain, float):
        same = abs(ours - plain) <= LOGPROB_TOLERANCE
    elif isinstance(ours, list) and isinstance(plain, list):
        same = len(ours) == len(plain)
        found = (_apart(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(ours, plain)))
    elif isinstance(ours, dict) and isinstance(plain, dict):
        same = _same_keys(ours, plain)
        found = (_apart(ours[k], plain[k], f"{where}.{k}") for k in ours if k in plain)
    else:
        same = ours == plain
    inside = next(filter(None, found), None)
    return inside or (None if same else f"{where.lstrip('.')} is {ours!r}, not {plain!r}")


def _same_keys(ours: dict[Any, Any], plain: dict[Any, Any]) -> bool:
    """Whether both have the same keys; among the best tokens a tie may replace the last."""
    apart = [{**ours, **plain}[key] for key in ours.keys() ^ plain.keys()]
    if len(ours) != len(plain) or not all(isinstance(each, float) for each in apart):
        return not apart
    return all(abs(each - min(plain.values())) <= LOGPROB_TOLERANCE for each in apart)
