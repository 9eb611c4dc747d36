"""Tests of the vocabulary head: values by hand, gradients, meshes, sizes, precision."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.learner import lm_head as heads
from spell_jax.learner.lm_head import score_tokens
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives as on_devices
from spell_jax.runtime import mesh as meshes
from tests import tiny

UNTIED = dataclasses.replace(tiny.POLICY, tied_embeddings=False)
ROWS, TIME, ANSWERS, WIDTH = 8, 16, 8, 32
SMALLEST = 1  # numbers at once that give slices of 128 rows
# Rows of the table and numbers at once. Slices: 5 of 128; 6 of 128, of which the last has one row
# that is new; 3 of 256; the whole.
SLICES = [(640, SMALLEST), (641, SMALLEST), (641, 20_000), (641, 2**26), (100, SMALLEST)]
ids = str


@dataclasses.dataclass(frozen=True)
class Head:
    """Inputs of the head, and the gradients of its outputs."""

    table: jax.Array
    hidden: jax.Array
    source: jax.Array
    target: jax.Array
    to_logprob: jax.Array
    to_entropy: jax.Array

    def total(self, table: jax.Array, hidden: jax.Array, policy=UNTIED, **options: Any):
        """Return (a scalar with the given gradients, (logprobs, entropies))."""
        params = {"embedding": jnp.zeros_like(table), "unembedding": table}
        scores = score_tokens(policy, params, hidden, self.source, self.target, 0.7, **options)
        return jnp.sum(self.to_logprob * scores[0] + self.to_entropy * scores[1]), scores

    def by_hand(
        self,
        table: jax.Array,
        hidden: jax.Array,
        cutoff: jax.Array | None = None,
        absent: tuple[int, ...] = (),
    ):
        picked = jnp.take_along_axis(hidden, self.source[..., None], axis=1)
        logits = picked @ table.T / 0.7
        is_scored = jnp.arange(len(table)) == self.target[..., None]
        if cutoff is None:
            cutoff = jnp.full(self.target.shape, -jnp.inf)
        present = ~np.isin(np.arange(len(table)), absent)
        mean = jnp.mean(logits, axis=-1, keepdims=True, where=present)
        is_scored |= (logits - mean > cutoff[..., None]) & present
        every = jax.nn.log_softmax(jnp.where(is_scored, logits, -jnp.inf))
        target_logprobs = jnp.take_along_axis(every, self.target[..., None], axis=-1)[..., 0]
        every = jnp.where(is_scored, every, 0.0)
        scores = (
            target_logprobs,
            -jnp.sum(jnp.where(is_scored, jnp.exp(every) * every, 0.0), axis=-1),
        )
        return jnp.sum(self.to_logprob * scores[0] + self.to_entropy * scores[1]), scores


@functools.cache
def _head(vocab: int, width: int = WIDTH, scale: float = 0.3) -> Head:
    """Create random inputs. The targets include the first and the last token."""
    rng = np.random.default_rng(0)
    table = scale * rng.normal(size=(vocab, width))
    hidden = rng.normal(size=(ROWS, TIME, width))
    source = rng.integers(0, TIME, size=(ROWS, ANSWERS))
    target = rng.integers(0, vocab, size=(ROWS, ANSWERS))
    target[0, :2] = 0, vocab - 1
    gradients = rng.normal(size=(2, ROWS, ANSWERS))
    numbers = [jnp.asarray(x, jnp.float32) for x in (table, hidden, *gradients)]
    tokens = [jnp.asarray(x, jnp.int32) for x in (source, target)]
    return Head(*numbers[:2], *tokens, *numbers[2:])


@functools.cache
def _expected_value_and_grad(vocab: int, width: int = WIDTH, scale: float = 0.3):
    head = _head(vocab, width, scale)
    return jax.value_and_grad(head.by_hand, (0, 1), has_aux=True)(head.table, head.hidden)


def _assert_close(tree: Any, expected_tree: Any, relative: float = 1e-5) -> None:
    """Assert that differences are small relative to each expected array's largest entry."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=relative * np.abs(b).max()),
        tree,
        expected_tree,
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", [tiny.POLICY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_scores_match_log_softmax_by_hand(policy: PolicyConfig, temperature: float) -> None:
    head = _head(641)
    params = {"unembedding": head.table, "embedding": head.table[::-1]}
    table = params["embedding" if policy.tied_embeddings else "unembedding"]
    logprobs, entropy = score_tokens(
        policy, params, head.hidden, head.source, head.target, temperature, SMALLEST
    )
    picked = np.take_along_axis(
        np.asarray(head.hidden, float), np.asarray(head.source)[..., None], 1
    )
    logits = picked @ np.asarray(table, float).T / (temperature or 1.0)
    every = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    expected_logprobs = np.take_along_axis(every, np.asarray(head.target)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(np.exp(every) * every, -1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "numbers"), SLICES, ids=ids)
def test_vocabulary_slices_change_neither_values_nor_gradients(vocab: int, numbers: int) -> None:
    head = _head(vocab)
    value_and_grad = jax.value_and_grad(head.total, (0, 1), has_aux=True)
    _assert_close(
        value_and_grad(head.table, head.hidden, numbers_at_once=numbers),
        _expected_value_and_grad(vocab),
    )


def _cutoffs() -> jax.Array:
    """Return cut-offs: -inf keeps all tokens, 0 to 4 keep fewer, and 1e9 keeps only the target."""
    cutoffs = np.random.default_rng(1).uniform(0.0, 4.0, size=(ROWS, ANSWERS))
    cutoffs[0, :2] = -np.inf, 1e9
    return jnp.asarray(cutoffs, jnp.float32)


@functools.cache
def _wanted_above(vocab: int, width: int = WIDTH):
    head = _head(vocab, width)
    by_hand = functools.partial(head.by_hand, cutoff=_cutoffs())
    return jax.value_and_grad(by_hand, (0, 1), has_aux=True)(head.table, head.hidden)


@pytest.mark.parametrize(("vocab", "numbers"), SLICES[:2], ids=ids)
def test_scores_above_a_cutoff_equal_a_dense_reference(vocab: int, numbers: int) -> None:
    """Values and gradients, of a softmax over the kept tokens alone."""
    head = _head(vocab)
    total = functools.partial(head.total, numbers_at_once=numbers, cutoff=_cutoffs())
    values_and_gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(head.table, head.hidden)
    expected = _wanted_above(vocab)
    _assert_close(values_and_gradients, expected)
    assert float(expected[0][1][0][0, 1]) == 0, "a target that is kept alone has probability 1"
    assert np.abs(expected[0][1][0] - _expected_value_and_grad(vocab)[0][1][0]).mean() > 0.2


# Rows of padding: more than a slice of 128 rows, and more than a device of a mesh holds (320).
_UNUSED = ((2, 5), (200, 201), (300, 640))
_ABSENT = (2, 3, 4, 200, *range(300, 640))


def _padded() -> tuple[Head, PolicyConfig]:
    """Return inputs and a policy. Absent tokens are never targets, but have the largest logits."""
    head = _head(640)
    target = np.setdiff1d(np.arange(640), _ABSENT)[np.asarray(head.target) % 296]
    table = head.table.at[jnp.asarray(_ABSENT)].mul(5.0)
    head = dataclasses.replace(head, target=jnp.asarray(target, jnp.int32), table=table)
    return head, dataclasses.replace(UNTIED, vocab_size=640, unused_ids=_UNUSED)


@pytest.mark.slow
@pytest.mark.parametrize("with_cutoff", [False, True])
@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ({}, SMALLEST),
        ({}, 2**26),
        ({"fsdp": 2, "tensor": 2, "context": 2}, SMALLEST),
        ({"data": 2, "expert": 2, "tensor": 2}, 2**26),
    ],
    ids=str,
)
def test_ids_without_a_token_have_neither_mass_nor_gradient(
    shape: dict[str, int], numbers: int, with_cutoff: bool
) -> None:
    head, policy = _padded()
    cutoff = _cutoffs() if with_cutoff else None
    by_hand = functools.partial(head.by_hand, cutoff=cutoff, absent=_ABSENT)
    expected = jax.value_and_grad(by_hand, (0, 1), has_aux=True)(head.table, head.hidden)
    options = {"policy": policy, "numbers_at_once": numbers, "cutoff": cutoff}
    if shape:
        mesh, run, arguments = _on_mesh(shape, head, **options)
        with jax.set_mesh(mesh):
            actual = run(*arguments)
    else:
        total = functools.partial(head.total, **options)
        actual = jax.value_and_grad(total, (0, 1), has_aux=True)(head.table, head.hidden)
    _assert_close(actual, expected)
    assert not np.asarray(actual[1][0])[list(_ABSENT)].any()
    used_gradient = np.delete(np.asarray(actual[1][0]), list(_ABSENT), axis=0)
    assert np.abs(used_gradient).max() > 0


@pytest.mark.parametrize("numbers", [SMALLEST, 2**26])
def test_target_without_a_token_has_probability_0(numbers: int) -> None:
    head, policy = _padded()
    params = {"embedding": head.table, "unembedding": head.table}
    target = jnp.full_like(head.target, 639).at[0, 0].set(3)
    logprobs, entropy = score_tokens(policy, params, head.hidden, head.source, target, 0.7, numbers)
    assert not np.exp(np.asarray(logprobs)).any()
    assert np.isfinite(logprobs).all() and np.isfinite(entropy).all()


def test_mass_above_a_cutoff_sums_to_1() -> None:
    """Every kept token of a vocabulary of 100 is scored as a target after the same state."""
    head = _head(100)
    hidden = jnp.broadcast_to(head.hidden[:1, :1], (100, 1, WIDTH))
    zero, target = jnp.zeros((100, 1), jnp.int32), jnp.arange(100, dtype=jnp.int32)[:, None]
    params = {"embedding": head.table}
    logits = hidden[0, 0] @ head.table.T / 0.7
    is_kept = np.asarray(logits - logits.mean() > 1.0)
    cutoff = jnp.ones((100, 1))
    logprobs, _ = score_tokens(tiny.POLICY, params, hidden, zero, target, 0.7, cutoff=cutoff)
    assert 5 < is_kept.sum() < 50
    np.testing.assert_allclose(np.exp(np.asarray(logprobs)[is_kept]).sum(), 1.0, atol=1e-5)


def test_underflowing_probabilities_have_correct_gradients() -> None:
    """Logits are in the hundreds, and most probabilities are 0 in float32."""
    head, expected = _head(641, scale=30.0), _expected_value_and_grad(641, scale=30.0)
    value_and_grad = jax.value_and_grad(head.total, (0, 1), has_aux=True)
    values_and_gradients = value_and_grad(head.table, head.hidden, numbers_at_once=SMALLEST)
    (_, (logprobs, entropy)), gradients = values_and_gradients
    assert float(logprobs.min()) < -500 and float(entropy.min()) >= 0
    # A logprob is the difference of numbers in the hundreds.
    _assert_close(((logprobs, entropy), gradients), (expected[0][1], expected[1]), 1e-4)


@pytest.mark.parametrize(
    ("rows", "widest", "numbers", "size"),
    [
        (152_064, 3584, 2**26, 16_896),  # Qwen2.5-7B: 9 slices, none longer
        (152_064, 3584, 1, 128),
        (19_008, 3584, 2**26, 9_600),  # an eighth as many: 18,688 would do for all but 320
        (18_688, 3584, 2**26, 18_688),
        (64, 32, 1, 64),
        (129, 32, 1, 128),
    ],
)
def test_slice_size_of_a_table(rows: int, widest: int, numbers: int, size: int) -> None:
    assert heads._slice_size(rows, widest, numbers) == size


@pytest.mark.parametrize(
    ("width", "numbers", "size"),
    [(32, 2**15, 256), (512, 2**17, 256), (512, 2**26, 2048)],
    ids=["logits", "weights", "the whole share"],
)
def test_slice_size_bound_applies_to_each_device(width: int, numbers: int, size: int) -> None:
    """A device has 128 of the tokens and 2,048 rows of the table."""
    with jax.set_mesh(meshes.make_mesh({"context": 4, "tensor": 2})):
        assert heads._lay_out((4096, width), (1, 512), 1.0, numbers).size == size


# Mesh, rows and width of the table, devices in one stage, and counts of collectives in the program
# before compilation. all_gather: source (forward and backward), gradient of
# picked states, slice (forward and backward). reduce_scatter: picked states, gradient of a slice
# (an axis or a stage each). all_reduce: with `tensor` highest logit, mass, moment, chosen logit,
# gradient of picked states; gradient of a slice, over axes that split tokens alone.
HEAD_MESHES = [
    ({"context": 8}, (640, 32), 8, (5, 2, 0)),
    ({"context": 8}, (641, 32), 2, (5, 4, 0)),
    ({"fsdp": 8}, (641, 32), 8, (2, 1, 0)),
    ({"fsdp": 2, "context": 4}, (641, 32), 8, (5, 3, 0)),
    ({"fsdp": 2, "tensor": 2, "context": 2}, (640, 32), 8, (5, 3, 5)),
    ({"fsdp": 2, "tensor": 2, "context": 2}, (641, 32), 8, (5, 3, 0)),
    ({"fsdp": 2, "tensor": 2, "context": 2}, (640, 33), 8, (3, 1, 6)),
    ({"data": 2, "expert": 2, "tensor": 2}, (640, 32), 8, (0, 0, 6)),
    ({"data": 2, "fsdp": 2, "context": 2}, (641, 33), 8, (3, 1, 1)),
    ({"data": 2, "fsdp": 2, "context": 2}, (641, 32), 8, (5, 3, 1)),
]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def _count(program: str) -> tuple[int, ...]:
    return tuple(len(re.findall(rf"stablehlo\.{kind}\b", program)) for kind in COLLECTIVES)


def _on_mesh(shape: dict[str, int], head: Head, **options: Any):
    """Return (mesh, jitted function to the head's values and gradients, function's arguments)."""
    mesh = meshes.make_mesh(shape)
    axes = (PartitionSpec("vocab", "embed"), PartitionSpec("rows", "time", None))
    rules = dict(meshes.RULES)
    places = tuple(
        meshes.shardings(mesh, PartitionSpec(*axis), x)
        if "vocab" in axis
        else NamedSharding(mesh, PartitionSpec(*[rules.get(name) for name in axis]))
        for axis, x in zip(axes, (head.table, head.hidden), strict=True)
    )
    value_and_grad = jax.value_and_grad(
        functools.partial(head.total, **options), (0, 1), has_aux=True
    )
    run = jax.jit(value_and_grad, out_shardings=(None, places))
    return mesh, run, jax.device_put((head.table, head.hidden), places)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "table", "one_stage", "collectives"), HEAD_MESHES, ids=ids)
def test_lm_head_on_a_mesh_equals_one_device(
    shape: dict[str, int],
    table: tuple[int, int],
    one_stage: int,
    collectives: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_devices, "_ONE_STAGE", one_stage)
    mesh, run, arguments = _on_mesh(shape, _head(*table), numbers_at_once=SMALLEST)
    with jax.set_mesh(mesh):
        _assert_close(run(*arguments), _expected_value_and_grad(*table))
        assert _count(run.lower(*arguments).as_text()) == collectives


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "table", "one_stage", "collectives"), HEAD_MESHES[::3], ids=ids)
def test_scores_above_a_cutoff_are_equal_on_a_mesh(
    shape: dict[str, int], table: tuple[int, int], one_stage: int, collectives: tuple[int, ...]
) -> None:
    del one_stage, collectives
    options = {"numbers_at_once": SMALLEST, "cutoff": _cutoffs()}
    mesh, run, arguments = _on_mesh(shape, _head(*table), **options)
    with jax.set_mesh(mesh):
        _assert_close(run(*arguments), _wanted_above(*table))


def test_gradient_of_a_frozen_table_is_not_computed() -> None:
    """The program has neither the product for that gradient nor its sum over devices."""
    head = _head(640)

    def of_hidden(hidden):
        return head.total(head.table, hidden, numbers_at_once=SMALLEST)[0]

    with jax.set_mesh(meshes.make_mesh({"fsdp": 8})):
        program = jax.jit(jax.grad(of_hidden)).lower(head.hidden).as_text()
    assert _count(program) == (2, 0, 0)
    assert program.count("dot_general") == 3


# ------------------------------------------------------------------------------- score_tokens: size


@pytest.mark.slow
def test_neither_all_logits_nor_the_whole_table_are_materialized() -> None:
    """No array of a device's compiled program has as many numbers as either."""
    vocab, answers = 4096, 512
    rng = np.random.default_rng(0)
    table, hidden = jnp.zeros((vocab, WIDTH)), jnp.zeros((1, 1024, WIDTH))
    tokens = jnp.asarray(rng.integers(0, 1024, size=(1, answers)), jnp.int32)
    head = Head(table, hidden, tokens, tokens, *[jnp.ones((1, answers))] * 2)
    table_size = vocab * WIDTH
    for shape, share in (({"context": 8}, 8), ({"context": 4, "tensor": 2}, 4)):
        mesh, run, arguments = _on_mesh(shape, head, numbers_at_once=SMALLEST)
        with jax.set_mesh(mesh):
            program = run.lower(*arguments).compile().as_text()
        sizes = {
            math.prod(int(size) for size in dims.split(","))
            for dims in re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", program)
        }
        assert answers // share * 128 in sizes  # logits of a slice
        # And so smaller than [A, V], which is 2 to 4 times as large.
        assert max(sizes) < table_size // 4


def test_logits_are_materialized_one_slice_at_a_time() -> None:
    """On one device, arrays of logits respect numbers_at_once."""
    head = _head(2048)
    gradient = jax.grad(functools.partial(head.total, numbers_at_once=2**15), (0, 1), has_aux=True)
    text = str(jax.make_jaxpr(gradient)(head.table, head.hidden))
    assert f"f32[{ROWS},{ANSWERS},512]" in text
    assert f"f32[{ROWS},{ANSWERS},2048]" not in text


# -------------------------------------------------------------------------- score_tokens: precision


def _head_of_many_answers(vocab: int, states: int, answers: int, width: int = WIDTH) -> Head:
    """Create bfloat16 inputs such that sums over answers do not cancel.

    Every answer is the same token, predicted from a few hidden states in turn.
    """
    rng = np.random.default_rng(0)
    table = 0.1 * rng.normal(size=(vocab, width))
    hidden = rng.uniform(0.5, 1.5, size=(1, 64, width))
    source, target = np.arange(answers)[None] % states, np.full((1, answers), 5)
    weights = rng.uniform(0.5, 1.5, size=(1, answers))
    bf16 = [jnp.asarray(x, jnp.bfloat16) for x in (table, hidden)]
    tokens = [jnp.asarray(x, jnp.int32) for x in (source, target)]
    return Head(*bf16, *tokens, jnp.asarray(weights, jnp.float32), jnp.zeros((1, answers)))


def _exact(head: Head) -> tuple[np.ndarray, np.ndarray]:
    """Compute float64 gradients of table and hidden states, for gradients of logprobs alone."""
    table, hidden = (np.asarray(x).astype(float) for x in (head.table, head.hidden))
    source, target = np.asarray(head.source)[0], np.asarray(head.target)[0]
    picked, weights = hidden[0, source], np.asarray(head.to_logprob, float)[0]
    logits = picked @ table.T / 0.7
    every = np.exp(logits - logits.max(-1, keepdims=True))
    of_logits = -every / every.sum(-1, keepdims=True)
    of_logits[np.arange(len(target)), target] += 1
    of_logits *= weights[:, None] / 0.7
    of_hidden = np.zeros_like(hidden)
    np.add.at(of_hidden[0], source, of_logits @ table)
    return of_logits.T @ picked, of_hidden


ROUNDED = 2**-8  # bfloat16: half is the rounding of a result, half of the operands


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "width"), [(1, 32), (8, 32), (8, 33)])
def test_table_gradient_is_summed_in_float32(devices: int, width: int) -> None:
    """Add 4,096 terms of one sign: a sum in bfloat16 stops growing after a few hundred."""
    head = _head_of_many_answers(vocab=256, states=64, answers=4096, width=width)
    gradient = jax.jit(jax.grad(functools.partial(head.total, numbers_at_once=1), has_aux=True))
    with jax.set_mesh(meshes.make_mesh({"context": devices}, jax.devices()[:devices])):
        table_gradient, _ = gradient(head.table, head.hidden)
        program = gradient.lower(head.table, head.hidden).as_text()
    assert table_gradient.dtype == jnp.bfloat16
    expected_row = _exact(head)[0][5]
    np.testing.assert_allclose(
        np.asarray(table_gradient)[5].astype(float), expected_row, rtol=ROUNDED
    )
    # A slice's gradient, [D, slice], is not rounded before it is summed over devices.
    kind = "reduce_scatter" if width == 32 else "all_reduce"
    wide = rf"stablehlo\.{kind}.*?\(tensor<{width}x128x(\w+)>\)"
    assert re.findall(wide, program, re.DOTALL) == ["f32"] * (devices > 1)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_gradient_of_a_shared_hidden_state_is_summed_in_float32(devices: int) -> None:
    """The sum is over 1,024 answers and 32 slices."""
    head = _head_of_many_answers(vocab=4096, states=1, answers=1024)
    gradient = jax.grad(functools.partial(head.total, numbers_at_once=1), 1, has_aux=True)
    with jax.set_mesh(meshes.make_mesh({"context": devices}, jax.devices()[:devices])):
        hidden_gradient, _ = jax.jit(gradient)(head.table, head.hidden)
    assert hidden_gradient.dtype == jnp.bfloat16
    _assert_close(np.asarray(hidden_gradient).astype(float), _exact(head)[1], ROUNDED)


def test_gradients_are_rounded_after_the_sum() -> None:
    """XLA for TPUs would drop the rounding (collectives.rounded), so the program states it."""
    head = _head_of_many_answers(vocab=256, states=1, answers=16)
    gradient = jax.grad(functools.partial(head.total, numbers_at_once=1), (0, 1), has_aux=True)
    text = str(jax.make_jaxpr(gradient)(head.table, head.hidden))
    # Gradients of the slice, of picked states, of hidden states.
    assert len(re.findall(r"reduce_precision\[exponent_bits=8 mantissa_bits=7", text)) == 3
