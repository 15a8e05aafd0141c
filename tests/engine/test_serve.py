"""`vllm serve <drafter>` as a user starts it: completions, chat, and the stock metrics."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.dashboard import expressions, panels, unanswered
from support.engines import ROOT
from support.promql import Scrapes, samples

from vllm_specblock.feedback.calibration import OWN_RANGE, RANGE

DRAFTER = "examples/tiny_pair/drafter"

_UNTIL_PROBED = 160
"""Requests of 64 tokens, that is steps at rest, by which drafting is tried again whatever was
measured: a probe may cost 2 % of the rest before it, and six steps of trees of eight tokens, each
thought to take three times what plain ones do, come to 108 steps of 5,400."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server that was told nothing of speculation but the drafter's folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET")
    }
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        DRAFTER,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--kv-cache-memory-bytes",
        str(256 << 20),
        "--max-num-seqs",
        "8",
        "--gpu-memory-utilization",
        "0.3",
        "--per-request-spec-decode-metrics",
        "detailed",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-3000:])
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def post(url: str, **body) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=120))


@pytest.mark.skipif(
    shutil.which("vllm", path=str(Path(sys.executable).parent)) is None,
    reason="the vllm command is not installed",
)
def test_a_user_session(server, plain):
    prompt = "class Reader:\n    def __init__(self, name):\n"
    (model,) = [
        entry["id"] for entry in json.load(urllib.request.urlopen(f"{server}/v1/models"))["data"]
    ]
    whole = post(
        f"{server}/v1/completions", model=model, prompt=prompt, max_tokens=64, temperature=0
    )
    (answer,) = whole["choices"]
    from vllm import SamplingParams

    ids = plain.llm.get_tokenizer()(prompt)["input_ids"]
    (expected,) = plain.generate([ids], SamplingParams(temperature=0, max_tokens=64))[0]
    assert answer["text"] == expected.text

    # The first token is the prompt's; each step after it adds its accepted nodes and one.
    own = whole["metrics"]["speculative_decoding"]
    assert own["num_spec_steps"] == len(own["per_step_accepted"]) > 0
    assert 1 + own["num_accepted_draft_tokens"] + own["num_spec_steps"] == 64

    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "write a class"}],
        max_tokens=24,
        seed=3,
    )
    assert chat.usage.completion_tokens == 24 or chat.choices[0].finish_reason == "stop"

    metrics = urllib.request.urlopen(f"{server}/metrics").read().decode()

    def counter(name: str) -> list[float]:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} ([\d.e+]+)$", metrics, re.M)
        return [float(value) for value in found]

    (drafts,), (nodes,), (accepted,) = map(counter, ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts > 0 and nodes <= 60 * drafts and accepted > 0
    by_depth = counter("accepted_tokens_per_pos")
    assert by_depth[0] <= drafts and by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == accepted and not any(by_depth[8:]), "two blocks of four go no deeper"
    assert model == DRAFTER

    dashboard = unanswered(metrics)
    assert not {name for name in dashboard if "specblock" not in name}, "vLLM's own"
    assert "vllm:specblock_chosen_trees_total" not in dashboard
    check_dashboard(server, metrics, model, prompt)


def check_dashboard(server: str, before: str, model: str, prompt: str) -> None:
    """Every query of it, at a second scrape, gives what the server has just done.

    Args:
        before: an earlier page of `/metrics`.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
    for _ in range(_UNTIL_PROBED):
        own = post(f"{server}/v1/completions", **body)["metrics"]["speculative_decoding"]
        page = urllib.request.urlopen(f"{server}/metrics").read().decode()
        if own["num_accepted_draft_tokens"]:
            break
        before = page  # on a busy machine trees may not have paid for a while: drafting is paused
    assert own["num_accepted_draft_tokens"] > 0, "drafting was never tried again"
    scrapes = Scrapes(samples(before), samples(page), seconds=15.0)
    # As the dashboard's list of models has it: not what clients call it here.
    (name,) = (
        dict(labels)["model_name"] for labels in scrapes.after["vllm:generation_tokens_total"]
    )
    scrapes.model = re.escape(name)
    here = {name for name, found in scrapes.after.items() if found}
    given = 0
    for expression in expressions():
        values = scrapes.query(expression).values()
        if set(re.findall(r"\bvllm:\w+", expression)) <= here:
            assert values and all(map(math.isfinite, values)), expression
            given += 1
    assert given > 20, "what one drafter that does not adapt has"

    def asked(title: str) -> list[float]:
        (panel,) = (each for each in panels() if each["title"] == title)
        return [*scrapes.query(panel["targets"][0]["expr"]).values()]

    # One request alone: what the panels show is what its answer says.
    assert asked("Acceptance length τ") == [pytest.approx(own["mean_acceptance_length"])]
    assert asked("Throughput") == [pytest.approx(64 / 15)]
    assert asked("Drafter chosen") == [1.0]
    # How far it has gone by now depends on how often the machine was quiet enough to draft.
    (beta,) = asked("Calibration β")

    def grew(counter: str) -> float:
        series = f"vllm:specblock_{counter}_total"
        return sum(scrapes.after[series].values()) - sum(scrapes.before[series].values())

    thousandths = grew("calibration_thousandths")
    assert beta == pytest.approx(thousandths / 1000 / grew("drafted_trees")) and beta != 1
    assert RANGE[0] / OWN_RANGE <= beta <= RANGE[1] * OWN_RANGE
