"""Writes a Hugging Face folder: the policy of a run's checkpoint, or a GGUF file.

    python -m spell_jax.export --workdir=W --out=DIR [--step=N] [--dtype=float32] [--adapters]
    python -m spell_jax.export --workdir=W --push=hf://OWNER/NAME [--out=DIR] ...
    python -m spell_jax.export --gguf=FILE --out=DIR [--dtype=bfloat16]

1. W is the workdir of train.py or sft.py. The folder that the run started from (W/config.json names
   it) supplies the architecture and the tokenizer.
2. The weights come from the newest intact checkpoint, or from --step. Optimizer state is not read.
3. DIR gets config.json, sharded safetensors, tokenizer files and generation_config.json, or, after
   an error, nothing. Adapters are merged into their base; --adapters writes them alone, in PEFT's
   format.
4. --push writes the same files to a model of the Hugging Face Hub, in one commit. A new model is
   private. In an existing one, the files of the old policy (weights, configs, tokenizer) are
   replaced, by --adapters only those of the old adapters, and all other files stay. The token is
   huggingface_hub's (hf auth login, or HF_TOKEN).

FILE is a model of llama.cpp (architectures llama, qwen2, qwen3, gemma3). Its weights are
dequantized, to float32 unless --dtype says otherwise; its tokenizer and chat template go along.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from typing import Any

from absl import flags
from etils import epath

from spell_jax.policy.choices import COMPUTE_DTYPES
from spell_jax.runtime import entry


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    from spell_jax.runtime import setup
    from spell_jax.runtime.files import hub, paths
    from spell_jax.runtime.hosts import distributed

    setup.setup()
    flag_values = flags.FLAGS
    if bool(flag_values.workdir) == bool(flag_values.gguf):
        raise flags.ValidationError("must give either --workdir or --gguf")
    if not flag_values.out and not flag_values.push:
        raise flags.ValidationError("must give --out or --push")
    push = flag_values.push
    if push and flag_values.out and paths.is_remote(flag_values.out):
        raise flags.ValidationError("--out must be a local folder with --push")
    if push:
        distributed.broadcast(lambda: hub.check_target(push))
    with contextlib.ExitStack() as stack:
        folder = flag_values.out
        if not folder:
            folder = str(pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "policy"))
        content = _write(flag_values, paths.open_folder(folder))
        if push:
            url = distributed.broadcast(lambda: hub.push(folder, push))
            print(f"{url}: {content}")
    if flag_values.out:
        print(f"{flag_values.out}: {content}")


def _write(flag_values: Any, out: epath.Path) -> str:
    """Write the folder; return what it holds."""
    from spell_jax.policy.formats import gguf_convert
    from spell_jax.runtime.files import paths, remote
    from spell_jax.trainer.export import check_new, export

    if flag_values.gguf:
        check_new(out)
        gguf_convert.convert(remote.fetch(flag_values.gguf), out, flag_values.dtype or "float32")
        return f"the policy of {flag_values.gguf}"
    # A run's weights are trained in float32, but usually served in bfloat16. GGUF's are
    # dequantized, and float32 loses nothing.
    workdir, dtype = paths.open_folder(flag_values.workdir), flag_values.dtype or "bfloat16"
    step = export(workdir, out, flag_values.step, dtype, flag_values.adapters)
    return f"the policy after step {step}"


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_string("gguf", None, "GGUF file, instead of a run.")
    flags.DEFINE_string("out", None, "New folder to write.")
    flags.DEFINE_string("push", None, "Model of the Hub to write: hf://OWNER/NAME.")
    flags.DEFINE_integer("step", None, "Step of the checkpoint; the latest by default.")
    flags.DEFINE_enum(
        "dtype",
        None,
        list(COMPUTE_DTYPES),
        "Dtype of the written weights; bfloat16 by default, float32 for a GGUF file.",
    )
    flags.DEFINE_bool("adapters", False, "Write the adapters alone, in PEFT's format.")
    entry.run_main(main)
