"""`vllm bench serve` over servers with and without draft trees, at 1, 8 and 64 requests at a time.

    python benchmarks/bench_serve.py --target "$(python examples/smollm2/target.py | tail -n 1)" \
        --drafter examples/smollm2/drafter --dtype bfloat16 --prompts PROMPTS.jsonl --chat

Every engine is a `vllm serve` of its own, as a user starts it, and is measured by vLLM's own
client. All are alive side by side and take turns, so that a machine whose speed drifts slows all of
them; one that has no turn is stopped. A killed run goes on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.engines import ENGINES
from lib.options import numbers
from lib.results_store import MEASURED, ROOT, ResultsStore, from_root
from lib.served import Load, kept, key_of, table, write_prompts
from lib.server import VLLM, Server
from tqdm import tqdm

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.bench.engine_arguments import cache_bytes
from vllm_specblock.bench.machine import describe_machine
from vllm_specblock.bench.methods import Method, resolve
from vllm_specblock.bench.schedule import rotated

PAIR = ROOT / "examples/tiny_pair"


@dataclass(frozen=True)
class Servers:
    """How all servers are started.

    Attributes:
        engine: arguments of `vllm serve`, each with a value; True for a flag.
        env: of every server; a method's own comes after.
        vllm: the command, in words.
    """

    engine: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    vllm: Sequence[str] = VLLM

    def start(self, method: Method, folder: Path) -> Server:
        given = {**self.engine, **method.engine}
        if method.speculative is not None:
            given["speculative-config"] = json.dumps(method.speculative)
        arguments = [given.pop("model"), *words(given)]
        log = folder / f"{method.name}.server.log"
        return Server(arguments, log, {**self.env, **method.env}, vllm=self.vllm)

    def ask(self, server: Server, arguments: Sequence[str], result: Path) -> dict[str, Any]:
        """Return what `vllm bench serve` writes; the server runs for that time only.

        Raises:
            SystemExit: the client failed.
        """
        result.unlink(missing_ok=True)
        server.resume()
        command = [*self.vllm, "bench", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        server.require()
        server.pause()
        if done.returncode or not result.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()
            raise SystemExit(f"vllm bench serve: {last[-1] if last else done.returncode}")
        return json.loads(result.read_text(encoding="utf-8"))


def words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments as words of a command line."""
    for name, value in arguments.items():
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


def measure(
    methods: Sequence[Method],
    servers: Servers,
    load: Load,
    at_once: Sequence[int],
    rounds: int,
    store: ResultsStore,
    out: Path,
) -> None:
    """Give every server its turns, into `store`."""
    turns = [(count, number) for number in range(rounds) for count in at_once]
    if all(key_of(method.name, *turn) in store for method in methods for turn in turns):
        return
    started: dict[str, Server] = {}
    warm: set[tuple[str, int]] = set()
    with ExitStack() as stack:
        for method in methods:
            server = started[method.name] = servers.start(method, out)
            stack.callback(server.close)
            server.wait()  # side by side they would compile the same thing again
            server.pause()
        for index, (count, number) in enumerate(tqdm(turns, "turns", unit="turn")):
            for name in rotated([*started], index):
                key, result = key_of(name, count, number), out / f"{name}.json"
                if key in store:
                    continue
                port = started[name].port
                asked = load.arguments(port, count, result, (name, count) in warm)
                warm.add((name, count))
                found = servers.ask(started[name], asked, result)
                store.add(key, kept(found, load.requests(count), key))


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = PAIR / "target",
    drafter: Annotated[Path, typer.Option(help="Of specblock and merged.")] = PAIR / "drafter",
    method: Annotated[
        list[str], typer.Option(help="Engines, those of specblock bench too; the first is 1 ×.")
    ] = ["plain", "plain-v2", "ngram", "specblock", "merged"],  # noqa: B006
    at_once: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8,64",
    prompts: Annotated[
        Path | None, typer.Option(help='Lines of {"prompt"} or {"turns"}; else Python files.')
    ] = None,
    chat: Annotated[bool, typer.Option(help="Prompts are a chat's.")] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    tokens: Annotated[int, typer.Option(min=1, help="Generated per request.")] = 128,
    least: Annotated[int, typer.Option(min=1, help="Requests of a turn, at least.")] = 8,
    per_slot: Annotated[int, typer.Option(min=1, help="And for each at a time.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each at each.")] = 3,
    nodes: Annotated[int | None, typer.Option(help="N of trees; else the plugin's.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target's arithmetic.")] = "float32",
    max_model_len: Annotated[int, typer.Option(help="Tokens of a request.")] = 1024,
    engine: Annotated[str, typer.Option(help="More arguments of vllm serve, as JSON.")] = "{}",
    env: Annotated[list[str], typer.Option(help="NAME=VALUE, of every server.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of logs and results.")] = MEASURED / "serve",
) -> None:
    """Measure every engine at every number of requests, print a table."""
    from transformers import AutoConfig

    counts = numbers(at_once, "--at-once")
    chosen = BenchConfig(
        target=target,
        set=("none",),
        method=tuple(method),
        drafter={"specblock": drafter},
        define={name: spec for name, spec in ENGINES.items() if name in method},
        nodes=nodes,
    )
    try:
        methods = resolve(chosen)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    if shutil.which("vllm", path=str(Path(sys.executable).parent)) is None:
        raise SystemExit("There is no vllm command beside this Python.")
    config = AutoConfig.from_pretrained(target)
    sizes = config.num_hidden_layers, max_model_len, max(counts), 4 if dtype == "float32" else 2
    arguments = {
        "model": str(target),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max(counts),
        "no_enable_prefix_caching": True,  # a second round would be spared its prompts
        "kv_cache_memory_bytes": cache_bytes(config, *sizes),
        **json.loads(engine),
    }
    out.mkdir(parents=True, exist_ok=True)
    load = Load(write_prompts(prompts, out), tokens, temperature, chat, least, per_slot)
    settings = {
        "target": target.name,
        "methods": {name: each.as_json() for name, each in methods.items()},
        "load": asdict(load) | {"prompts": "Python files" if prompts is None else prompts.name},
        "engine": arguments | {"model": from_root(target)},
        "env": env,
        "machine": describe_machine(),
    }
    store = ResultsStore(out / "serve.json", settings)
    servers = Servers(arguments, dict(each.split("=", 1) for each in env))
    measure(list(methods.values()), servers, load, counts, rounds, store, out)
    print(f"\n{table(store.results, list(methods), counts, rounds)}\n\nResults: {store.path}")


if __name__ == "__main__":
    typer.run(main)
