"""Clients of a soak against a server that says what it is told to."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

from aiohttp import web
from lib.soak_client import Choice, Logprob, Reply, ask_all
from lib.soak_traffic import CHAT, COMPLETIONS, Call


class FakeServer:
    """Streams `events` for requests that ask for a stream, and answers `whole` to all others."""

    def __init__(self, events=(), whole=None, status=200, pause=0.0, breaks=False):
        self.events, self.whole, self.status = events, whole, status
        self.pause, self.breaks = pause, breaks
        self.aborted: list[str] = []
        self.gone = 0

    async def answer(self, request):
        body = json.loads(await request.read())
        if not body.get("stream"):
            try:
                await asyncio.sleep(self.pause)
            except asyncio.CancelledError:
                self.gone += 1
                raise
            return web.json_response(self.whole, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in self.events:
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                await asyncio.sleep(self.pause)
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        if not self.breaks:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request):
        self.aborted += (await request.json())["request_ids"]
        return web.Response()

    def replies(self, *calls: Call) -> list[Reply]:
        async def run():
            app = web.Application()
            app.router.add_post("/inference/v1/abort_requests", self.abort)
            app.router.add_post("/{path:.*}", self.answer)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            try:
                return await ask_all(f"http://127.0.0.1:{port}", calls, 2)
            finally:
                await runner.cleanup()

        return asyncio.run(run())


def call(stream=False, path=COMPLETIONS, **how) -> Call:
    return Call("3.4", (), path, {"stream": stream}, **how)


def piece(text, tokens, index=0, **more):
    return {"choices": [{"index": index, "text": text, "token_ids": tokens, **more}]}


PIECES = [
    piece("a ", [5]),
    piece("b ", [8], index=1),
    piece("tree", [6, 7], finish_reason="stop", stop_reason=7),
    piece("c", [9], index=1, finish_reason="length"),
    {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens_details": None}},
]


def test_a_stream_is_what_the_whole_answer_is():
    choices = [
        {"index": 0, "text": "a tree", "token_ids": [5, 6, 7], "finish_reason": "stop"}
        | {"stop_reason": 7},
        {"index": 1, "text": "b c", "token_ids": [8, 9], "finish_reason": "length"},
    ]
    server = FakeServer(PIECES, {"choices": choices, "usage": {"completion_tokens": 5}})
    whole, streamed = server.replies(call(), call(stream=True))
    assert whole == streamed
    assert whole.choices[0] == Choice("a tree", [5, 6, 7], "stop", 7)
    assert whole.usage == {"completion_tokens": 5}


def test_log_probabilities_of_both_endpoints():
    completion = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:5": -0.5}],
    }
    best = {"token": "token_id:5", "logprob": -0.5}
    chat = {"content": [best | {"top_logprobs": [best]}]}
    for said in (completion, chat):
        (reply,) = FakeServer(whole=piece("x", [5], logprobs=said)).replies(call(path=CHAT))
        assert reply.choices[0].logprobs == [Logprob("token_id:5", -0.5, {"token_id:5": -0.5})]
    prompt = [None, {"3": {"logprob": -1.0, "rank": 1}}]
    (reply,) = FakeServer(whole=piece("x", [5], prompt_logprobs=prompt)).replies(call())
    assert reply.choices[0].prompt_logprobs == [None, {"3": -1.0}]


@pytest.mark.parametrize("events", [0, 1, 3])
def test_a_client_leaves_a_stream(events):
    server = FakeServer([piece("a", [5])] * 200, pause=0.01)
    (reply,) = server.replies(call(stream=True, leaves_after=events))
    assert reply.left and reply.cut and reply.error is None
    assert sum(len(choice.tokens) for choice in reply.choices.values()) == events
    assert server.gone == 1, "the server noticed"


def test_a_client_does_not_wait():
    server = FakeServer(whole=piece("a", [5]), pause=5.0)
    (reply,) = server.replies(call(patience=0.1))
    assert reply.left and not reply.choices and server.gone == 1
    (reply,) = FakeServer(whole=piece("a", [5])).replies(call(patience=5.0))
    assert not reply.left and reply.choices[0].tokens == [5]


def test_a_request_is_aborted_by_its_name():
    server = FakeServer(whole=piece("a", [5], finish_reason="abort"), pause=0.2)
    (reply,) = server.replies(call(aborted_after=0.05))
    assert {"cmpl-3.4-0", "cmpl-3.4-2", "chatcmpl-3.4"} <= set(server.aborted)
    assert reply.cut and not reply.left


def test_what_goes_wrong_is_said():
    (reply,) = FakeServer(PIECES, breaks=True).replies(call(stream=True))
    assert reply.error == "the stream broke off"
    error = {"error": {"message": "no such model"}}
    (reply,) = FakeServer(whole=error, status=404).replies(call())
    assert reply.status == 404 and "no such model" in reply.error
    (reply,) = FakeServer([PIECES[0], error]).replies(call(stream=True))
    assert "no such model" in reply.error
    (reply,) = asyncio.run(ask_all("http://127.0.0.1:9", [call()], 1))
    assert reply.status == 0 and "ClientConnector" in reply.error
