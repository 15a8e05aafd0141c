"""The drafter's forward in the benchmark: the head's own, and bounded by bytes counted right."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import drafter_forward as bench
import pytest
import torch
import typer
from lib.model_configs import MODELS, make_drafter, write_target
from typer.testing import CliRunner

from vllm_specblock.drafters.common import paged_attention
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.specblock.dense_cache import DenseCache

CONTEXT, ROWS, BATCH = 5, 3, 2


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"), MODELS["tiny"], 0)
    return process_after_loading(make_drafter(folder, MODELS["tiny"]).eval(), None)


@torch.inference_mode()
def test_rows_see_their_context_and_each_other(drafter, monkeypatch):
    """Against plain causal attention over the same entries, laid out densely."""
    config, K = drafter.config, drafter.config.block_size
    seen = {}
    attention_builder = bench.attention_builder

    def watched(*args):
        seen["attend"] = attention_builder(*args)
        seen["before"] = [cache.clone() for cache in seen["attend"].caches]
        return seen["attend"]

    monkeypatch.setattr(bench, "attention_builder", watched)
    # What is read below is a cache as it looks, not as a CPU packs it.
    monkeypatch.setattr(paged_attention, "packing_on_cpu", lambda cache: None)
    states = {}
    condition = drafter.condition
    monkeypatch.setattr(
        drafter, "condition", lambda state: states.setdefault("made", condition(state))
    )
    embeddings = []
    hook = drafter.input_layer.register_forward_pre_hook(lambda _, args: embeddings.append(args[1]))
    logprob, token, _ = bench.forward(drafter, bench.FIRST, CONTEXT, BATCH, ROWS)()
    hook.remove()
    assert token.shape[:2] == (BATCH, K)

    for request in range(BATCH):
        cache = DenseCache(config)
        blocks = -(-(CONTEXT + ROWS) // bench.BLOCK)
        for layer, entries in enumerate(seen["before"]):
            mine = entries[request * blocks : (request + 1) * blocks].transpose(1, 2).flatten(0, 1)
            rows = mine[: CONTEXT * K].unflatten(0, (CONTEXT, K))
            cache.key[layer], cache.value[layer] = rows.chunk(2, dim=-1)
        own = slice(request * ROWS, (request + 1) * ROWS)
        base = torch.arange(CONTEXT + 1, CONTEXT + 1 + ROWS)
        hidden = drafter(states["made"][own], embeddings[0][own], base, cache.append())
        expected, names, _ = drafter.candidates(hidden[-1], bench.WIDTH)
        torch.testing.assert_close(logprob[request], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(token[request], names)


@torch.inference_mode()
def test_a_later_block_answers_for_every_row(drafter):
    logprob, _, bucket = bench.forward(drafter, bench.LATER, CONTEXT, BATCH, ROWS)()
    assert logprob.shape == (BATCH * ROWS, drafter.config.block_size, bench.WIDTH)
    assert bucket.shape == (BATCH * ROWS, drafter.config.block_size)


def test_bytes(drafter):
    config = drafter.config
    weights = 4 * sum(each.numel() for each in drafter.parameters())
    # Folded at start-up: the queries, and their norm.
    weights -= 4 * (config.block_size + 1) * config.hidden_size
    kv_index = 4 * 2 * config.num_key_value_heads * config.head_dim
    cache = 2 * 100 * config.block_size * config.num_hidden_layers * kv_index
    assert bench.bytes_to_read(drafter, bench.FIRST, 100, 2) == weights + cache
    spared = 4 * 3 * config.target_hidden_size * config.hidden_size
    assert bench.bytes_to_read(drafter, bench.LATER, 100, 2) == weights + cache - spared


def test_the_bound_stands_beside_the_figure():
    each = {"form": "f", "batch": 1, "rows": 2, "context": 3, "median_us": 30.0, "bound_us": 20.0}
    assert "| 30.0 | 20.0 | 1.50 |" in bench.table({"a": each})
    assert "| 30.0 | – | – |" in bench.table({"a": each | {"bound_us": None}})


def test_the_command_on_a_cpu(tmp_path):
    app = typer.Typer()
    app.command()(bench.main)
    path = tmp_path / "d.json"
    given = f"--device cpu --rows 1,3 --batches 2 --context 20 --runs 2 --out {path}"
    result = CliRunner().invoke(app, given.split())
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["settings"]["model"] == "tiny" and len(found["results"]) == 4
    assert all(each["median_us"] > 0 for each in found["results"].values())


def test_weights_in_eight_bits_are_a_third_of_the_bytes():
    """A quarter of float32's where they are short, all of it elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(Path(folder), MODELS["tiny"], 0)
        drafters = [
            process_after_loading(make_drafter(target, MODELS["tiny"]).eval(), q)
            for q in (None, "fp8")
        ]
    full, short = (bench.bytes_to_read(each, bench.FIRST, 0, 1) for each in drafters)
    kept = sum(
        each.nbytes
        for name, each in drafters[0].named_parameters()
        if name.startswith(("shift_proj", "rank_head"))
    )
    assert (full - kept) / 4 < short - kept < (full - kept) / 3
    hidden = bench.forward(drafters[1], bench.FIRST, CONTEXT, BATCH, ROWS)()
    assert hidden[0].isfinite().all()
