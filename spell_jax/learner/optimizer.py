"""AdamW or RMSprop with a learning-rate schedule and clipping by the global gradient norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from spell_jax.runtime.config import DERIVED, check_choice, check_least

OPTIMIZERS = ("adamw", "rmsprop")
SCHEDULES = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule (paper section E.3; spec section 9).

    Attributes:
      learning_rate: peak learning rate.
      schedule: "constant", or "cosine" / "linear" decay to `final_fraction` at `total_steps`.
      warmup_steps: updates of linear warm-up from 0.
      total_steps: updates of the run, for the decaying schedules.
      final_fraction: final learning rate as a share of the peak.
      b1: decay of AdamW's first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      epsilon: constant that is added to the root of the second moment.
      weight_decay: decoupled weight decay.
      clip_norm: maximum global gradient norm; larger gradients are scaled down to it.
      offload: whether the moments stay in host memory between updates.
      offload_weights: whether the float32 weights stay there too. Device memory then holds only the
        weights in the compute dtype of the model that is sampled or trained.
      max_skipped: number of non-finite updates in a row that ends the run.
      name: "adamw", or "rmsprop" (LongPO), which has no first moment and no bias correction.
    """

    SECTION: ClassVar[str] = "optimizer"

    learning_rate: float = 2e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = dataclasses.field(default=0, metadata=DERIVED)
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    offload: bool = False
    offload_weights: bool = False
    max_skipped: int = 3
    name: str = "adamw"

    def __post_init__(self):
        least = {"learning_rate": 0, "warmup_steps": 0, "final_fraction": 0, "weight_decay": 0}
        check_least(self, "optimizer.", **least, max_skipped=1)
        for field in ("epsilon", "clip_norm"):
            if not getattr(self, field) > 0:
                raise ValueError(f"optimizer.{field} = {getattr(self, field)}: must be above 0")
        # At 1 the bias correction of the moments, 1 / (1 - b^t), would divide by 0.
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"optimizer.{field} = {getattr(self, field)}: must be in [0, 1)")
        check_choice(self, "optimizer.", name=OPTIMIZERS, schedule=SCHEDULES)
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.warmup_steps}: must be below the run's "
                f"{self.total_steps} updates, optimizer.schedule = {self.schedule!r}"
            )

    def rate(self) -> optax.Schedule:
        """Return the learning rate as a function of the number of updates taken."""
        steps, final = self.total_steps - self.warmup_steps, self.final_fraction
        if self.schedule == "constant":
            decay = optax.constant_schedule(self.learning_rate)
        elif self.schedule == "cosine":
            decay = optax.cosine_decay_schedule(self.learning_rate, steps, alpha=final)
        else:
            decay = optax.linear_schedule(self.learning_rate, self.learning_rate * final, steps)
        # Without warm-up the boundary is 0, so that the first schedule is never used.
        warmup = optax.linear_schedule(0.0, self.learning_rate, max(1, self.warmup_steps))
        return optax.join_schedules([warmup, decay], [self.warmup_steps])

    def make(self) -> optax.GradientTransformation:
        if self.name == "rmsprop":
            descent = optax.chain(
                # As in torch, which LongPO's script uses: epsilon is not below the root.
                optax.scale_by_rms(self.b2, self.epsilon, eps_in_sqrt=False),
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(self.rate()),
            )
        else:
            descent = optax.adamw(
                self.rate(), self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay
            )
        # The norm is clipped first, so that a large gradient does not enter the moments either.
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), descent)
