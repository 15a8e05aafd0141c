"""Sources of answers in `specblock chat`: two engines, or a server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import torch
from rich.console import Console

from vllm_specblock.bench.live import Answer, ask_together, shown, start_engines
from vllm_specblock.bench.process import EngineProcess, job_of
from vllm_specblock.cli.draft_tree import drawing, steps_of_text
from vllm_specblock.config import default_nodes
from vllm_specblock.drafters.common.hub import target_folder
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.chat import BrokenLine
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.eval.loaded import load_drafter, pair
from vllm_specblock.train.target.features import load_target, load_tokenizer

HELP = "/tree: the draft tree of the last step; /new: a new chat; /quit."
Messages = list[dict[str, str]]


def talk(console: Console, source: EngineSource | ServerSource) -> None:
    """Answer prompts until there is none."""
    if console.is_terminal:
        console.print(HELP, style="dim")
    cast(Any, sys.stdin).reconfigure(errors="replace")  # a tokenizer takes no broken UTF-8
    messages: Messages = []
    answers: list[Answer] = []
    while (line := prompt_line(console)) is not None and line != "/quit":
        try:
            if line == "/new":
                messages = []
            elif line == "/tree" and answers:
                source.tree(console, answers[-1])
            elif line.startswith("/"):
                console.print(HELP)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                answers = [Answer(name, source.decode, source.joined) for name in source.names]
                with shown(console, line, answers):
                    source.ask(asked, answers)
                messages = [*asked, {"role": "assistant", "content": answers[-1].text.plain}]
        except (TrainError, BrokenLine, openai.BadRequestError) as error:  # the chat goes on
            console.print(str(error), markup=False, soft_wrap=True)


def prompt_line(console: Console) -> str | None:
    """Return a line of the terminal or the pipe; None at its end."""
    try:
        return (console.input("> ") if console.is_terminal else next(sys.stdin)).strip()
    except (EOFError, KeyboardInterrupt, StopIteration):
        return None


class EngineSource:
    """Engines in separate processes that take turns; the last answer is with drafts."""

    names, joined = ("vLLM", "with draft trees"), False

    def __init__(
        self, target: str, speculative: dict[str, Any], tokens: int, temperature: float
    ) -> None:
        self.target, self.speculative = target_folder(target), speculative
        self.tokens = ChatTokens(load_tokenizer(self.target), sys.maxsize)
        self.max_tokens, self.temperature = tokens, temperature
        self.engines: list[EngineProcess] = []
        self.prompt: list[int] = []

    def start(self, dtype: str, eager: bool) -> None:
        both = {"vLLM": None, "drafts": self.speculative}
        self.room = start_engines(self.engines, self.target, both, Path("runs/chat"), dtype, eager)
        for engine in self.engines:  # first calls allocate and compile
            engine.ask(job_of([self.tokens.raw("Hello")], 16))

    def ask(self, messages: Messages, answers: list[Answer]) -> None:
        text = "\n".join(each["content"] for each in messages)
        self.prompt = self.tokens.question(messages) if self.tokens.chat else self.tokens.raw(text)
        if len(self.prompt) + self.max_tokens > self.room:
            raise TrainError(f"Chat and answer exceed {self.room:,} tokens: /new starts another.")
        job = job_of([self.prompt], self.max_tokens, self.temperature)
        ask_together(self.engines, job, answers)

    def tree(self, console: Console, answer: Answer) -> None:
        """Print the tree of an answer's last step, drafted again along its text."""
        given = self.speculative.get
        if "model" not in self.speculative:
            raise TrainError("/tree shows the tree of a drafter with weights: give --model.")
        pairing = pair(Path(self.speculative["model"]), self.target)
        nodes = given("num_speculative_tokens") or default_nodes(not torch.cuda.is_available())
        model = load_target(pairing.target, "fp32", torch.device("cpu"))
        drafter = load_drafter(pairing, model.dtype, model.device, nodes, given("num_blocks"))
        text = torch.tensor([*self.prompt, *answer.ids])
        steps = list(steps_of_text(model, drafter, text, len(self.prompt)))
        if not steps:
            raise TrainError("The answer is too short: nothing was drafted.")
        tree = drawing(steps[-1], self.tokens.tokenizer, drafter.forward_name)
        console.print(tree, soft_wrap=True)

    def decode(self, ids: list[int]) -> str:
        return self.tokens.said(ids)


class ServerSource:
    """A running server, which can answer a request without drafts."""

    names, joined = ("without drafts", "with drafts"), True

    def __init__(self, address: str, max_tokens: int, temperature: float) -> None:
        self.address = address
        self.client = openai.OpenAI(base_url=str(httpx.URL(f"{address}/v1")), api_key="-")
        if not (models := self.client.models.list().data):
            raise TrainError(f"The server at {address} has no model: start it with one.")
        self.request: dict[str, Any] = {"model": models[0].id, "seed": 0, "stream": True}
        self.request |= {"max_tokens": max_tokens, "temperature": temperature}

    def ask(self, messages: Messages, answers: list[Answer]) -> None:
        create: Any = self.client.chat.completions.create
        asked = {"messages": messages, "stream_options": {"include_usage": True}, **self.request}
        for answer, own in zip(answers, ({"vllm_xargs": {"specblock_draft": False}}, {})):
            stream = create(extra_body={"return_token_ids": True, **own}, **asked)
            began = time.perf_counter()
            for chunk in stream:
                for choice in chunk.choices:
                    answer.hear(getattr(choice, "token_ids", None) or [])
                answer.seconds = time.perf_counter() - began
                metrics = (getattr(chunk, "metrics", None) or {}).get("speculative_decoding")
                if metrics:
                    answer.reported_tau = metrics["mean_acceptance_length"]

    def tree(self, console: Console, answer: Answer) -> None:
        raise TrainError("A server does not report its trees: give the target and --model.")

    def decode(self, ids: list[int]) -> str:
        asked = {"model": self.request["model"], "tokens": ids}
        answer = httpx.post(f"{self.address}/detokenize", json=asked)
        return answer.raise_for_status().json()["prompt"]
