"""The wheel as a user installs it: beside vLLM, where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.processes import SWITCHES

pytest.importorskip("vllm")

from vllm.platforms import current_platform

ROOT = Path(__file__).resolve().parents[2]
# One process: importing vLLM is what takes the time.
LOOK = """
import contextlib, importlib.util, io, json
import vllm.plugins
found = {group: sorted(vllm.plugins.load_plugins_by_group(f"vllm.{group}_plugins"))
         for group in ("general", "platform")}
vllm.plugins.load_general_plugins()
import vllm_specblock
from vllm_specblock.engine.patches import PATCHES
from vllm_specblock.cli.main import app
from typer.testing import CliRunner
told = CliRunner().invoke(app, ["doctor"])
found |= {"file": vllm_specblock.__file__, "patches": len(PATCHES), "doctor": told.output,
          "status": told.exit_code,
          "kernels": importlib.util.find_spec("triton_kernels") is not None}
print(json.dumps(found))
"""


# Numba may be loaded before vLLM, whose search for kernels fails on llvmlite's attributes. A worker
# that is spawned prepares itself.
ANSWER = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

def runner(speculative):
    args = EngineArgs(model=sys.argv[1], max_model_len=256, speculative_config=speculative)
    return args.create_engine_config().use_v2_model_runner

def main():
    import llvmlite.binding
    ours = {
        "method": "specblock", "model": sys.argv[2], "num_speculative_tokens": 12,
        "enable_adaptive_verification": False,
        "second_drafter": {"kind": "ngram"}, "draft_policy": "merge",
    }
    runners = [runner(each) for each in (None, ours, None)]
    llm = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=2,
        kv_cache_memory_bytes=256 << 20, disable_log_stats=False, speculative_config=ours,
    )
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (answer,) = llm.generate("def main(argv):\\n", greedy, use_tqdm=False)
    count = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print(json.dumps({"runners": runners, "tokens": len(answer.outputs[0].token_ids),
                      "accepted": count["vllm:spec_decode_num_accepted_tokens"]}))

if __name__ == "__main__":
    main()
"""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel of the files that git knows, and this one's packages.

    Those come by a line with their path: what makes this checkout importable here, a file of
    the same kind among them, is not read there.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    for name in run("git", "ls-files", "--cached", cwd=ROOT).splitlines():
        if name.startswith(("vllm_specblock/", "triton_kernels/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "packages.pth").write_text("\n".join(paths) + "\n")
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", wheel]
    run(*pip, "--python", environment / "bin/python", *install)
    shutil.rmtree(source)
    return environment


def bare(**environment: str) -> dict[str, str]:
    """The environment of a user, who has no checkout and no switch set."""
    ours = {"PYTHONPATH", *SWITCHES}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"VLLM_LOGGING_LEVEL": "ERROR"} | environment


def test_vllm_finds_it_and_the_doctor_has_nothing_to_say(installed, tmp_path):
    out = run(installed / "bin/python", "-c", LOOK, cwd=tmp_path, env=bare())
    found = json.loads(out.splitlines()[-1])
    assert found["file"].startswith(str(installed)), "another one was imported"
    assert "specblock" in found["general"] and "specblock_cpu" in found["platform"]
    assert found["patches"] > 0, "it was found and did not register"
    assert not found["kernels"], "vLLM would take these for its MoE kernels"
    assert found["status"] == 0, found["doctor"]
    assert re.search(r"✓ +vllm-specblock +\d", found["doctor"]), found["doctor"]
    assert "doctor" in run(installed / "bin/specblock", "--help", cwd=tmp_path)


@pytest.mark.engine
def test_an_engine_drafts_with_it(installed, tmp_path):
    """All that an engine reads of the package came along, files that are no modules too. Asking for
    trees is enough on a CPU, and other engines keep their runner."""
    pair = [ROOT / "examples/tiny_pair" / name for name in ("target", "drafter")]
    (tmp_path / "answer.py").write_text(ANSWER)
    command = [installed / "bin/python", "answer.py", *pair]
    out = run(*command, cwd=tmp_path, env=bare(VLLM_WORKER_MULTIPROC_METHOD="spawn"))
    (found,) = [json.loads(line) for line in out.splitlines() if line.startswith('{"runners"')]
    assert found["tokens"] == 32 and found["accepted"] > 5
    if current_platform.is_cpu():
        assert found["runners"] == [False, True, False]
