"""The server benchmark: what is asked, who has a turn, what is shown; with a stand-in for vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_serve
import pytest
from bench_serve import PAIR, Servers, measure, words
from lib.results_store import ResultsStore
from lib.served import Load, decode_steps, kept, key_of, table, tau_of, write_prompts
from lib.server import ServerEnded
from support import fake_vllm

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.methods import resolve

FAKE = (sys.executable, fake_vllm.__file__)
NAMES = ("plain", "ngram", "merged")


def methods(*names: str):
    config = BenchConfig(
        target=PAIR / "target",
        set=("none",),
        method=names,
        drafter={"specblock": PAIR / "drafter"},
        define={name: spec for name, spec in bench_serve.ENGINES.items() if name in names},
    )
    return list(resolve(config).values())


@pytest.fixture
def load(tmp_path):
    return Load(tmp_path / "prompts.json", 10, 0.0, False, least=4, per_slot=2)


def test_servers_have_our_defaults():
    """Unlike the methods of specblock bench, which verify every node of every tree."""
    plain, ngram, merged = methods(*NAMES)
    assert plain.speculative is None
    assert ngram.speculative == {"method": "specblock", "kind": "ngram"}
    assert merged.speculative["draft_policy"] == "merge"
    assert "enable_adaptive_verification" not in merged.speculative


def test_the_client_and_the_server_know_these_options(load, tmp_path):
    pytest.importorskip("vllm")
    from vllm.benchmarks.serve import add_cli_args
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    client, server = FlexibleArgumentParser(), FlexibleArgumentParser()
    add_cli_args(client)
    args = client.parse_args(load.arguments(99, 8, tmp_path / "x.json", warm=False))
    assert args.max_concurrency == 8 and args.num_prompts == 16 and args.num_warmups == 8
    assert args.result_filename == "x.json" and args.temperature == 0
    AsyncEngineArgs.add_cli_args(server)
    given = {"max_num_seqs": 8, "no_enable_prefix_caching": True, "kv_cache_memory_bytes": 1 << 28}
    args = server.parse_args([*words(given), "--speculative-config", '{"method": "specblock"}'])
    assert args.enable_prefix_caching is False and args.kv_cache_memory_bytes == 1 << 28


def test_prompts_of_any_layout(tmp_path):
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "a"}\n\n{"id": 1, "turns": ["b", "c"]}\n')
    chats = json.loads(write_prompts(given, tmp_path).read_text())
    assert [chat["conversations"][0]["value"] for chat in chats] == ["a", "b"]
    python = json.loads(write_prompts(None, tmp_path).read_text())
    assert len(python) > 20 and all(chat["conversations"][0]["value"] for chat in python)
    given.write_text('{"text": "a"}\n')
    with pytest.raises(SystemExit, match="must have lines like"):
        write_prompts(given, tmp_path)


def test_an_unanswered_request_ends_it():
    with pytest.raises(SystemExit, match="x: 7 of 8 requests were answered"):
        kept({"completed": 7, "failed": 1}, 8, "x")


def test_shares_of_steps():
    # 10 requests of 31 tokens: 300 after the prompts' own; 60 trees give 180 of them.
    result = {"total_output_tokens": 310, "completed": 10, "spec_decode_num_drafts": 60}
    found = result | {"spec_decode_accepted_tokens": 120}
    assert decode_steps(found) == 60 + 120 and tau_of(found) == 300 / 180
    assert decode_steps(result | {"spec_decode_accepted_tokens": 400}) == 60


def test_turns_of_every_server_and_a_run_that_goes_on(load, tmp_path):
    store = ResultsStore(tmp_path / "serve.json", {})
    servers = Servers({"model": "some/target", "enforce_eager": True}, vllm=FAKE)
    those = methods("plain", "ngram")
    measure(those, servers, load, [1, 2], 2, store, tmp_path)
    assert set(store.results) == {
        key_of(name, count, number)
        for name in ("plain", "ngram")
        for count in (1, 2)
        for number in (0, 1)
    }
    assert "asked" not in store.results[key_of("ngram", 1, 0)]
    log = (tmp_path / "ngram.server.log").stat().st_mtime_ns
    again = ResultsStore(tmp_path / "serve.json", {})
    measure(those, servers, load, [1, 2], 2, again, tmp_path)
    assert (tmp_path / "ngram.server.log").stat().st_mtime_ns == log, "nothing was left to do"

    page = table(store.results, ["plain", "ngram"], [1, 2, 64], 2).splitlines()
    assert len(page) == 2 + 4
    cells = [cell.strip() for cell in page[-1].split("|")[1:-1]]
    assert cells == ["2", "ngram", "30.0", "1.50", *["5.0"] * 2, *["7.0"] * 2, "1.50", "50%"]
    assert page[2].endswith("| – | – |")


def test_a_server_that_does_not_start_is_told(load, tmp_path):
    store = ResultsStore(tmp_path / "serve.json", {})
    servers = Servers({"model": str(Path("some/broken"))}, vllm=FAKE)
    with pytest.raises(ServerEnded, match="It ended with 1: no such"):
        measure(methods("plain"), servers, load, [1], 1, store, tmp_path)
