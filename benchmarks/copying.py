"""Text that repeats its prompt: SpecBlock alone, n-gram lookup alone, and both together.

    python benchmarks/copying.py [--help]

"Edit this" and "quote this" make a large model copy. The example's target of 3 M parameters does
not follow either: it copies where a text is as regular as a table or a list of imports. So
prompts of three forms are made of held-out files, plain vLLM answers all of them greedily, and
those whose answer is a copy are the copy-heavy set. No drafter takes part in the choice. How many
were asked and kept is in the results; a larger target keeps more.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from combinations import NGRAM, alone, specblock, together
from ledger import Ledger, from_root
from one_engine import TARGET, EngineFailed, Request, Task, run

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "examples/tiny_pair"
PLAIN, BASE = "vLLM", "SpecBlock"
PROMPTS = "copy-heavy prompts"
GRAM = 4
"""A generated token is copied if it ends so many tokens in a row that the prompt has, too."""
LINES, SHORTEST, AGAIN = 8, 12, 3
"""Lines of a piece, characters of a line that counts, lines given again."""


def rename(text: str) -> str:
    """`text` with its most frequent long name replaced throughout."""
    words = [w for w in re.findall(r"\b[a-z_]{4,}\b", text) if not keyword.iskeyword(w)]
    if not words:
        return text
    name = max(sorted(set(words)), key=words.count)
    return re.sub(rf"\b{name}\b", "renamed", text)


def edit(lines: list[str]) -> str:
    """A piece, and its beginning again with one name changed."""
    return "".join(lines) + "\n# the same lines, edited:\n\n" + rename("".join(lines[:AGAIN]))


def quote(lines: list[str]) -> str:
    """A piece, and its first line again, quoted in a comment."""
    return "".join(lines) + "\n# In the words of the lines above:\n# " + lines[0].lstrip()


def repeat_line(lines: list[str]) -> str:
    """One line, six times."""
    return lines[0] * 6


FORMS = {"edit": edit, "quote": quote, "repeat": repeat_line}


def candidates(texts: list[str], places: int) -> list[tuple[str, str]]:
    """(form, prompt) of `places` evenly spaced pieces of every text that is long enough.

    A prompt does not end with its newline: to the target a line's end and the next line's
    indentation are one token.
    """
    found = []
    for text in texts:
        lines = [line for line in text.splitlines(True) if len(line.strip()) >= SHORTEST]
        for place in range(places if len(lines) > LINES else 0):
            first = (len(lines) - LINES) * place // places
            piece = lines[first : first + LINES]
            found += [(name, form(piece).rstrip("\n")) for name, form in FORMS.items()]
    return found


def copied(prompt: list[int], answer: list[int]) -> float:
    """Share of the answer's tokens that end `GRAM` tokens in a row of the prompt."""
    known = {tuple(prompt[i : i + GRAM]) for i in range(len(prompt) - GRAM + 1)}
    text = prompt + answer
    ends = range(len(prompt), len(text))
    return sum(tuple(text[max(0, i - GRAM + 1) : i + 1]) in known for i in ends) / len(answer)


def choose(
    asked: list[tuple[str, str]], shares: list[float], least: float, count: int
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """The first `count` prompts, forms in turn, whose share is `least` or more; and per form
    how many were asked and are copies, and the mean share."""
    of_form: dict[str, list[tuple[str, float]]] = {name: [] for name in FORMS}
    for (form, prompt), share in zip(asked, shares, strict=True):
        of_form[form].append((prompt, share))
    figures, copies = {}, []
    for form, each in of_form.items():
        kept = list(dict.fromkeys(prompt for prompt, share in each if share >= least))
        copies.append(kept)
        mean = sum(share for _, share in each) / max(1, len(each))
        figures[form] = {"asked": len(each), "copies": len(kept), "mean_share": round(mean, 3)}
    longest = max(map(len, copies))
    in_turn = [kept[i] for i in range(longest) for kept in copies if i < len(kept)]
    return in_turn[:count], figures


def engines(drafter: str, nodes: int, how: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Every engine's `speculative_config`; `how` are options of the SpecBlock head."""
    head = specblock(drafter, **how)

    def both(policy: str, **keys: str) -> dict[str, Any]:
        return together(head, NGRAM, nodes, policy, **keys)

    return {
        PLAIN: None,
        BASE: alone(head, nodes),
        "n-gram": alone(NGRAM, nodes),
        "route, mean": both("route", confidence="mean"),
        "route, sum": both("route", confidence="sum"),
        "lazy route, mean": both("lazy route", confidence="mean"),
        "lazy route, sum": both("lazy route", confidence="sum"),
        "merge trie, joint": both("merge trie, joint"),
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A row per engine."""
    rows = ["| engine | τ | tokens/s | × vLLM | × SpecBlock | outputs that differ |"]
    rows.append("| --- " * 6 + "|")
    for name, found in results.items():
        speed = found["tokens_per_second"]
        times = [
            f"{speed / results[other]['tokens_per_second']:.2f}" if other in results else "–"
            for other in (PLAIN, BASE)
        ]
        asked = f"{found['different']} of {len(found['digests'])}" if name != PLAIN else "–"
        rows.append(
            f"| {name} | {found['tau']:.2f} | {speed:.1f} | {' | '.join(times)} | {asked} |"
        )
    return "\n".join(rows)


def find_prompts(
    target: str, engine: dict[str, Any], places: int, max_tokens: int, least: float, count: int
) -> dict[str, Any]:
    """The copy-heavy prompts, and per form how many were asked and are copies.

    Raises:
        SystemExit: no answer is a copy.
    """
    sys.path.insert(0, str(PAIR))
    import corpus
    from transformers import AutoTokenizer

    asked = candidates(corpus.load().held_out, places)
    texts = [prompt for _, prompt in asked]
    # Quick, and in other batches than the measurement: whatever ties do, copies stay copies.
    task = Task(texts, 0.0, max_tokens, batch=32)
    (answer,) = run(Request(target, None, [task], engine | {"max_num_seqs": 32}))
    ids = AutoTokenizer.from_pretrained(target)(texts, add_special_tokens=False)["input_ids"]
    shares = [copied(*each) for each in zip(ids, answer.ids, strict=True)]
    chosen, figures = choose(asked, shares, least, count)
    if not chosen:
        raise SystemExit(f"No answer of the target is a copy to {least}: give a lower --least.")
    return {"prompts": chosen, "forms": figures}


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = TARGET,
    drafter: Annotated[Path, typer.Option(help="A SpecBlock drafter.")] = PAIR / "drafter",
    nodes: Annotated[int, typer.Option(help="Nodes of a tree.")] = 24,
    blocks: Annotated[int, typer.Option(help="M, forwards of the drafter.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Copy-heavy prompts, at most.")] = 16,
    places: Annotated[int, typer.Option(min=1, help="Pieces of a file to try.")] = 4,
    least: Annotated[float, typer.Option(help="Share of an answer that must be copied.")] = 0.8,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per prompt.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Passes; the quickest counts.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "float32",
    graphs: Annotated[bool, typer.Option(help="Compile, and capture CUDA graphs.")] = False,
    cache_mib: Annotated[int, typer.Option(help="MiB of the cache of keys and values.")] = 256,
    out: Annotated[Path, typer.Option(help="JSON of the results.")] = ROOT
    / "benchmarks/results/copying.json",
) -> None:
    """Find copy-heavy prompts, then measure every engine on them."""
    how = {"num_blocks": blocks}
    settings = {
        **{"target": from_root(target), "drafter": from_root(drafter)},
        **{"nodes": nodes, "how": how},
        **{"count": prompts, "places": places, "least": least, "max_tokens": max_tokens},
        **{"repeat": repeat, "dtype": dtype, "graphs": graphs, "temperature": 0.0, "batch": 1},
    }
    engine = {
        "dtype": dtype,
        "enforce_eager": not graphs,
        "kv_cache_memory_bytes": cache_mib << 20,
    }
    ledger = Ledger(out, settings)
    if PROMPTS not in ledger:
        found = find_prompts(str(target), engine, places, max_tokens, least, prompts)
        ledger.add(PROMPTS, found)
    chosen = ledger.results[PROMPTS]["prompts"]
    for form, figures in ledger.results[PROMPTS]["forms"].items():
        print(f"{form}: {figures}")
    task = Task(chosen, 0.0, max_tokens, 1, repeat)
    measured, failed = {}, 0
    for name, speculative in engines(str(drafter), nodes, how).items():
        if name not in ledger:
            try:
                (answer,) = run(Request(str(target), speculative, [task], engine))
            except EngineFailed as error:
                print(f"{name}: {error}")
                if name == PLAIN:
                    raise typer.Exit(1) from None
                failed += 1
                continue
            ledger.add(name, answer.summary(ledger.results.get(PLAIN)))
        measured[name] = ledger.results[name]
    print(f"\n{len(chosen)} prompts, {max_tokens} tokens each, greedy, batch 1, {dtype}, "
          f"trees of {nodes} nodes\n\n{markdown(measured)}")  # fmt: skip
    if failed or any(found.get("different") for found in measured.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
