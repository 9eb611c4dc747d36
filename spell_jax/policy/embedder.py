"""Vectors of texts from a policy: an embedding model such as Qwen3-Embedding, run by our own model.

1. A text is framed as its folder's tokenizer.json frames it (Qwen3-Embedding puts <|endoftext|>
   behind it; there is no instruction), and cut if it is too long: the frame stays.
2. Texts of like length share a batch: its shape is [rows, T], T from a short list of buckets and
   rows * T about a budget of tokens. A shape compiles when it is first met, and only then.
3. A text's vector is the hidden state of its last token behind the last norm, of length 1
   (transformer.embed). It does not depend on the other texts of its batch.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
import tokenizers as hf

from spell_jax.policy import transformer, weights
from spell_jax.policy.hf_tokenizer import HF_FILE
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import mesh as meshes

SMALLEST = 128  # tokens; below, a batch's time goes into reading the weights


class Embedder:
    """A policy on its devices, and what it takes to embed texts with it.

    Attributes:
      width: D, of a vector.
      buckets: lengths T of batches, ascending.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        mesh: jax.sharding.Mesh,
        max_tokens: int,
        token_budget: int,
        dtype: str = "bfloat16",
    ):
        """Reads a Hugging Face folder.

        Args:
          folder: local; for weights.load.
          mesh: where weights and batches go: rows are split over data, fsdp and expert, tokens of a
            row over context.
          max_tokens: of a text with its frame; what is over is cut off.
          token_budget: of a batch; one of a row for each part of the rows may have more.
          dtype: of weights and activations, one of weights.DTYPES.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: the folder is damaged, or max_tokens is out of range.
        """
        config, self._tokenizer = weights.identify(folder)
        self._prefix, self._suffix = _frame(pathlib.Path(folder), self._tokenizer)
        fewest = len(self._prefix) + len(self._suffix) + 1
        if not fewest <= max_tokens <= config.max_positions:
            raise ValueError(
                f"embed.max_tokens = {max_tokens}: must be from {fewest} to the policy's "
                f"max_position_embeddings = {config.max_positions}"
            )
        # The folder may lack its output projection: load() says then that there is none.
        config, self._params = weights.load(folder, mesh, dtype)
        self._mesh, self._max_tokens, self._token_budget = mesh, max_tokens, token_budget
        self.width = config.width
        self.buckets = _buckets(max_tokens, meshes.context_shards(mesh))
        self._program = jax.jit(functools.partial(transformer.embed, config))

    def encode(self, text: str) -> tuple[list[int], bool]:
        """A text's tokens in their frame, at most max_tokens, and whether some were cut off."""
        room = self._max_tokens - len(self._prefix) - len(self._suffix)
        ids = self._tokenizer.encode(text)
        return [*self._prefix, *ids[:room], *self._suffix], len(ids) > room

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors of texts.

        Args:
          texts: B of them, as `encode` makes them: of 1 to max_tokens tokens.

        Returns:
          float32 [B, D], each of length 1, in the order of the texts.
        """
        vectors = np.zeros((len(texts), self.width), np.float32)
        for length, chosen in self._batches([len(text) for text in texts]):
            vectors[chosen] = self._run(length, [texts[index] for index in chosen])
        return vectors

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yields (T, indices of texts), so that every text is in one batch."""
        by_length = np.argsort(np.asarray(lengths, np.int64), kind="stable").tolist()
        shortest = 0
        for bucket in self.buckets:
            fitting = [index for index in by_length if shortest < lengths[index] <= bucket]
            rows = self._rows(bucket)
            for start in range(0, len(fitting), rows):
                yield bucket, fitting[start : start + rows]
            shortest = bucket

    def _rows(self, length: int) -> int:
        parts = meshes.row_shards(self._mesh)
        return max(1, self._token_budget // (length * parts)) * parts

    def _run(self, length: int, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors float32 [len(texts), D] of at most `_rows(length)` texts."""
        rows = self._rows(length)
        tokens = np.full((rows, length), self._tokenizer.pad_id, np.int32)
        lengths = np.ones(rows, np.int32)  # a row without a text is one padding token
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            lengths[row] = len(text)
        places = meshes.by_rows_and_time(self._mesh), meshes.by_rows(self._mesh)
        batch = meshes.device_put((tokens, lengths), places)
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(meshes.RULES):
            vectors = self._program(self._params, *batch)
        return np.asarray(vectors)[: len(texts)]


def _buckets(max_tokens: int, parts: int) -> tuple[int, ...]:
    """Halves of halves of max_tokens down to SMALLEST, ascending; multiples of `parts`."""
    lengths = [max_tokens]
    while lengths[-1] >= 2 * SMALLEST:
        lengths.append(-(-lengths[-1] // 2))
    return tuple(-(-length // parts) * parts for length in reversed(lengths))


def _frame(folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that stand before and behind every text.

    Those that tokenizer.json puts there; where it puts none, eos behind the text: the vector is
    the last token's, and should be that of a token which closes whatever came before.
    """
    path = folder / HF_FILE
    if path.is_file():
        whole = hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        whole.no_padding()
        whole.no_truncation()
        framed = whole.encode("a")
        text = [i for i, of_frame in enumerate(framed.special_tokens_mask) if not of_frame]
        if 0 < len(text) < len(framed.ids):
            return framed.ids[: text[0]], framed.ids[text[-1] + 1 :]
    return [], [tokenizer.eos_id]
