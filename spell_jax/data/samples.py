"""Answers as tokens: sampled by a policy, or written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer to a prompt. A written answer has tokens only.

    Attributes:
      tokens: token ids, int32 [S], including the stop token.
      logprobs: logprobs at the sampling temperature, under the full vocabulary, float32 [S].
      stopped: whether a stop token or stop string ended the answer; False if the cap cut it off.
      stop_string: stop string that ended the answer, or ""; the last token completed it.
      kept_log_masses: log of the probability mass that top-k, top-p and min-p kept at each token,
        float32 [S]. For loss.support = "sampled".
      cutoffs: cut-off of the logits at each token (sampling.SampledToken), float32 [S]. For
        loss.support = "sampled".
      experts: experts that processed each token, int8 or int16 [S, L, k] (moe.no_experts). For
        loss.routing = "sampled".
      prompt_experts: experts that processed each token of the prompt [P, L, k], one array for all
        samples of the prompt.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    stopped: bool = True
    stop_string: str = ""
    kept_log_masses: np.ndarray | None = None
    cutoffs: np.ndarray | None = None
    experts: np.ndarray | None = None
    prompt_experts: np.ndarray | None = None

    def __post_init__(self):
        for name in ("logprobs", "kept_log_masses", "cutoffs", "experts"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != len(self.tokens):
                raise ValueError(
                    f"sample.{name}: of {len(numbers)} tokens, but the answer has "
                    f"{len(self.tokens)}"
                )

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        by_token = self.stopped and not self.stop_string
        return self.tokens[: len(self.tokens) - by_token].tolist()

    @property
    def logprob(self) -> float:
        """The summed logprob of the tokens."""
        if self.logprobs is None:
            raise ValueError("sample.logprobs: is None, a written answer has none")
        return math.fsum(map(float, self.logprobs))

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """Decode the text of the answer, up to its stop string."""
        text = decode(self.content)
        return text.split(self.stop_string, 1)[0] if self.stop_string else text

    def as_written(self) -> Sample:
        """Return the answer without what was recorded after its prompt, for another prompt."""
        return Sample(self.tokens, None, self.stopped, self.stop_string)
