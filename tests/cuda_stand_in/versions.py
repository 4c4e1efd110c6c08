"""The versions that the stand-in's environment is made of: the one place where they are pinned.

The stand-in's runtime exports the symbols that this build of torch imports. Another torch imports others: change TORCH, run
`make test-cuda`, and `build.py` says which symbols are new.
"""

from __future__ import annotations

TORCH = "torch==2.11.0"
"""The build for CUDA 13, which is this version's default on Linux. It is installed without the NVIDIA packages it asks for."""

TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
"""Requirements of torch other than the NVIDIA packages."""

CUDA_PACKAGES = (
    "accelerate==1.15.0", "cuda-bindings==13.0.3", "cuda-pathfinder==1.9.0", "cupy-cuda13x==14.2.0", "triton==3.6.0",
    "trl==1.16.0",
)  # fmt: skip
"""Packages installed without their requirements, which would be NVIDIA's again. TRL is a peer of `bench training`."""

CUDA_HEADERS = ("nvidia-cuda-crt==13.0.88", "nvidia-cuda-runtime==13.0.96")
"""Unpacked for their headers alone: nothing of them is loaded."""

NOT_NEEDED = (
    "accelerate", "build", "chameleon-mm[docs]", "chameleon-mm[stack]", "hatch-fancy-pypi-readme", "hatchling", "import-linter",
    "kernels", "lightning", "mypy", "ruff", "selenium", "trl", "twine", "types-psutil",
)  # fmt: skip
"""Unused packages of the extra `dev`: lint, packaging, documents and the browser do not run here. Training frameworks and the
extra `stack` do not run either, but for those in `CUDA_PACKAGES`: they ask for torch, and pip would bring NVIDIA's packages."""
