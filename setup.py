"""Maps the folder `triton_kernels/` into the package; everything else is in pyproject.toml.

It may not be installed under its own name: vLLM takes any importable `triton_kernels` for the
MoE kernels that are called so, in place of the copy it ships.
"""

from setuptools import setup

setup(package_dir={"vllm_specblock.triton_kernels": "triton_kernels"})
