"""What vLLM and Triton read when they are imported."""

import os

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["TRITON_F32_DEFAULT"] = "ieee"
