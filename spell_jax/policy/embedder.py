"""Text embeddings from a policy: embedding models such as Qwen3-Embedding, run by our transformer.

A text is framed as in its folder's tokenizer.json (Qwen3-Embedding appends <|endoftext|>; no
instruction is added). Texts of similar length share a batch of shape [rows, T], where T is one of a
few bucket lengths. Each shape compiles when it is first used. See transformer.embed.
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
from spell_jax.policy.formats.hf_tokenizer import HF_FILE
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files import remote

# Tokens of the shortest bucket: shorter batches are bound by reading the weights.
SMALLEST = 128


class Embedder:
    """An embedding model on its devices; `width` is D, `buckets` the batch lengths T, ascending."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        mesh: jax.sharding.Mesh,
        max_tokens: int,
        token_budget: int,
        dtype: str = "bfloat16",
    ):
        """Load a folder or its URL (see weights.load), with weights and activations in `dtype`.

        Rows are sharded over data, fsdp and expert, the tokens of a row over context. Framed texts
        are truncated to `max_tokens`, inside the frame. A batch has about `token_budget` tokens,
        but at least one row per row shard. Raises FileNotFoundError if a file is missing,
        ValueError if the folder is damaged or max_tokens is out of range.
        """
        folder = remote.fetch(folder)
        config, self._tokenizer = weights.read_config_and_tokenizer(folder)
        self._prefix, self._suffix = _frame(folder, self._tokenizer)
        fewest = len(self._prefix) + len(self._suffix) + 1
        if not fewest <= max_tokens <= config.max_positions:
            raise ValueError(
                f"embed.max_tokens = {max_tokens}: must be from {fewest} to the policy's "
                f"max_position_embeddings = {config.max_positions}"
            )
        # load() marks the embeddings as tied if the folder has no output projection.
        config, self._params = weights.load(folder, mesh, dtype)
        self._mesh, self._max_tokens, self._token_budget = mesh, max_tokens, token_budget
        self.width = config.width
        self.buckets = _buckets(max_tokens, meshes.context_shards(mesh))
        self._program = jax.jit(functools.partial(transformer.embed, config))

    def encode(self, text: str) -> tuple[list[int], bool]:
        """Tokenize and frame a text, at most max_tokens; also return whether it was truncated."""
        # The frame stays whole: the embedding is the hidden state of its last token.
        room = self._max_tokens - len(self._prefix) - len(self._suffix)
        ids = self._tokenizer.encode(text)
        return [*self._prefix, *ids[:room], *self._suffix], len(ids) > room

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Embed B token lists from `encode` as unit vectors, float32 [B, D], in their order."""
        vectors = np.zeros((len(texts), self.width), np.float32)
        for length, indices in self._batches([len(text) for text in texts]):
            vectors[indices] = self._embed_batch(length, [texts[index] for index in indices])
        return vectors

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield (T, indices of texts) so that every text is in exactly one batch."""
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

    def _embed_batch(self, length: int, texts: Sequence[Sequence[int]]) -> np.ndarray:
        # The last batch has as many rows as all others, so that it needs no program of its own.
        rows = self._rows(length)
        tokens = np.full((rows, length), self._tokenizer.pad_id, np.int32)
        lengths = np.ones(rows, np.int32)  # an empty row is one padding token
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            lengths[row] = len(text)
        places = meshes.by_rows_and_time(self._mesh), meshes.by_rows(self._mesh)
        batch = meshes.device_put((tokens, lengths), places)
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(meshes.RULES):
            vectors = self._program(self._params, *batch)
        return np.asarray(vectors)[: len(texts)]


def _buckets(max_tokens: int, parts: int) -> tuple[int, ...]:
    """Halve max_tokens repeatedly down to SMALLEST; return ascending multiples of `parts`."""
    lengths = [max_tokens]
    # Halves: except in the shortest bucket, less than half of a row is padding.
    while lengths[-1] >= 2 * SMALLEST:
        lengths.append(-(-lengths[-1] // 2))
    # The `context` axis must divide the tokens of a row.
    return tuple(-(-length // parts) * parts for length in reversed(lengths))


def _frame(folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that tokenizer.json adds before and after every text.

    If it adds none, eos follows the text: the embedding is the hidden state of the last token,
    which should be a token that ends texts.
    """
    path = folder / HF_FILE
    if path.is_file():
        full_tokenizer = hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # Saved settings for batches would add padding to the frame or cut the text.
        full_tokenizer.no_padding()
        full_tokenizer.no_truncation()
        framed = full_tokenizer.encode("a")
        text = [i for i, of_frame in enumerate(framed.special_tokens_mask) if not of_frame]
        if 0 < len(text) < len(framed.ids):
            return framed.ids[: text[0]], framed.ids[text[-1] + 1 :]
    return [], [tokenizer.eos_id]
