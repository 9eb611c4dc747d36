import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from etils.epath import backend, gpath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spell_jax.runtime.files import hashes
from spell_jax.runtime.files.checkpoint import Checkpoints, abstract_arrays

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
    """Create weights, optimizer state (namedtuples), a bfloat16 vector and a typed random key."""
    params = {
        "w": jnp.arange(64.0).reshape(8, 8) / 7 + offset,
        "b": jnp.full(3, 1.5 + offset, jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    _, opt_state = optimizer.update(params, optimizer.init(params), params)
    state = {"policy": {"params": params, "opt_state": opt_state}, "key": jax.random.key(3)}

    def placed(leaf: jax.Array) -> jax.Array:
        spec = P("fsdp", "tensor") if leaf.ndim == 2 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(placed, state)


def assert_same(arrays, expected_arrays) -> None:
    assert jax.tree.structure(arrays) == jax.tree.structure(expected_arrays)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(arrays)[0],
        jax.tree.leaves(expected_arrays),
        strict=True,
    ):
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.mark.slow
def test_restore_by_a_new_manager_is_bit_identical(tmp_path):
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
def test_restore_onto_another_mesh_is_bit_identical(tmp_path, fsdp, tensor):
    saved = state_on(mesh_of(4, 2))
    target_state = state_on(mesh_of(fsdp, tensor), offset=9.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved, HOST_STATE)
    arrays, _ = checkpoints.restore(1, abstract_arrays(target_state))
    assert_same(arrays, saved)
    for leaf, target_leaf in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(target_state), strict=True
    ):
        assert leaf.sharding == target_leaf.sharding


@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, devices):
    """On CPU the host's copy may share the device's buffer: saved data must not be overwritten."""
    place = NamedSharding(mesh_of(devices, 1), P("fsdp"))
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)

    def address(x: jax.Array) -> int:
        return x.addressable_shards[0].data.unsafe_buffer_pointer()

    x = jax.block_until_ready(step(jax.device_put(jnp.zeros(2**20), place)))
    before = address(x)
    x = step(x)
    assert address(x) == before  # a donated buffer is overwritten if nobody reads it
    x = jax.block_until_ready(step(x + jnp.arange(2.0**20)))
    saved_array = np.array(x)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": x}, {})
    for _ in range(3):
        x = step(x)
    x.delete()
    arrays, _ = checkpoints.restore(1, {"x": jax.device_put(jnp.zeros(2**20), place)})
    np.testing.assert_array_equal(arrays["x"], saved_array)


def test_save_follows_every_force_and_keep(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, every=2)
    x = {"x": jnp.zeros(2)}
    assert [checkpoints.save(step, x, {}) for step in range(1, 7)] == [False, True] * 3
    assert checkpoints.save(7, x, {}, force=True)
    assert not checkpoints.save(7, x, {}, force=True)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["6", "7"]
    with pytest.raises(ValueError, match=r"step is 4, but .* holds step 7"):
        checkpoints.save(4, x, {})


def test_latest_and_best_steps_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    scores = [0.5, 0.75, None, 0.75, 0.25, None]
    best = [1, 2, 2, 2, 2, 2]
    for step, score in enumerate(scores, 1):
        checkpoints.save(step, {"x": jnp.full(2, float(step))}, {}, score=score)
        checkpoints.wait()
        folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        assert folders == {str(best[step - 1]), str(step)}
    checkpoints.close()
    reopened_checkpoints = Checkpoints(tmp_path, keep=1)
    assert reopened_checkpoints.latest_step() == 6
    assert reopened_checkpoints.restore(2, {"x": jnp.zeros(2)})[0]["x"].tolist() == [2.0, 2.0]
    assert reopened_checkpoints.save(7, {"x": jnp.zeros(2)}, {}, force=True, score=0.76)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"7"}
    with pytest.raises(ValueError, match="score is nan"):
        reopened_checkpoints.save(8, {"x": jnp.zeros(2)}, {}, score=float("nan"))


@pytest.mark.parametrize("field, least", [("keep", 1), ("every", 1), ("retries", 0)])
def test_settings_out_of_range_are_rejected(tmp_path, field, least):
    with pytest.raises(ValueError, match=f"{field} = {least - 1}: must be at least {least}"):
        Checkpoints(tmp_path, **{field: least - 1})


class Handed(Exception):
    """Raised to end a call after it has recorded its arguments."""


@pytest.mark.parametrize("workdir", ["gs://bucket/a/run", "/data/run", "run"])
def test_orbax_gets_absolute_paths_and_unchanged_bucket_urls(monkeypatch, tmp_path, workdir):
    monkeypatch.chdir(tmp_path)

    def manager(directory, **_):
        raise Handed(directory)

    monkeypatch.setattr(ocp, "CheckpointManager", manager)
    with pytest.raises(Handed) as error:
        Checkpoints(workdir)
    [directory] = error.value.args
    assert isinstance(directory, epath.Path)
    local = f"{tmp_path}/run" if workdir == "run" else workdir
    assert str(directory) == f"{local}/checkpoints"


def test_hashes_are_read_and_written_through_epath(tmp_path, monkeypatch):
    """A fake bucket backend serves epath; Orbax itself keeps using the local folder."""
    local, calls = str(tmp_path / "bucket"), set()
    checkpoints = Checkpoints(tmp_path / "bucket")
    checkpoints.save(1, {"x": jnp.ones(2)}, {}, force=True)

    class Bucket(backend._OsPathBackend):
        def open(self, path, mode):
            calls.add(("open", mode))
            return super().open(os.fspath(path).replace("gs://bucket", local), mode)

        def listdir(self, path):
            return super().listdir(os.fspath(path).replace("gs://bucket", local))

        def walk(self, top, **options):
            calls.add(("walk", "r"))
            for parent, folders, files in super().walk(
                os.fspath(top).replace("gs://bucket", local), **options
            ):
                yield os.fspath(parent).replace(local, "gs://bucket"), folders, files

    monkeypatch.setattr(gpath._GPath, "_backend", Bucket())
    checkpoints._directory = epath.Path("gs://bucket/checkpoints")
    (tmp_path / "bucket" / "checkpoints" / "1" / "hashes.txt").unlink()
    hashes.write_hashes(checkpoints._folder(1), 0.5)
    assert checkpoints.newest_intact() == 1
    assert calls == {("open", "rb"), ("open", "wb"), ("walk", "r")}


def test_restore_of_a_missing_step_raises(tmp_path):
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
def test_restore_error_names_mismatched_tensors(tmp_path, change, message):
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
def test_host_state_that_json_would_alter_is_rejected(tmp_path, value, error, message):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(error, match=message):
        checkpoints.save(1, {"x": jnp.zeros(2)}, {"memory": value})
    assert checkpoints.latest_step() is None


def test_restore_part_returns_only_requested_arrays(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved = {"policy": {"w": jnp.arange(6.0), "mu": jnp.ones(6)}, "reference_reader": jnp.zeros(3)}
    checkpoints.save(1, saved, {})
    place = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.sharding.PartitionSpec("x")
    )
    abstract_part = {"policy": {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=place)}}
    part = checkpoints.restore_part(1, abstract_part)
    assert part.keys() == {"policy"} and part["policy"].keys() == {"w"}
    np.testing.assert_array_equal(part["policy"]["w"], np.arange(6.0))
    assert part["policy"]["w"].sharding.is_equivalent_to(place, 1)
    wrong = {"policy": {"v": abstract_part["policy"]["w"]}}
    with pytest.raises(ValueError, match=r"policy/v: wanted, not in the checkpoint$"):
        checkpoints.restore_part(1, wrong)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 2"):
        checkpoints.restore_part(2, abstract_part)


# Kills the process at the first audit event of the second save with the given kind and path.
KILLED_SAVE = """
    import os, signal, sys
    import jax.numpy as jnp
    from spell_jax.runtime.files.checkpoint import Checkpoints

    workdir, kind, end = sys.argv[1:]
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(1, {"x": jnp.ones(5)}, {"step": 1}, force=True)

    def kill(event, arguments):
        path = str(arguments[0]) if arguments else ""
        if event == kind and "/checkpoints/" in path and path.endswith(end):
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    checkpoints.save(2, {"x": 2 * jnp.ones(5)}, {"step": 2})
    checkpoints.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "event, path, left",
    [
        ("os.mkdir", "2.orbax-checkpoint-tmp", "1"),
        ("open", "host.orbax-checkpoint-tmp/metadata", "1"),
        ("os.rename", "arrays.orbax-checkpoint-tmp", "1"),
        ("os.rename", "2.orbax-checkpoint-tmp", "1"),
        ("open", "2/hashes.txt.tmp", "1"),
        ("os.rename", "2/hashes.txt.tmp", "1"),
        ("os.remove", "1/hashes.txt", "2"),
        ("shutil.rmtree", "checkpoints/1", "2"),
    ],
)
def test_killed_save_leaves_one_intact_step(tmp_path, event, path, left):
    """At any time during a background save, one step is complete."""
    script = textwrap.dedent(KILLED_SAVE)
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), event, path], capture_output=True, text=True
    )
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "killed\n"), killed.stderr
    step = int(left)
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.newest_intact() == checkpoints.latest_step() == step
    arrays, host_state = checkpoints.restore(step, {"x": jnp.zeros(5)})
    assert arrays["x"].tolist() == [float(step)] * 5 and host_state == {"step": step}
    assert checkpoints.save(step + 1, {"x": 3 * jnp.ones(5)}, {"step": 2})
    assert checkpoints.restore(step + 1, {"x": jnp.zeros(5)})[0]["x"].tolist() == [3.0] * 5
    checkpoints.close()
    # Incomplete or partly deleted steps are replaced when they are saved again.
    step_folders = {item.name for item in (tmp_path / "checkpoints").iterdir()}
    assert step_folders <= {str(step + 1), "1"} and str(step + 1) in step_folders


def test_killed_first_save_is_not_reported_as_damage(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(5)}, {}, force=True)
    (tmp_path / "checkpoints" / "1" / "hashes.txt").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest_step() is checkpoints.newest_intact() is None
    assert checkpoints.save(1, {"x": jnp.ones(5)}, {}, force=True)
    assert checkpoints.newest_intact() == 1
