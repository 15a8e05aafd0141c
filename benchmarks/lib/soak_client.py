"""HTTP clients of a server: they read whole answers or streams, and some leave early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lib.soak_traffic import Call

PATIENCE = 600.0
"""Seconds after which a missing answer is an error."""


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
        choices: by index.
        usage: counted tokens, by name.
        error: the server's, or why the connection broke.
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
            choice.logprobs += _logprobs(said.get("logprobs"))
            for place in said.get("prompt_logprobs") or ():
                known = place and {token: each["logprob"] for token, each in place.items()}
                choice.prompt_logprobs.append(known)
        usage = event.get("usage") or {}
        self.usage |= {name: usage[name] for name in usage if name.endswith("_tokens")}


def _logprobs(said: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Each place's token, its log-probability and the best tokens', of a completion or a chat."""
    names = "token", "logprob", "best"
    if said is None:
        return []
    if "content" in said:
        places = [
            (
                place["token"],
                place["logprob"],
                {best["token"]: best["logprob"] for best in place["top_logprobs"]},
            )
            for place in said["content"] or ()
        ]
    else:
        places = [*zip(said["tokens"], said["token_logprobs"], said["top_logprobs"])]
    return [dict(zip(names, place)) for place in places]


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
                reply.take(json.loads(await response.read()))
    except TimeoutError:
        reply.left = call.patience is not None
        reply.error = None if reply.left else f"no answer within {PATIENCE:.0f} s"
    except (aiohttp.ClientError, ValueError) as error:
        reply.status, reply.error = 0, f"{type(error).__name__}: {error}"
    return reply


async def _read_stream(response: aiohttp.ClientResponse, call: Call, reply: Reply) -> None:
    events, ended = 0, False
    while not reply.left and (line := await response.content.readline()):
        if events == call.leaves_after:
            reply.left = True
            response.close()  # or the connection would be read to its end and kept
        elif line.startswith(b"data: [DONE]"):
            ended = True
        elif line.startswith(b"data: "):
            events += 1
            reply.take(json.loads(line.removeprefix(b"data: ")))
    if not ended and not reply.left:
        reply.error = reply.error or "the stream broke off"


async def ask_all(address: str, calls: Sequence[Call], clients: int) -> list[Reply]:
    """Return the replies to all requests in order; `clients` of them run at a time."""
    free = asyncio.Semaphore(clients)

    async def one(call: Call) -> Reply:
        async with free:
            return await ask(session, address, call)

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*map(one, calls))
