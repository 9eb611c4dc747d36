import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spell_jax.runtime.checkpoint import Checkpoints, abstract_arrays

HOST_STATE = {
    "step": 3,
    "seed": 7,
    "memory": {"general_qa/c1": [["q", "a", [0, 2]]]},
    "tail": [0.1],
}


def mesh_of(fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    return jax.sharding.Mesh(devices, ("fsdp", "tensor"))


def state_on(mesh: jax.sharding.Mesh, offset: float = 0.0) -> dict:
    """A model with its optimiser state (namedtuples), a bfloat16 vector and a typed random key."""
    params = {
        "w": jnp.arange(64.0).reshape(8, 8) / 7 + offset,
        "b": jnp.full(3, 1.5 + offset, jnp.bfloat16),
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    _, opt_state = optimiser.update(params, optimiser.init(params), params)
    state = {"policy": {"params": params, "opt_state": opt_state}, "key": jax.random.key(3)}

    def placed(leaf: jax.Array) -> jax.Array:
        spec = P("fsdp", "tensor") if leaf.ndim == 2 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(placed, state)


def assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_restores_the_same_bits_in_another_manager(tmp_path):
    state = state_on(mesh_of(4, 2))
    first = Checkpoints(tmp_path)
    assert first.latest_step() is None
    assert first.save(3, state, HOST_STATE)
    first.close()
    second = Checkpoints(tmp_path)
    assert second.latest_step() == 3
    arrays, host_state = second.restore(3, abstract_arrays(state))
    assert_same(arrays, state)
    assert host_state == HOST_STATE
    assert arrays["policy"]["params"]["w"].sharding == state["policy"]["params"]["w"].sharding


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (2, 4), (2, 1)])
def test_restores_onto_another_mesh(tmp_path, fsdp, tensor):
    saved = state_on(mesh_of(4, 2))
    other = state_on(mesh_of(fsdp, tensor), offset=9.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved, HOST_STATE)
    arrays, _ = checkpoints.restore(1, abstract_arrays(other))
    assert_same(arrays, saved)
    for got, want in zip(jax.tree.leaves(arrays), jax.tree.leaves(other), strict=True):
        assert got.sharding == want.sharding


def test_arrays_may_be_donated_after_a_save(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(4096.0)
    want = np.array(x)
    checkpoints.save(1, {"x": x}, {})
    for _ in range(3):
        x = step(x)
    arrays, _ = checkpoints.restore(1, {"x": x})
    np.testing.assert_array_equal(arrays["x"], want)


def test_every_force_and_keep(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, every=2)
    x = {"x": jnp.zeros(2)}
    assert [checkpoints.save(step, x, {}) for step in range(1, 7)] == [False, True] * 3
    assert checkpoints.save(7, x, {}, force=True)
    assert not checkpoints.save(7, x, {}, force=True)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["6", "7"]
    with pytest.raises(ValueError, match=r"step is 4, but .* holds step 7"):
        checkpoints.save(4, x, {})


@pytest.mark.parametrize("field", ["keep", "every"])
def test_bad_settings_are_named(tmp_path, field):
    with pytest.raises(ValueError, match=f"{field} is 0, want at least 1"):
        Checkpoints(tmp_path, **{field: 0})


def test_nothing_to_restore_is_a_clear_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 5"):
        checkpoints.restore(5, {"x": jnp.zeros(2)})


SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"w": jax.ShapeDtypeStruct((3, 5), jnp.float32, sharding=SHARDING)},
            r"policy/w: saved as float32\[3,4\], wanted as float32\[3,5\]",
        ),
        (
            {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=SHARDING)},
            r"policy/w: saved as float32\[3,4\], wanted as bfloat16\[3,4\]",
        ),
        (
            {"extra": jax.ShapeDtypeStruct((1,), jnp.int32, sharding=SHARDING)},
            "policy/extra: wanted, not in the checkpoint",
        ),
        ({"w": None}, "policy/w: in the checkpoint, not wanted"),
        ({"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)}, "policy/w: no sharding given"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    saved = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(2)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": saved}, {})
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.restore(1, {"policy": {**abstract_arrays(saved), **change}})
    assert "policy/b" not in str(error.value)


@pytest.mark.parametrize(
    "value, error, message",
    [
        ({1: "a"}, TypeError, r"host_state\['memory'\]: key 1 is int, want str"),
        ([(1, 2)], TypeError, r"host_state\['memory'\]\[0\] is tuple"),
        (np.float32(1), TypeError, r"host_state\['memory'\] is float32"),
        ([0.0, float("nan")], ValueError, r"host_state\['memory'\]\[1\] is nan"),
    ],
)
def test_host_state_that_json_would_change_is_refused(tmp_path, value, error, message):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(error, match=message):
        checkpoints.save(1, {"x": jnp.zeros(2)}, {"memory": value})
    assert checkpoints.latest_step() is None


def test_a_part_is_restored_without_the_rest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved = {"policy": {"w": jnp.arange(6.0), "mu": jnp.ones(6)}, "anchor": jnp.zeros(3)}
    checkpoints.save(1, saved, {})
    place = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.sharding.PartitionSpec("x")
    )
    wanted = {"policy": {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=place)}}
    part = checkpoints.restore_part(1, wanted)
    assert part.keys() == {"policy"} and part["policy"].keys() == {"w"}
    np.testing.assert_array_equal(part["policy"]["w"], np.arange(6.0))
    assert part["policy"]["w"].sharding.is_equivalent_to(place, 1)
    wrong = {"policy": {"v": wanted["policy"]["w"]}}
    with pytest.raises(ValueError, match=r"policy/v: wanted, not in the checkpoint$"):
        checkpoints.restore_part(1, wrong)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 2"):
        checkpoints.restore_part(2, wanted)


# Counts every file or folder that the second save makes or renames, and ends the process at the
# wanted one, as a kill would: no clean-up runs.
KILLED_SAVE = """
    import os, sys
    import jax.numpy as jnp
    from spell_jax.runtime.checkpoint import Checkpoints

    workdir, wanted = sys.argv[1], int(sys.argv[2])
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, {"x": jnp.ones(5)}, {"step": 1})
    seen = 0

    def kill(event, arguments):
        global seen
        writes = event == "open" and "w" in str(arguments[1])
        if "checkpoints" in str(arguments[:1]) and (writes or event in ("os.rename", "os.mkdir")):
            seen += 1
            if seen == wanted:
                os._exit(9)

    sys.addaudithook(kill)
    checkpoints.save(2, {"x": 2 * jnp.ones(5)}, {"step": 2})
    print(seen)
"""


def save_twice(workdir, killed_at: int) -> subprocess.CompletedProcess:
    script = textwrap.dedent(KILLED_SAVE)
    return subprocess.run(
        [sys.executable, "-c", script, str(workdir), str(killed_at)], capture_output=True, text=True
    )


def test_a_killed_save_is_never_taken_for_complete(tmp_path):
    whole = save_twice(tmp_path / "whole", killed_at=0)
    assert whole.returncode == 0, whole.stderr
    changes = int(whole.stdout)
    assert changes > 2
    for killed_at in (1, changes // 2, changes):
        workdir = tmp_path / str(killed_at)
        killed = save_twice(workdir, killed_at)
        assert killed.returncode == 9, killed.stderr
        left = {path.name for path in (workdir / "checkpoints").iterdir()}
        assert "2" not in left
        checkpoints = Checkpoints(workdir)
        assert checkpoints.latest_step() == 1
        arrays, host_state = checkpoints.restore(1, {"x": jnp.zeros(5)})
        assert arrays["x"].tolist() == [1.0] * 5 and host_state == {"step": 1}
        assert checkpoints.save(2, {"x": 3 * jnp.ones(5)}, {"step": 2})
        assert checkpoints.restore(2, {"x": jnp.zeros(5)})[0]["x"].tolist() == [3.0] * 5
        checkpoints.close()
        assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"1", "2"}
