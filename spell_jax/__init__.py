"""spell_jax: self-play reinforcement learning for long-context language models, in JAX.

    import spell_jax

    config = spell_jax.get_config("tiny", steps=20)
    workdir = spell_jax.train(config, "runs/notebook")
    policy = spell_jax.load(workdir / "policy")
    replies = policy.ask(["Documents:..."], n=8)

Public names:
  get_config: the config of a name or a file, with changed fields.
  train, fine_tune: a run of self-play or another algorithm, and supervised tuning.
  load, Policy: a policy that answers texts.
  evaluate: benchmarks of a policy.

The commands of the same rooms are `python -m spell_jax.train` and so on. `import spell_jax` imports
nothing heavy: the functions are in api.py, which is imported when a public name is first used.
`spell_jax.train` and `spell_jax.evaluate` are always these functions, never the commands' modules,
also after `import spell_jax.train as train`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from spell_jax.runtime.version import VERSION as __version__

if TYPE_CHECKING:
    from spell_jax.api import Policy, evaluate, fine_tune, get_config, load, train

__all__ = [
    "Policy",
    "__version__",
    "evaluate",
    "fine_tune",
    "get_config",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("spell_jax.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """The package's type: an imported command does not hide the function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The first import of train.py or evaluate.py, by whomever, would set the package's
        # attribute to the module, and `spell_jax.train(...)` would no longer be a call.
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
