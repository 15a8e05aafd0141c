"""A real chat model with and without SpecBlock, side by side.

    python examples/demo.py [--help]

Plain vLLM and vLLM with draft trees answer four prompts of kinds that people serve, in slices of
time. Accepted draft tokens are tinted. In float32 the answers are the same, token for token, and
in bfloat16 but for near-ties, each of which is explained.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging

from vllm_specblock.bench.live import Answer, ask_together, shown, start_engines
from vllm_specblock.bench.process import EngineFailed, EngineProcess, end_all, job_of

EXAMPLES = Path(__file__).resolve().parent
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "smollm2")]

from target import NAME, TargetError, default_folder, make_target  # noqa: E402

PROMPTS = {
    "Edit this code": """Add type hints to this function and change nothing else.

def running_mean(values, window):
    total = 0.0
    result = []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        result.append(total / min(index + 1, window))
    return result
""",
    "Extract JSON": """Return a JSON list with an object for each order: customer, item, count.

Orders of Monday: Maria Lopez bought 3 garden chairs. Peter Novak bought 1 water pump. \
Aiko Tanaka bought 12 clay pots. Samuel Okafor bought 2 rain barrels.
""",
    "Answer from this document": """Speculative decoding lets a small model draft several \
tokens, which the large model then verifies in a single forward pass. Drafts that the large model \
would have written itself are kept, and the first wrong one is replaced by its own choice, so the \
text is the same as without the small model, but it takes fewer forward passes to write.

What happens to drafts that the large model would have written itself, and why is the text the same?
""",
    "Chat": "What should I keep in mind when I plant tomatoes on a balcony?",
}
DRAFTER = EXAMPLES / "smollm2/drafter"
LOGS = EXAMPLES.parent / "runs/demo"


def main(
    drafter: Annotated[
        str, typer.Option(help="A drafter's folder, or ngram: the text itself is looked up.")
    ] = str(DRAFTER),
    max_tokens: Annotated[int, typer.Option(help="Of one answer.")] = 96,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16. Default: bfloat16 where the machine has it."),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Compile neither engine.")] = False,
) -> None:
    """Compare vLLM with and without SpecBlock on SmolLM2-135M-Instruct."""
    dtype = dtype or ("bfloat16" if has_bfloat16() else "float32")
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype is float32 or bfloat16, not {dtype}.")
    speculative = draft_options(drafter)
    try:
        target = make_target(default_folder())
    except TargetError as error:
        fail(str(error))
    console = Console(highlight=False)
    console.print(f"{NAME} in {dtype}: starting vLLM twice, plain and with draft trees.")
    console.print("The first time vLLM compiles the model: a minute or two.")
    engines: list[EngineProcess] = []
    try:
        start_engines(
            engines, target, {"plain": None, "drafts": speculative}, LOGS, dtype, eager, 1024
        )
        pairs = answer_all(console, engines, AutoTokenizer.from_pretrained(target), max_tokens)
    except (EngineFailed, KeyboardInterrupt) as error:
        fail(str(error) or "stopped.")
    finally:
        end_all(engines)
    raise typer.Exit(0 if conclude(console, pairs, target, dtype) else 1)


def fail(sentence: str) -> None:
    print(f"Error: {sentence}", file=sys.stderr)
    raise typer.Exit(1)


def has_bfloat16() -> bool:
    """Whether arithmetic in bfloat16 is fast here."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def draft_options(drafter: str) -> dict[str, Any]:
    """vLLM's `speculative_config`: the plugin's defaults, merged with lookup in the text."""
    if drafter == "ngram":
        return {"method": "specblock", "kind": "ngram"}
    if not (Path(drafter) / "config.json").exists():
        fail(
            f"there is no drafter in {drafter}: examples/smollm2/README.md says how to train one, "
            "and `--drafter ngram` shows what looking up the text itself gives."
        )
    lookup = {"second_drafter": {"kind": "ngram"}, "draft_policy": "merge"}
    return {"method": "specblock", "model": drafter} | lookup


def answer_all(
    console: Console, engines: list[Any], tokenizer: Any, max_tokens: int
) -> list[tuple[list[int], Answer, Answer]]:
    """Each prompt's ids, and both answers to it."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def job(message: str, tokens: int) -> dict[str, Any]:
        chat = [{"role": "user", "content": message}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return job_of([ids], tokens)

    for engine in engines:  # first calls allocate, and compile what was not compiled before
        engine.ask(job(PROMPTS["Chat"], 8))
    found = []
    for kind, prompt in PROMPTS.items():
        answers = Answer("vLLM", decode), Answer("vLLM with SpecBlock", decode)
        asked = job(prompt, max_tokens)
        with shown(console, f"{kind}: {prompt.strip()}", answers):
            ask_together(engines, asked, answers)
        found.append((asked["prompts"][0], *answers))
    return found


def conclude(
    console: Console, pairs: list[tuple[list[int], Answer, Answer]], target: Path, dtype: str
) -> bool:
    """Print the speed-up, and how many answers are identical; whether the others are near-ties."""
    # Per token: an answer that parts at a tie may end elsewhere.
    times = [ours.speed / plain.speed for _, plain, ours in pairs]
    total = sum(1 / plain.speed for _, plain, _ in pairs) / sum(
        1 / ours.speed for *_, ours in pairs
    )
    by_kind = ", ".join(f"{kind} {each:.2f}" for kind, each in zip(PROMPTS, times))
    console.print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, {dtype}, greedy, one request at a time\n"
        f"speed-up {total:.2f} ({by_kind})",
        soft_wrap=True,
    )
    different = [(prompt, a.ids, b.ids) for prompt, a, b in pairs if a.ids != b.ids]
    same = len(pairs) - len(different)
    console.print(f"identical answers: {same} of {len(pairs)}")
    if not different or dtype == "float32":
        return not different
    console.print("Where they part, logits by transformers in float32:")
    ties = True
    for where, tie in explain(target, different):
        console.print(f"  {where}", markup=False, soft_wrap=True)
        ties = ties and tie
    return ties


def explain(
    target: Path, answers: Sequence[tuple[list[int], list[int], list[int]]]
) -> Iterator[tuple[str, bool]]:
    """Yield where two answers to a prompt part, and whether that is a tie in bfloat16.

    A tie: in float32 both logits are below the best one by at most three standard deviations of
    the error that bfloat16 makes in a difference of two logits there.
    """
    from transformers import AutoModelForCausalLM  # takes seconds, and most answers are identical

    logging.disable_progress_bar()
    tokenizer, dtypes = AutoTokenizer.from_pretrained(target), (torch.float32, torch.bfloat16)
    models = [AutoModelForCausalLM.from_pretrained(target, dtype=each).eval() for each in dtypes]
    for prompt, one, other in answers:
        position = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
        if position is None:
            yield "one answer ends where the other continues", False
            continue
        text, pair = torch.tensor([prompt + one[:position]]), [one[position], other[position]]
        with torch.inference_mode():
            exact, rounded = (model(text).logits[0, -1].float() for model in models)
        error = math.sqrt(2) * float((rounded - exact).std())
        logits = exact[pair].tolist()
        below = float(exact.max()) - min(logits)
        texts = zip(tokenizer.batch_decode([[token] for token in pair]), logits)
        best = ", ".join(f"{text!r} {logit:.3f}" for text, logit in texts)
        yield f"token {position}: {best}; bfloat16's error is {error:.3f}", below <= 3 * error


if __name__ == "__main__":
    typer.run(main)
