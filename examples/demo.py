"""A real chat model with and without SpecBlock, side by side.

    python examples/demo.py [--help]

Four prompts, each answered by plain vLLM and by vLLM with a draft tree, in turns; the second one's
answer is shown as it comes. In float32 the answers are the same, token for token, and in bfloat16
but for near-ties, each of which is shown.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from vllm_specblock.bench.near_ties import explain
from vllm_specblock.bench.process import EngineFailed, EngineProcess, end_all
from vllm_specblock.engine.metrics.acceptance import STEPS, acceptance_length

EXAMPLES = Path(__file__).resolve().parent
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "smollm2")]

from target import NAME, TargetError, default_folder, make_target  # noqa: E402

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A train travels 180 kilometres in 2.5 hours. What is its average speed? Think step by step.",
    "What should I keep in mind when I plant tomatoes on a balcony?",
    "Summarise in two sentences: Speculative decoding lets a small model draft several tokens, "
    "which the large model then verifies in a single forward pass. Drafts that the large model "
    "would have written itself are kept, and the first wrong one is replaced by its own choice, so "
    "the text is the same as without the small model, but it takes fewer forward passes to write.",
]
DRAFTER = EXAMPLES / "smollm2/drafter"
LOGS = EXAMPLES.parent / "runs/demo"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered, and what that took.

    Attributes:
        prompt, ids: token ids of the question and of the answer.
        wall, cpu: seconds by the clock, and of processor time.
        steps: decode steps.
    """

    prompt: list[int]
    ids: list[int]
    wall: float
    cpu: float
    steps: int


def main(
    drafter: Annotated[
        str, typer.Option(help="A drafter's folder, or ngram: the text itself is looked up.")
    ] = str(DRAFTER),
    lookup: Annotated[
        bool, typer.Option(help="Merge the drafter's trees with what the text itself says.")
    ] = True,
    nodes: Annotated[int, typer.Option(help="Nodes of the draft tree.")] = 12,
    blocks: Annotated[int, typer.Option(help="Drafter forwards per step.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both engines.")] = "float32",
    eager: Annotated[bool, typer.Option("--eager", help="Compile neither engine.")] = False,
) -> None:
    """Compare vLLM with and without SpecBlock on SmolLM2-135M-Instruct."""
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype is float32 or bfloat16, not {dtype}.")
    speculative = draft_options(drafter, lookup, nodes, blocks)
    try:
        target = make_target(default_folder())
    except TargetError as error:
        fail(str(error))
    engines: list[EngineProcess] = []
    try:
        start(engines, target, speculative, dtype, eager)
        answers = take_turns(engines, AutoTokenizer.from_pretrained(target), max_tokens)
    except (EngineFailed, KeyboardInterrupt) as error:
        fail(str(error) or "stopped.")
    finally:
        end_all(engines)
    show_table(answers, speculative, dtype)
    raise typer.Exit(0 if compare(answers, target, dtype) else 1)


def fail(sentence: str) -> None:
    print(f"Error: {sentence}", file=sys.stderr)
    raise typer.Exit(1)


def draft_options(drafter: str, lookup: bool, nodes: int, blocks: int) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    options: dict[str, Any] = {
        "method": "specblock",
        "num_speculative_tokens": nodes,
        "enable_adaptive_verification": False,
    }
    if drafter == "ngram":
        return options | {"kind": "ngram"}
    if lookup:
        options |= {"second_drafter": {"kind": "ngram"}, "draft_policy": "merge"}
    if not (Path(drafter) / "config.json").exists():
        fail(
            f"there is no drafter in {drafter}: examples/smollm2/README.md says how to train one, "
            "and `--drafter ngram` shows what looking up the text itself gives."
        )
    return options | {"model": drafter, "num_blocks": blocks}


def start(
    engines: list[EngineProcess],
    target: Path,
    speculative: dict[str, Any],
    dtype: str,
    eager: bool,
) -> None:
    """Append plain vLLM as it comes, and vLLM with drafts; both ready, both at rest."""
    settings = {
        "model": str(target),
        "dtype": dtype,
        "enforce_eager": eager,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.4,  # two engines on one device
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }
    # In one process, a second thread of torch only spins beside vLLM's own. As vLLM's own attention
    # would on a GPU, kernels in Triton would round float32 to TF32.
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TRITON_F32_DEFAULT": "ieee",
    }
    print(f"{NAME} in {dtype}: starting vLLM twice, plain and with {label(speculative)}.")
    print("That takes a minute or two, longer the first time: vLLM compiles the model.", flush=True)
    began = time.perf_counter()
    LOGS.mkdir(parents=True, exist_ok=True)
    # Plain: what a user has who sets nothing. The plugin needs Model Runner V2, which vLLM's CPU
    # build uses only when told to.
    for name, runner, drafts in (("plain", None, None), ("drafts", "1", speculative)):
        arguments = settings | {"speculative_config": drafts}
        environment = common | {RUNNER: runner}
        log = LOGS / f"{name}.log"
        engines.append(EngineProcess(name, arguments, environment, log, wait=False))
    for engine in engines:
        engine.wait()
    print(f"Both are ready after {time.perf_counter() - began:.0f} s.")


def take_turns(
    engines: list[EngineProcess], tokenizer: Any, max_tokens: int
) -> list[tuple[Answer, Answer]]:
    """Both answers to every prompt. Who begins changes from prompt to prompt."""
    for engine in engines:  # first calls allocate, and compile what was not compiled before
        ask(engine, tokenizer, PROMPTS[-1], 24, Hidden())
    answers = []
    for number, prompt in enumerate(PROMPTS):
        print(f"\n\033[1m{prompt}\033[0m" if sys.stdout.isatty() else f"\n--- {prompt}")
        found: dict[int, Answer] = {}
        for which in (1, 0) if number % 2 == 0 else (0, 1):
            listener = Shown(tokenizer) if which else Hidden()
            found[which] = ask(engines[which], tokenizer, prompt, max_tokens, listener)
        answers.append((found[0], found[1]))
        same = "the same answer" if found[0].ids == found[1].ids else "ANOTHER ANSWER"
        print(f"\n[vLLM {found[0].wall:.1f} s, with drafts {found[1].wall:.1f} s: {same}]")
    return answers


def ask(
    engine: EngineProcess, tokenizer: Any, message: str, max_tokens: int, listener: Hidden
) -> Answer:
    """The greedy answer to a user's message."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    job = {
        "prompts": [prompt],
        "seeds": [0],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": False,
        "stream": True,
    }
    found = engine.ask(job, listener.hear)
    steps = found["counters"].get(STEPS, 0)
    return Answer(prompt, found["ids"][0], found["wall"], found["cpu"], steps)


class Hidden:
    """Hears an answer and says nothing: it costs the engine what being heard costs."""

    def hear(self, index: int, tokens: list[int]) -> None:
        pass


class Shown(Hidden):
    """Prints an answer as its tokens come."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids, self.shown = tokenizer, [], ""

    def hear(self, index: int, tokens: list[int]) -> None:
        self.ids += tokens
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # else a letter has not all of its bytes yet
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def label(speculative: dict[str, Any]) -> str:
    head = "n-grams" if speculative.get("kind") == "ngram" else "SpecBlock"
    head += " + n-grams" if "second_drafter" in speculative else ""
    return f"{head} ({speculative['num_speculative_tokens']})"


def show_table(
    answers: list[tuple[Answer, Answer]], speculative: dict[str, Any], dtype: str
) -> None:
    """Tokens per second, processor time and τ of both, and their ratios."""
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {dtype}, greedy, one request at a time")
    print(f"{'':32}{'tokens/s':>10}{'CPU ms/token':>15}{'τ (tokens per target step)':>29}")
    rates = []
    for name, each in zip(("vLLM", f"vLLM + {label(speculative)}"), zip(*answers)):
        tokens = sum(len(answer.ids) for answer in each)
        wall, cpu = (sum(values) / tokens for values in zip(*((a.wall, a.cpu) for a in each)))
        rates.append((wall, cpu))
        tau = acceptance_length(tokens, len(each), sum(answer.steps for answer in each))
        print(f"{name:32}{1 / wall:>10.1f}{1e3 * cpu:>15.1f}{tau:>29.2f}")
    wall, cpu = (plain / drafted for plain, drafted in zip(*rates))
    print(f"speed-up: {wall:.2f} x by the clock, {cpu:.2f} x by processor time")


def compare(answers: list[tuple[Answer, Answer]], target: Path, dtype: str) -> bool:
    """Say how many answers are identical; whether all of them are, or differ by near-ties."""
    different = [(a.prompt, a.ids, b.ids) for a, b in answers if a.ids != b.ids]
    tokens = sum(len(plain.ids) for plain, _ in answers)
    print(
        f"identical: {'no' if different else 'yes'} ({len(answers) - len(different)} of "
        f"{len(answers)} answers, {tokens} tokens in all)"
    )
    if not different or dtype == "float32":
        return not different
    print("Where they part, logits by transformers in float32:")
    partings = explain(target, different)
    for parting in partings:
        print(f"  {parting}")
    return all(parting.steps <= 1 for parting in partings)


if __name__ == "__main__":
    typer.run(main)
