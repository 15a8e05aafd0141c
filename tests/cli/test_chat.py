"""`specblock chat` around what answers: prompts, commands, a server's stream."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from rich.console import Console
from support.scripts import SPECBLOCK, TARGET, specblock

from vllm_specblock.bench.live import Answer
from vllm_specblock.cli import chat_sources as chats
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target.features import load_tokenizer


@pytest.fixture
def engines(monkeypatch):
    """Stands in for engines: every answer is the same four tokens, two of them drafted."""
    asked, tokenizer = [], load_tokenizer(TARGET)
    ids = tokenizer("import os\nimport sys\n", add_special_tokens=False).input_ids

    def start(engines, target, methods, folder, dtype, eager):
        asked.append(methods)
        return 600

    def ask(engines, job, answers):
        asked.append(job["prompts"][0])
        for answer in answers:
            answer.hear(ids[:1])
            answer.hear(ids[1:])
            answer.seconds = 1.0

    monkeypatch.setattr(chats, "start_engines", start)
    monkeypatch.setattr(chats, "ask_together", ask)
    return asked


def test_prompts_from_a_pipe_become_one_chat(engines):
    said = "import re\n\n/help\n/tree\nimport io\n/new\nx = 1\n"
    result = specblock("chat", TARGET, "--model", SPECBLOCK, input=said)
    assert result.exit_code == 0, result.output
    methods, first, second, new = engines
    assert methods == {"vLLM": None, "drafts": {"method": "specblock", "model": str(SPECBLOCK)}}
    assert len(second) > len(first) and len(new) < len(second)
    assert result.stdout.count("import os\nimport sys") == 3 and chats.HELP in result.stdout
    assert "tokens/s, τ" in result.stdout
    assert "  root" in result.stdout and "✓ accepted" in result.stdout


def test_the_tree_has_the_size_that_was_asked_for(engines):
    given = json.dumps({"model": str(SPECBLOCK), "num-speculative-tokens": 2, "num-blocks": 1})
    result = specblock("chat", TARGET, "--speculative-config", given, input="import re\n/tree\n")
    assert result.stdout.count("  b1") == 2 and "  b2" not in result.stdout, result.output


@pytest.mark.parametrize(
    ("said", "shown", "asked"),
    [
        (b"import re\n/tree\n", "/tree shows the tree of a drafter with weights: give --model.", 2),
        (b"caf\xe9\n", "> caf\ufffd", 2),  # bytes that are no text
        (
            b"x = 1, " * 300 + b"\n/new\n",
            "Chat and answer exceed 600 tokens: /new starts another.",
            1,
        ),
    ],
    ids=["no tree", "no text", "too long"],
)
def test_a_chat_goes_on(engines, said, shown, asked):
    result = specblock("chat", TARGET, input=said + b"import io\n")
    assert result.exit_code == 0, result.exception
    assert shown in result.stdout and "> import io" in result.stdout
    assert len(engines) == 1 + asked


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict]] = []
    only_v1, models = False, ("m",)

    def reply(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        models = [{"id": name, "object": "model"} for name in self.models]
        self.reply(json.dumps({"object": "list", "data": models}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            if self.only_v1:
                return self.send_error(404)
            return self.reply(json.dumps({"prompt": "".join(chr(97 + i) for i in body["tokens"])}))
        self.asked.append(body)
        if body["messages"][-1]["content"] == "too long":
            error = {"message": "longer than 512 tokens", "type": "BadRequestError", "code": 400}
            return self.reply(json.dumps({"error": error}), status=400)
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        steps = [[0], [1, 2, 3]] if "vllm_xargs" not in body else [[0], [1], [2], [3]]
        events = [
            common | {"choices": [{"index": 0, "delta": {"content": "?"}, "token_ids": ids}]}
            for ids in steps
        ]
        told = {"speculative_decoding": {"mean_acceptance_length": 2.5}}
        events.append(common | {"choices": [], "metrics": told})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.reply(text + "data: [DONE]\n\n", "text/event-stream")

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_proxy_that_hides_vllms_own_paths_is_one_sentence(address, monkeypatch):
    monkeypatch.setattr(Handler, "only_v1", True)
    result = specblock("chat", address, input="why?\n")
    assert result.exit_code == 1 and "gave no answer: Client error '404" in result.stderr
    Handler.asked.clear()


def test_a_chat_goes_on_where_a_server_refuses_a_question(address):
    result = specblock("chat", address, input="too long\nwhy?\n")
    assert result.exit_code == 0, result.exception
    assert "longer than 512 tokens" in result.stdout and "> why?" in result.stdout
    Handler.asked.clear()


def test_servers_that_cannot_be_asked_are_one_sentence(address, monkeypatch):
    for given, says in (
        ((address, "--model", SPECBLOCK), "A server has its own drafter: drop --model"),
        (("http://HOST:PORT",), "The server at http://HOST:PORT gave no answer: Invalid port"),
    ):
        result = specblock("chat", *given, input="why?\n")
        assert says in result.stderr and isinstance(result.exception, SystemExit)
    monkeypatch.setattr(Handler, "models", ())
    assert "has no model: start it with one." in specblock("chat", address, input="why?\n").stderr


def test_a_server_answers_without_and_with_drafts(address):
    source = chats.ServerSource(address, 8, 0.0)
    answers = [Answer(name, source.decode, source.joined) for name in source.names]
    source.ask([{"role": "user", "content": "why?"}], answers)
    with pytest.raises(TrainError, match="give the target and --model"):
        source.tree(Console(), answers[-1])
    plain, drafts = answers
    assert plain.text.plain == drafts.text.plain == "abcd"
    assert [drafts.text.plain[s.start : s.end] for s in drafts.text.spans] == ["bc"]
    assert drafts.tau == 2.5 and drafts.seconds > 0
    plain.reported_tau = None
    assert plain.tau is None and "τ" not in plain.figures()
    assert [body.get("vllm_xargs") for body in Handler.asked] == [{"specblock_draft": False}, None]
    assert Handler.asked[0]["return_token_ids"] and Handler.asked[0]["max_tokens"] == 8
