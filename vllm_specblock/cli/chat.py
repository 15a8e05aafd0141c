"""`specblock chat`: your own prompts with and without draft trees, side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from vllm_specblock.cli.doctor import SpeculativeConfig

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_specblock.bench.live import Answer

HELP = "/tree: the draft tree of the last step; /new: a new chat; /quit."
Messages = list[dict[str, str]]


class Source(Protocol):
    """What answers: two engines, or a server."""

    def answers(self) -> list[Answer]:
        """Return empty answers, ours last."""

    def ask(self, messages: Messages, answers: list[Answer]) -> None:
        """Fill the answers to a chat."""

    def tree(self, console: Console, answer: Answer) -> None:
        """Print the tree of an answer's last step."""


def chat(
    target: Annotated[
        str, typer.Argument(help="A folder or a hub id, or a server's address: http://HOST:PORT.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Its drafter, a folder or a hub id. Default: n-gram lookup.")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    plain: Annotated[bool, typer.Option(help="Answer without drafts as well.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of the target's arithmetic, as in vLLM.")] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Compile neither engine.")] = False,
) -> None:
    """Chat with vLLM and with vLLM with draft trees, side by side.

    Accepted draft tokens are tinted; tokens/s and τ stand beneath. A server answers twice, without
    and with drafts; it reports τ with --per-request-spec-decode-metrics summary. Prompts may also
    come from a pipe, one a line.
    """
    from rich.console import Console

    from vllm_specblock.bench.process import end_all

    if model is not None and speculative_config is not None:
        raise typer.BadParameter("--model and --speculative-config are both given: drop one.")
    console, sampling = Console(highlight=False), (max_tokens, temperature)
    if target.startswith(("http://", "https://")):
        talk(console, ServerSource(target.rstrip("/"), plain, *sampling))
        return
    drafter = {"model": model} if model is not None else {"kind": "ngram"}
    given = {"method": "specblock"} | (speculative_config or drafter)
    console.print("Starting vLLM; the first time it compiles the model.", style="dim")
    source = EngineSource(target, given, plain, *sampling)
    try:
        source.start(dtype, eager)
        talk(console, source)
    finally:
        end_all(source.engines)


def talk(console: Console, source: Source) -> None:
    """Answer prompts until there is none."""
    from vllm_specblock.bench.live import shown

    messages: Messages = []
    answers: list[Answer] = []
    for line in prompts(console):
        if line == "/quit":
            return
        if line == "/new":
            messages = []
        elif line == "/tree" and answers:
            source.tree(console, answers[-1])
        elif line.startswith("/"):
            console.print(HELP)
        else:
            messages.append({"role": "user", "content": line})
            answers = source.answers()
            with shown(console, line, answers):
                source.ask(messages, answers)
            messages.append({"role": "assistant", "content": answers[-1].text.plain})


def prompts(console: Console) -> Iterator[str]:
    """Yield lines of the terminal or the pipe; blank ones are skipped."""
    if console.is_terminal:
        console.print(HELP, style="dim")
    while True:
        try:
            line = console.input("> ") if console.is_terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not line and not console.is_terminal:
            return
        if line.strip():
            yield line.strip()


class EngineSource:
    """Engines in processes of their own, which take turns."""

    def __init__(
        self,
        target: str,
        speculative: dict[str, Any],
        plain: bool,
        max_tokens: int,
        temperature: float,
    ) -> None:
        from vllm_specblock.drafters.common.hub import target_folder
        from vllm_specblock.train.target.features import load_tokenizer

        self.target = target_folder(Path(target))
        self.tokenizer = load_tokenizer(self.target)
        self.speculative = speculative
        self.methods = ({"vLLM": None} if plain else {}) | {"with draft trees": speculative}
        self.max_tokens, self.temperature = max_tokens, temperature
        self.engines: list[Any] = []
        self.prompt: list[int] = []

    def start(self, dtype: str, eager: bool) -> None:
        from vllm_specblock.bench.live import job_of, start_engines

        start_engines(self.engines, self.target, self.methods, Path("runs/chat"), dtype, eager)
        for engine in self.engines:  # first calls allocate and compile
            engine.ask(job_of(self.tokenizer("Hello").input_ids, 16))

    def answers(self) -> list[Answer]:
        from vllm_specblock.bench.live import Answer

        return [Answer(name, self._decode) for name in self.methods]

    def ask(self, messages: Messages, answers: list[Answer]) -> None:
        from vllm_specblock.bench.live import ask_together, job_of

        if self.tokenizer.chat_template:
            self.prompt = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            self.prompt = self.tokenizer("\n".join(each["content"] for each in messages)).input_ids
        ask_together(self.engines, job_of(self.prompt, self.max_tokens, self.temperature), answers)

    def tree(self, console: Console, answer: Answer) -> None:
        from vllm_specblock.cli.prompt_steps import default_nodes, print_step, steps_of_answer

        if "model" not in self.speculative:
            console.print("/tree shows the tree of a drafter with weights: give --model.")
            return
        given = self.speculative.get
        nodes = given("num_speculative_tokens") or default_nodes()
        steps, name = steps_of_answer(
            Path(str(given("model"))),
            self.target,
            self.prompt,
            answer.ids,
            nodes,
            given("num_blocks"),
        )
        print_step(console, steps[-1], self.tokenizer, name)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class ServerSource:
    """A running server, which can answer a request without drafts."""

    def __init__(self, address: str, plain: bool, max_tokens: int, temperature: float) -> None:
        import openai

        self.address = address
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="-")
        self.model = self.client.models.list().data[0].id
        self.kinds = {"without drafts": False} if plain else {}
        self.kinds |= {"with drafts": True}
        self.sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}

    def answers(self) -> list[Answer]:
        from vllm_specblock.bench.live import Answer

        return [Answer(name, self._decode, joined=True) for name in self.kinds]

    def ask(self, messages: Messages, answers: list[Answer]) -> None:
        import time

        create: Any = self.client.chat.completions.create
        for answer, drafts in zip(answers, self.kinds.values()):
            own = {} if drafts else {"vllm_xargs": {"specblock_draft": False}}
            stream = create(
                model=self.model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                seed=0,
                extra_body={"return_token_ids": True, **own},
                **self.sampling,
            )
            began = time.perf_counter()
            for chunk in stream:
                for choice in chunk.choices:
                    answer.hear(getattr(choice, "token_ids", None) or [])
                answer.seconds = time.perf_counter() - began
                metrics = (getattr(chunk, "metrics", None) or {}).get("speculative_decoding")
                if metrics:
                    answer.reported_tau = metrics["mean_acceptance_length"]

    def tree(self, console: Console, answer: Answer) -> None:
        console.print("A server does not tell its trees: give the target's folder and --model.")

    def _decode(self, ids: list[int]) -> str:
        import httpx

        asked = {"model": self.model, "tokens": ids}
        return httpx.post(f"{self.address}/detokenize", json=asked).json()["prompt"]
