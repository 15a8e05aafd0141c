"""The wheel as a user installs it beside vLLM: what it changes, `doctor`, and `vllm serve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import psutil
import pytest
from lib import server as servers
from openai import BadRequestError, OpenAI
from support.dashboard import unanswered
from support.engines import DRAFTER, ROOT, TARGET
from support.processes import SWITCHES
from vllm import SamplingParams, envs, triton_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_specblock import plugin
from vllm_specblock.config import OptionError
from vllm_specblock.cpu import runner
from vllm_specblock.engine.compat import hooks
from vllm_specblock.engine.patches import PATCHES

# Importing vLLM takes the time: each of two processes looks at all that it can.
REPORT = """
import json, os, sys

def config_of(speculative=None):
    from vllm.engine.arg_utils import EngineArgs
    args = EngineArgs(model=sys.argv[1], max_model_len=256, speculative_config=speculative)
    return args.create_engine_config()

def report():
    config = config_of()
    from triton.backends import backends
    from vllm.triton_utils import HAS_TRITON
    return {
        "runner v2": config.use_v2_model_runner,
        "triton": HAS_TRITON,
        "interpreter": os.environ.get("TRITON_INTERPRET"),
        "backends": sorted(backends),
        "attention": str(config.attention_config.backend),
        "scheduler": str(config.scheduler_config.scheduler_cls),
    }
"""
# Numba may be loaded before vLLM, whose search for kernels fails on llvmlite's attributes.
WITH_US = """
import importlib, importlib.util
from pathlib import Path
import llvmlite.binding
import vllm.plugins
found = {group: sorted(vllm.plugins.load_plugins_by_group(f"vllm.{group}_plugins"))
          for group in ("general", "platform")}
vllm.plugins.load_general_plugins()
import vllm_specblock
found["heavy"] = [*{"numba", "vllm_specblock.drafters.specblock.model"} & {*sys.modules}]
found |= {"report": report(), "kernels": importlib.util.find_spec("triton_kernels") is not None}
ours = {"method": "specblock", "model": sys.argv[2], "num_speculative_tokens": 12}
found["runners"] = [config_of(each).use_v2_model_runner for each in (ours, None)]
home = Path(vllm_specblock.__file__).parent
for path in sorted(home.rglob("*.py")):
    if path.name != "__main__.py":
        name = ".".join(path.relative_to(home.parent).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
found["workers"] = [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
from vllm_specblock.engine.patches import PATCHES
from vllm_specblock.cli.main import app
from typer.testing import CliRunner
told = CliRunner().invoke(app, ["doctor", "--target", sys.argv[1], "--model", sys.argv[2]])
found |= {"file": str(home), "patches": len(PATCHES), "doctor": told.output,
          "status": told.exit_code}
print(json.dumps(found))
"""
# Without the plugin's own registration: this process is of the release that it says.
WITHOUT_US = """
found = {"report": report()}
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
from vllm_specblock import plugin
plugin.installed_version = lambda package: sys.argv[2]
plugin.register()
plugin.register()
plugin.prepare_cpu()
from vllm_specblock.engine.patches import PATCHES
found["patches"] = sorted(PATCHES)
for name, given in json.loads(sys.argv[3]).items():
    try:
        config = config_of(given).speculative_config
        found[name] = "plain" if config is None else config.method
    except ValueError as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
VLLM = """
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of programs of an environment with the wheel of the files that git knows, and
    this one's packages.

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
    shutil.copy(ROOT / "tests/lib/startup/sitecustomize.py", site)
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", wheel]
    run(*pip, "--python", environment / "bin/python", *install)
    shutil.rmtree(source)
    keep_machine_code(site / "vllm_specblock")
    program = environment / "bin/vllm"
    program.write_text(f"#!{environment}/bin/python{VLLM}")
    program.chmod(0o755)
    return environment / "bin"


def keep_machine_code(package: Path) -> None:
    """Numba's, of this checkout: it takes a minute, and is of files by their time."""
    for path in package.rglob("*.py"):
        part = path.relative_to(package)
        (ours,) = (each for each in (ROOT / "vllm_specblock" / part, ROOT / part) if each.exists())
        shutil.copystat(ours, path)
        for kept in (ours.parent / "__pycache__").glob(f"{ours.stem}.*.nb?"):
            shutil.copy2(kept, path.parent / "__pycache__")


def bare(**environment: str) -> dict[str, str]:
    """The environment of a user, who has no checkout and no switch set."""
    ours = {"PYTHONPATH", *SWITCHES}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"VLLM_LOGGING_LEVEL": "ERROR"} | environment


def test_what_it_changes_and_what_doctor_says(installed, tmp_path):
    """An engine without drafts is as it is where the plugin is not loaded, and asking for drafts is
    enough; in other releases of vLLM, those who ask are refused."""
    python = installed / "python"
    out = run(python, "-c", REPORT + WITH_US, TARGET, DRAFTER, cwd=tmp_path, env=bare())
    found = json.loads(out.splitlines()[-1])
    assert found["file"].startswith(str(installed.parent)), "another one was imported"
    assert "specblock" in found["general"] and "specblock_cpu" in found["platform"]
    assert found["patches"] > 0, "it was found and did not register"
    assert not found["kernels"], "vLLM would take these for its MoE kernels"
    assert not found["heavy"]
    # It replaces vLLM's copies to a device and Triton's barrier in the whole process.
    assert not found["workers"], "an import loads vLLM's CPU worker"
    told, count = found["doctor"], len(hooks())
    assert found["status"] == 0 and "Nothing is wrong." in told and "✗" not in told, told
    assert re.search(r"✓ +vllm-specblock +\d", told), told
    assert f"{count} of {count} are in vLLM" in told
    assert "reads target layers 2, 3, 4" in told and "LlamaForCausalLM" in told
    assert all(name in told for name in ("Python", "torch", "transformers", "vLLM", "triton"))
    assert "doctor" in run(installed / "specblock", "--help", cwd=tmp_path)

    version = "0.34.0+cpu"
    asked = {
        "ours": {"method": "specblock", "kind": "ngram", "num_speculative_tokens": 4},
        "ours with a drafter": {"method": "specblock", "model": "no-such/drafter"},
        "vllm's": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        "unknown": {"method": "no such method", "num_speculative_tokens": 4},
        "none": None,
    }
    words = "-c", REPORT + WITHOUT_US, TARGET, version, json.dumps(asked)
    out = run(python, *words, cwd=tmp_path, env=bare(VLLM_PLUGINS=""))
    without = json.loads(out.splitlines()[-1])
    assert found["report"] == without["report"]
    assert without["report"]["interpreter"] is None
    assert "cpu" not in without["report"]["backends"]
    if current_platform.is_cpu():
        assert not without["report"]["runner v2"] and found["runners"] == [True, False]
    for name in ("ours", "ours with a drafter"):
        kind, _, sentence = without[name].partition(": ")
        assert kind == "OptionError" and sentence.endswith(".") and "\n" not in sentence
        assert "0.32.x" in sentence and f"{version} is installed:" in sentence
    assert (without["vllm's"], without["none"]) == ("ngram", "plain")
    assert without["unknown"].startswith("ValidationError")
    assert without["patches"] == ["vllm.engine.arg_utils.EngineArgs.create_speculative_config"]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has the runner anyway")
def test_a_process_that_ran_the_other_runner_is_told_what_to_do(monkeypatch):
    envs.disable_envs_cache()
    monkeypatch.setattr(triton_utils, "HAS_TRITON", False)
    monkeypatch.setitem(sys.modules, runner._RUNNER, sys)
    with pytest.raises(OptionError, match="create the one with 'specblock' first"):
        runner.prepare()


def test_register_twice_patches_once():
    plugin.register()
    before = EngineArgs.create_speculative_config, dict(PATCHES)
    plugin.register()
    assert (EngineArgs.create_speculative_config, dict(PATCHES)) == before


# ---- `vllm serve <drafter>` ----
SERVED = "examples/tiny_pair/drafter"


@pytest.fixture(scope="module")
def server(installed, tmp_path_factory):
    """A server that is given the drafter's folder alone; a worker that is spawned prepares itself.

    All that an engine reads of the package came along, files that are no modules too.
    """
    options = (
        "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8 "
        f"--kv-cache-memory-bytes {256 << 20} --gpu-memory-utilization 0.3 "
        "--per-request-spec-decode-metrics detailed"
    )
    log = tmp_path_factory.mktemp("serve") / "log"
    env = dict.fromkeys([*SWITCHES, "PYTHONPATH"]) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # A shell starts jobs in the background with Ctrl-C ignored, and that is inherited.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "VLLM", str(installed / "vllm"))
        server = servers.Server([SERVED, *options.split()], log, env, ROOT)
    signal.signal(signal.SIGINT, before)
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_request_opts_out_of_drafts(client):
    """A wrong value gets HTTP 400; the server keeps running."""

    def complete(**vllm_xargs):
        body = {"model": SERVED, "prompt": "class Reader:\n", "max_tokens": 24, "temperature": 0}
        return client.completions.create(**body, extra_body={"vllm_xargs": vllm_xargs})

    plain = complete()
    with pytest.raises(BadRequestError) as refused:
        complete(specblock_draft="off")
    assert "\"specblock_draft\" is 'off'" in refused.value.body["message"]
    for no in (False, 0):
        answer = complete(specblock_draft=no)
        assert answer.choices[0].text == plain.choices[0].text
        own = (answer.metrics or {}).get("speculative_decoding") or {"num_draft_tokens": 0}
        assert own["num_draft_tokens"] == 0


def test_a_user_session(server, client, plain):
    (model,) = [entry.id for entry in client.models.list()]
    assert model == SERVED
    prompt = "class Reader:\n    def __init__(self, name):\n"
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0)
    ids = plain.llm.get_tokenizer()(prompt)["input_ids"]
    (expected,) = plain.generate([ids], SamplingParams(temperature=0, max_tokens=64))[0]
    assert whole.choices[0].text == expected.text

    # The first token is the prompt's; each step after it adds its accepted nodes and one.
    own = whole.metrics["speculative_decoding"]
    assert own["num_spec_steps"] == len(own["per_step_accepted"]) > 0
    assert 1 + own["num_accepted_draft_tokens"] + own["num_spec_steps"] == 64

    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "write a class"}], max_tokens=24, seed=3
    )
    assert chat.usage.completion_tokens == 24 or chat.choices[0].finish_reason == "stop"

    metrics = urllib.request.urlopen(f"{server.address}/metrics").read().decode()

    def counter(name: str) -> list[float]:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} ([\d.e+]+)$", metrics, re.M)
        return [float(value) for value in found]

    (drafts,), (nodes,), (accepted,) = map(counter, ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts > 0 and nodes <= 60 * drafts and accepted > 0
    by_depth = counter("accepted_tokens_per_pos")
    assert by_depth[0] <= drafts and by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == accepted and not any(by_depth[8:]), "two blocks of four go no deeper"

    dashboard = unanswered(metrics)
    assert not {name for name in dashboard if "specblock" not in name}, "vLLM's own"
    assert "vllm:specblock_chosen_trees_total" not in dashboard


def test_ctrl_c_with_a_request_in_flight(server, client):
    """The server ends within seconds, and none of its processes is left. The last test here."""
    running = server.process
    children = psutil.Process(running.pid).children(recursive=True)
    long = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=SERVED, prompt="class ", stream=True, **long) as stream:
        assert next(iter(stream)).choices
        running.send_signal(signal.SIGINT)
    # vLLM 0.32 may wait for the client's connection to close, with or without us.
    assert running.wait(timeout=60) == 0
    assert children and not psutil.wait_procs(children, timeout=5)[1]
