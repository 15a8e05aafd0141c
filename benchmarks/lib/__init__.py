"""What several benchmarks share.

Run them as files. With `python -m` the repository's root would be on the path, and vLLM would take
`triton_kernels/` there for the kernels that it ships.
"""
