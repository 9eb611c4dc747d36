"""Tests of the policy's matrix products: values, gradients, types by platform, and `auto`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from spell_jax.launch import topologies
from spell_jax.policy import products, transformer
from spell_jax.policy.choices import COMPUTE_DTYPES, DTYPES
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from tests import programs, tiny

EXPERTS = dataclasses.replace(tiny.POLICY, experts=4, experts_per_token=2)
# Shapes of x and kernel, and the number of axes that they share.
AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"
SHAPES = [((2, 5, 6), (6, 4), 1), ((2, 5, 6), (6, 2, 3), 1), ((2, 5, 2, 3), (2, 3, 4), 2)]
by_shape = pytest.mark.parametrize(("x_shape", "kernel_shape", "into"), SHAPES, ids=str)


def _factors(x_shape, kernel_shape, dtype: str = "float32"):
    first, second = jax.random.split(jax.random.key(0))
    return (
        jax.random.normal(first, x_shape, dtype),
        jax.random.normal(second, kernel_shape, dtype),
    )


def _low(policy: PolicyConfig) -> transformer.Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.weights(policy))


def _multiply(x: jax.Array, kernel: jax.Array, into: int) -> jax.Array:
    kernel_products: Any = products.multiply(x, (kernel,), into)
    return kernel_products[0]


def _gradients(product, factors):
    out, pull = jax.vjp(product, *factors)
    return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


def _mesh(kind: str) -> AbstractMesh:
    # jax 0.8 has no field `platform`, jax 0.10 needs one.
    fields = {field.name for field in dataclasses.fields(AbstractDevice)}
    values = {"device_kind": kind, "num_cores": 1, "platform": "cpu" if kind == "cpu" else "tpu"}
    device = AbstractDevice(**{name: values[name] for name in fields})
    return AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)


@by_shape
def test_products_and_gradients_equal_those_of_jax(x_shape, kernel_shape, into: int) -> None:
    factors = _factors(x_shape, kernel_shape)
    gradients = jax.jit(lambda *operands: _gradients(lambda x, k: _multiply(x, k, into), operands))
    right = _gradients(lambda x, kernel: jnp.tensordot(x, kernel, axes=into), factors)
    for value, expected in zip(gradients(*factors), right, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@by_shape
def test_bfloat16_is_rounded_once(x_shape, kernel_shape, into: int) -> None:
    low = _factors(x_shape, kernel_shape, "bfloat16")
    high = [factor.astype(jnp.float32) for factor in low]
    values = _gradients(lambda x, kernel: _multiply(x, kernel, into), low)
    right = _gradients(lambda x, kernel: jnp.tensordot(x, kernel, axes=into), high)
    assert {value.dtype for value in values} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(np.asarray(values[0], np.float32), right[0], rtol=2**-8)


@pytest.mark.parametrize("tokens", [1, 2])
def test_sum_of_outer_products(tokens: int) -> None:
    x, y = _factors((3, 4, 5), (3, 4, 6), "bfloat16")
    outer_sum = jax.jit(lambda x, y: products.sum_of_outer_products(x, y, tokens))(x, y)
    spec = {1: "tab,tcd->abcd", 2: "tab,tac->bc"}[tokens]
    right = np.einsum(spec, *(np.asarray(value, np.float64) for value in (x, y)))
    assert outer_sum.dtype == jnp.float32
    np.testing.assert_allclose(outer_sum, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["cpu", "TPU v5e"])
def test_sum_over_tokens(kind: str) -> None:
    """On CPUs a product with ones; elsewhere a sum. Both are float32, of two shapes of tokens."""
    x = jax.random.normal(jax.random.key(0), (3, 4, 5, 2), "bfloat16")
    right = np.asarray(x, np.float64)

    def total(tokens: int):
        return products.sum_over_tokens(x, tokens)

    with jax.sharding.use_abstract_mesh(_mesh(kind)):
        for tokens in (1, 2):
            (equation,) = [
                equation
                for equation in programs.equations(jax.make_jaxpr(total, 0)(tokens).jaxpr)
                if equation.primitive.name in ("dot_general", "reduce_sum")
            ]
            assert (equation.primitive.name == "dot_general") == (kind == "cpu")
            assert {v.aval.dtype.name for v in equation.invars} == {"float32"}
    for tokens in (1, 2):
        summed = total(tokens)
        assert summed.dtype == jnp.float32
        np.testing.assert_allclose(summed, right.sum(tuple(range(tokens))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_and_its_gradients_equal_those_of_jax(dtype: str) -> None:
    gate, up = (
        4 * jax.random.normal(jax.random.key(seed), (3, 7)).astype(dtype) for seed in (0, 1)
    )
    exact = [np.asarray(x, np.float32) for x in (gate, up)]
    values = jax.jit(lambda *operands: _gradients(products.gated, operands))(gate, up)
    right = _gradients(lambda gate, up: jax.nn.silu(gate) * up, exact)
    assert {value.dtype.name for value in values} == {dtype}
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    for value, expected in zip(values, right, strict=True):
        value = np.asarray(value, np.float32)
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)


@by_shape
def test_several_kernels_have_the_products_and_gradients_of_each(
    x_shape, kernel_shape, into: int
) -> None:
    x, kernel = _factors(x_shape, kernel_shape)
    kernels = (kernel, 2 * kernel[..., :1], -kernel)
    kernel_products, pull = jax.vjp(lambda x, ks: products.multiply(x, ks, into), x, kernels)
    assert isinstance(kernel_products, tuple)
    right, right_pull = jax.vjp(
        lambda x, ks: tuple(jnp.tensordot(x, k, axes=into) for k in ks), x, kernels
    )
    out_gradients = jax.tree.map(jnp.cos, right)
    pairs = jax.tree.map(
        lambda a, b: (a, b),
        (kernel_products, pull(out_gradients)),
        (right, right_pull(out_gradients)),
    )
    for value, expected in jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x[0], jax.Array)):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


@by_shape
def test_int8_kernels_multiply_like_their_float32_values(x_shape, kernel_shape, into: int) -> None:
    """Beside a kernel with a gradient; int8 kernels and their scales have none."""
    x, kernel = _factors(x_shape, kernel_shape)
    scale = jnp.exp(kernel[(0,) * into])
    weights = jnp.round(40 * kernel).astype(jnp.int8)

    def int8_products(x, kernel):
        return products.multiply(x, (products.Int8Kernel(weights, scale), kernel), into)

    def float_products(x, kernel):
        return products.multiply(x, (weights * scale, kernel), into)

    (out, pull), (expected_out, expected_pull) = (
        jax.vjp(function, x, kernel) for function in (int8_products, float_products)
    )
    out_gradients = jax.tree.map(jnp.cos, expected_out)
    pairs = (out, pull(out_gradients)), (expected_out, expected_pull(out_gradients))
    for value, expected in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_types_of_products_by_platform(platform: str) -> None:
    """On CPUs all products are float32; elsewhere the gradients of kernels alone, unconstrained."""
    x, kernel = _factors((2, 5, 6), (6, 4), "bfloat16")

    def gradients(*factors):
        return _gradients(lambda x, kernel: _multiply(x, kernel, 1), factors)

    def trace():
        return list(programs.equations(jax.make_jaxpr(gradients)(x, kernel).jaxpr))

    if platform == "cpu":
        equations = trace()
    else:
        with jax.sharding.use_abstract_mesh(_mesh("TPU v5e")):
            equations = trace()
    dtypes = [v.outvars[0].aval.dtype.name for v in equations if v.primitive.name == "dot_general"]
    constraints = sum("layout" in equation.primitive.name for equation in equations)
    if platform == "cpu":
        assert (dtypes, constraints) == (["float32"] * 3, 1)
    else:
        assert (sorted(dtypes), constraints) == (["bfloat16", "bfloat16", "float32"], 0)


@pytest.mark.parametrize("policy", [tiny.POLICY, EXPERTS], ids=["dense", "experts"])
def test_kernels_as_bits_give_the_same_logits_and_are_never_converted(policy: PolicyConfig) -> None:
    params = _low(policy)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    as_bits, plain = (
        jax.jit(lambda params, change=change: transformer.logits(policy, change(params), tokens))
        for change in (products.kernels_as_bits, lambda params: params)
    )
    np.testing.assert_array_equal(as_bits(params), plain(params))
    bits = products.kernels_as_bits(params)["layers"]
    kinds = {
        (path[-1].key.endswith("_kernel"), leaf.dtype.name)
        for path, leaf in jax.tree.leaves_with_path(bits)
    }
    assert kinds == {(True, "uint16"), (False, "bfloat16")}
    stack = "f32[" + ",".join(map(str, bits["attention"]["q_kernel"].shape)) + "]"
    # Without bits jax 0.10.2 converts the stack; jax 0.11.2 does not.
    assert stack not in (as_bits.lower(params).compile().as_text() or "")


def test_what_the_layers_keep_for_the_gradient_is_never_converted() -> None:
    """Nothing of bfloat16 that all layers keep, [L, B, T, ...], exists in float32 as well."""
    policy = dataclasses.replace(tiny.POLICY, remat="none", qk_norm=False, qkv_bias=False)
    tokens = jnp.arange(22, dtype=jnp.int32).reshape(2, 11)
    gradient = jax.jit(jax.grad(lambda p: transformer.logits(policy, p, tokens).sum()))
    text = gradient.lower(_low(policy)).compile().as_text() or ""
    for size in (str(policy.feed_forward), f"{policy.heads},{policy.head_size}"):
        shape = f"[{policy.layers},2,11,{size}]"
        assert f"u16{shape}" in text
        assert f"f32{shape}" not in text and f"bf16{shape}" not in text


def test_kernels_are_no_bits_for_accelerators() -> None:
    params = _low(tiny.POLICY)
    with jax.sharding.use_abstract_mesh(_mesh("TPU v5e")):
        accelerator_params = products.kernels_as_bits(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(accelerator_params)} == {"bfloat16"}


def test_a_mesh_without_devices_is_not_of_cpus() -> None:
    plan = topologies.abstract_mesh(topologies.find("v5e-8"), {"fsdp": -1})
    assert not meshes.is_of_cpus(plan)
    assert products.resolve_dtype("auto", plan) == "bfloat16"


@pytest.mark.parametrize(
    ("compute_dtype", "kind", "is_fast", "expected"),
    [
        ("float32", "TPU v5e", True, "float32"),
        ("bfloat16", "cpu", False, "bfloat16"),
        ("auto", "TPU v5e", False, "bfloat16"),
        ("auto", "NVIDIA H200", False, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("auto", "cpu", True, "bfloat16"),
    ],
)
def test_resolved_dtype(
    compute_dtype: str, kind: str, is_fast: bool, expected: str, monkeypatch
) -> None:
    monkeypatch.setattr(products, "_multiplies_bfloat16", lambda: is_fast)
    assert products.resolve_dtype(compute_dtype, _mesh(kind)) == expected
    assert compute_dtype in COMPUTE_DTYPES and expected in DTYPES


@pytest.mark.parametrize(
    ("info", "xla_flags", "expected"),
    [
        (f"{AMD}flags\t: fpu avx512f avx512_bf16 amx_bf16\n", "", ["amx_bf16", "avx512_bf16"]),
        (f"{INTEL}flags\t: fpu avx512f avx512_bf16 amx_bf16\n", "", ["amx_bf16"]),
        (f"processor: 0\n{AMD}flags\t: fpu avx512_bf16\nflags\t: fpu\n", "", ["avx512_bf16"]),
        (f"{INTEL}flags\t: fpu avx512_bf16\n", "", []),
        (f"{AMD}flags\t: fpu avx512f avx512_vnni\n", "", []),
        ("Features\t: fp asimd bf16\n", "", []),  # ARM: not measured
        (None, "", []),  # no Linux
        (f"{AMD}flags\t: fpu avx512_bf16\n", "--xla_cpu_max_isa=AVX2", []),
    ],
)
def test_instructions_for_products_of_bfloat16(
    info: str | None, xla_flags: str, expected: list[str], tmp_path, monkeypatch
) -> None:
    path = tmp_path / "cpuinfo"
    if info is not None:
        path.write_text(info)
    monkeypatch.setattr(products, "_CPU_INFO", path)
    monkeypatch.setenv("XLA_FLAGS", xla_flags)
    assert products.bfloat16_instructions() == expected


@pytest.mark.parametrize(
    ("names", "expected", "reason"),
    [
        (["amx_bf16"], "bfloat16", "the CPU has amx_bf16"),
        ([], "float32", "the CPU has no fast products of bfloat16"),
    ],
)
def test_dtype_of_a_cpu_is_chosen_once_and_logged(
    names: list[str], expected: str, reason: str, caplog, monkeypatch
) -> None:
    calls = []
    monkeypatch.setattr(products, "bfloat16_instructions", lambda: calls.append(names) or names)
    products._multiplies_bfloat16.cache_clear()
    with caplog.at_level(logging.INFO, "spell_jax.policy.products"):
        assert products.resolve_dtype("auto", meshes.make_mesh()) == expected
        assert products.resolve_dtype("auto", _mesh("cpu")) == expected
    products._multiplies_bfloat16.cache_clear()  # not this test's CPU for later ones
    assert calls == [names]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"compute_dtype = auto: {reason}"
