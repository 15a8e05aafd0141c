"""Installing the plugin changes nothing for those who do not ask for it."""

from __future__ import annotations

import json
import sys

import pytest
from support.engines import TARGET
from support.processes import run_python
from vllm import envs, triton_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_specblock import plugin
from vllm_specblock.config import OptionError
from vllm_specblock.cpu import runner
from vllm_specblock.engine.patches import PATCHES

REPORT = """
import json, os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
heavy = {"numba", "vllm_specblock.drafters.specblock.model"} & {*sys.modules}
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(model=sys.argv[1], max_model_len=256).create_engine_config()
from triton.backends import backends
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(json.dumps({
    "runner v2": config.use_v2_model_runner,
    "triton": HAS_TRITON,
    "interpreter": os.environ.get("TRITON_INTERPRET"),
    "backends": sorted(backends),
    "attention": str(config.attention_config.backend),
    "scheduler": str(config.scheduler_config.scheduler_cls),
    "loaded": sorted(heavy),
}))
"""


def report(**environment: str) -> dict:
    return json.loads(run_python("-c", REPORT, TARGET, **environment)[-1])


def test_same_runner_and_triton_with_and_without():
    """vLLM's own replacement of kernels on a CPU fails where Numba was imported before."""
    with_us, without = report(), report(VLLM_PLUGINS="")
    assert with_us == without and not with_us["loaded"]
    assert with_us["interpreter"] is None and "cpu" not in with_us["backends"]


on_a_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has the runner anyway")


@on_a_cpu
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


ELSEWHERE = """
import json, sys
from vllm_specblock import plugin
plugin.installed_version = lambda package: sys.argv[1]
plugin.register()
plugin.register()
plugin.prepare_cpu()
from vllm.engine.arg_utils import EngineArgs
from vllm_specblock.engine.patches import PATCHES
found = {"patches": sorted(PATCHES)}
for name, given in json.loads(sys.argv[3]).items():
    try:
        args = EngineArgs(model=sys.argv[2], max_model_len=256, speculative_config=given)
        config = args.create_engine_config().speculative_config
        found[name] = "plain" if config is None else config.method
    except ValueError as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_other_versions_refuse_those_who_ask_and_leave_the_others_alone():
    """Without the plugin's own registration: this process is of the release that it says."""
    version = "0.34.0+cpu"
    asked = {
        "ours": {"method": "specblock", "kind": "ngram", "num_speculative_tokens": 4},
        "ours with a drafter": {"method": "specblock", "model": "no-such/drafter"},
        "vllm's": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        "unknown": {"method": "no such method", "num_speculative_tokens": 4},
        "none": None,
    }
    switches = {"VLLM_PLUGINS": "", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    lines = run_python("-c", ELSEWHERE, version, TARGET, json.dumps(asked), **switches)
    found = json.loads(lines[-1])
    for name in ("ours", "ours with a drafter"):
        kind, _, sentence = found[name].partition(": ")
        assert kind == "OptionError" and sentence.endswith(".") and "\n" not in sentence
        assert "0.32.x" in sentence and f"{version} is installed:" in sentence
    assert (found["vllm's"], found["none"]) == ("ngram", "plain")
    assert found["unknown"].startswith("ValidationError")
    assert found["patches"] == ["vllm.engine.arg_utils.EngineArgs.create_speculative_config"]
