"""Tests of user-defined algorithms: examples/counting.py, and one with two models."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from absl import flags
from etils import epath
from ml_collections import ConfigDict, config_flags

from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.episode import QuestionEpisode, responder_groups
from spell_jax.config import default_config, extra_model
from spell_jax.data import tiny_world
from spell_jax.data.clusters import Cluster
from spell_jax.data.samples import Sample
from spell_jax.launch import check, dry_step
from spell_jax.learner.packing import TrainGroup
from spell_jax.policy import weights
from spell_jax.reporting.episodes import choose_episodes
from spell_jax.reporting.page import RunData, write_page
from spell_jax.rollout.replies import Reply
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.trainer import loop
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_run
from spell_jax.trainer.state import SharedParams
from tests import noise
from tests.algorithms.scripted import ScriptedModels
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "counting.py"
STEPS = 3
# Texts of random weights reach the token cap.
COUNTING = {"name": "counting", "clusters": 4, "group_size": 4, "truncated": "score"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(autouse=True, scope="module")
def _small_and_quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.skip_plots(monkeypatch)
        noise.share_programs(monkeypatch)
        algorithms = registry.ALGORITHMS | {"pair": registry.AlgorithmSpec(PairConfig, Pair)}
        monkeypatch.setattr(registry, "ALGORITHMS", algorithms)
        yield


def algorithm_config(policy: pathlib.Path, algorithm: dict[str, Any], **overrides) -> Any:
    config = noise.small_config(policy, steps=STEPS, validate_every=0, **overrides)
    with config.unlocked():
        config.algorithm = ConfigDict(algorithm | {"prompts": "full"})
    return config


# ------------------------------------------------------------------------------------- The example


def docs_block(page: str) -> str:
    """Return the Python block of a page of docs/."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return block


@pytest.fixture
def counting(monkeypatch) -> ModuleType:
    """Import the example as a module, and register its algorithm."""
    spec = importlib.util.spec_from_file_location("counting", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "counting", module)  # dataclasses look the module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    registry.register(registry.AlgorithmSpec(module.CountingConfig, module.Counting))
    return module


def test_example_has_at_most_85_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 85


def test_example_asks_for_counts_that_differ(counting):
    """Documents of the demo, as the page's run reads them: no constant answer is often right."""
    clusters = tiny_world.make_clusters(0, 256, (8, 12))
    episodes = [counting.pose(np.random.default_rng(n), c) for n, c in enumerate(clusters)]
    for episode in episodes:
        word = episode.question.removeprefix("How many name ").removesuffix("?")
        documents = [text.split() for text in episode.cluster.documents]
        assert int(episode.reference) == sum(word in document for document in documents) > 0
    counts = Counter(episode.reference for episode in episodes)
    assert max(counts.values()) < 0.5 * len(episodes) and len(counts) >= 4
    assert counting.write_prompt(episodes[0]).endswith(f"\n{episodes[0].question}")


def test_example_config_is_read(counting):
    config = default_config("counting")
    assert registry.read_algorithm(config.algorithm) == counting.CountingConfig()


def test_example_trains_and_reports(counting, policy, tmp_path, monkeypatch):
    # Random texts rarely hold a number, so their length stands for one.
    score = counting.score
    monkeypatch.setattr(counting, "score", lambda text, truth: score(f"{len(text) % 4}", truth))
    config = algorithm_config(policy, COUNTING)
    workdir = epath.Path(tmp_path / "run")
    loop.train(config, workdir)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS and all(line["train/empty_update"] == 0 for line in lines)
    assert all(0 <= line["rollout/solve_rate"] <= 1 for line in lines)
    episodes = choose_episodes(workdir, 100).chosen_episodes
    assert len(episodes) == 4 * STEPS
    assert all(
        e["question"].startswith("How many name ") and len(e["answers"]) == 4 for e in episodes
    )
    write_page([RunData(workdir, lines, None)], workdir / "report.html")


@pytest.mark.parametrize(
    "text, truth, expected_score", [("7", 7, 1.0), ("it is 2, no: 4", 3, 0.5), ("none", 0, 0.0)]
)
def test_example_reward(counting, text, truth, expected_score):
    assert counting.score(text, truth) == expected_score


@pytest.mark.parametrize("scored_truncated, scores", [(False, (0.0, 1.0)), (True, (1.0, 1.0))])
def test_example_scores_a_cut_answer_as_the_config_says(counting, scored_truncated, scores):
    array = np.ones(1)
    samples = [Sample(array, array, stopped) for stopped in (False, True)]
    reply = Reply((1,), samples, ("so 3", "so 3"), scored_truncated)
    question = QuestionEpisode("counting", Cluster("c", ("a",)), reference="3")
    episode = counting._score(question, reply)
    assert episode.scores == scores and episode.response.texts == ("so 3", "so 3")


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_no_number_ends_the_run_with_its_place(
    value, counting, policy, tmp_path, monkeypatch
):
    """Nothing of it reaches the weights: the step is not in metrics, and no checkpoint has it."""
    monkeypatch.setattr(counting, "score", lambda text, truth: value if len(text) % 2 else 1.0)
    config = algorithm_config(policy, COUNTING)
    message = (
        r"^algorithm counting, step 1, question 'How many name \w+\?' "
        r"with the scores \[.*"
        rf"{value!r}.*\]: rewards\[\d\] = {value!r}: must be a finite number$"
    )
    with pytest.raises(ValueError, match=message):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not [*(tmp_path / "run" / "checkpoints").glob("[0-9]*")]


# ----------------------------------------------------------------- A config file with an algorithm


@pytest.fixture
def config_file(counting, tmp_path, monkeypatch) -> pathlib.Path:
    """Write the config file of the how-to page; the example is a module that it can import."""
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    del registry.ALGORITHMS["counting"]
    path = tmp_path / "counting_config.py"
    path.write_text(docs_block("howto/add_algorithm.md"))
    return path


def load(path: pathlib.Path, *overrides: str) -> Any:
    """Load a config file as a command does."""
    arguments, values = ["command", f"--config={path}", *overrides], flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", values, sys_argv=arguments)
    entry.parse_flags(arguments, values, values)
    return values["config"].value


def test_config_file_of_the_page_registers_its_algorithm_whenever_it_is_loaded(config_file):
    first, second = load(config_file), load(config_file, "--config.algorithm.clusters=7")
    assert registry.ALGORITHMS["counting"].evaluate is not None
    assert (first.algorithm.clusters, second.algorithm.clusters) == (32, 7)
    for config in (first, second):
        checked = check.check(config)
        assert not checked.mistakes and checked.is_evaluated
    text = check.describe(checked)
    assert "\na step   an unknown number of samples, because CountingConfig has no budgets" in text
    assert "\ntrained  an unknown number of groups\n" in text
    with pytest.raises(ValueError, match=r"^algorithm\.name = 'counting': must have write_replies"):
        dry_step.check(first, dry_step.Workload(128, 9, 3))


def test_missing_method_is_named_before_the_run(config_file, counting, monkeypatch):
    monkeypatch.delattr(counting.Counting, "load_state_dict")
    monkeypatch.delattr(counting.Counting, "metrics")
    line = "algorithm.name = 'counting': Counting must have metrics, load_state_dict ("
    mistakes = check.check(load(config_file)).mistakes
    assert [mistake.startswith(line) for mistake in mistakes] == [True]


def test_scores_that_are_no_equal_number_are_named(counting):
    samples = [Sample(np.ones(1), np.ones(1), True)] * 2
    reply, cluster = Reply((1,), samples, ("3", "4")), Cluster("c", ("a",))
    episode = QuestionEpisode("counting", cluster, response=reply, scores=(1.0, 0.0, 1.0))
    with pytest.raises(ValueError, match=r"^scores: 3 of them, but 2 samples, must be equal$"):
        responder_groups([episode], counting.CountingConfig().to_advantages)


def test_evaluation_of_the_page_scores_held_out_clusters(config_file, policy):
    config = noise.with_fields(load(config_file), {"policy.folder": str(policy)})
    evaluation = make_run(config).evaluation
    assert evaluation is not None
    models = ScriptedModels(lambda role, prompt, sibling, model: "2 documents do.")
    share, numbers = evaluation.quick(models)
    assert len(models.calls[0].prompts) == 256 and share == numbers["all"]
    # As the page says of a constant answer.
    assert round(share, 2) == 0.44 and round(numbers["score"], 2) == 0.70
    cells = evaluation.full(models).report["counting"]["all"]
    assert all(cell.low < cell.mean < cell.high for cell in cells.values())


def test_config_file_with_a_taken_name_ends_in_one_line(config_file):
    load(config_file)
    copied_file = config_file.with_name("copied_config.py")
    copied_file.write_text(config_file.read_text())
    spell_file = config_file.with_name("spell_config.py")
    change = "class Mine(CountingConfig):\n    name: str = 'spell'\nCountingConfig = Mine\n"
    change = f"import dataclasses\n@dataclasses.dataclass(frozen=True)\n{change}"
    spell_file.write_text(config_file.read_text().replace("\nregister(", f"\n{change}register("))
    # The same class of the same module is no other algorithm.
    load(copied_file)
    message = (
        rf"^--config={spell_file}: Mine\.name = 'spell': must be another name, because .*Spell"
    )
    with pytest.raises(ValueError, match=message) as raised:
        load(spell_file)
    assert "\n" not in str(raised.value)


@dataclasses.dataclass(frozen=True)
class SameNameConfig(AlgorithmConfig):
    name: str = "counting"


@dataclasses.dataclass(frozen=True)
class NamelessConfig(AlgorithmConfig):
    texts: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequiredConfig(AlgorithmConfig):
    name: str = "required"
    texts: int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": SameNameConfig}, r"SameNameConfig\.name = 'counting': must be another name, "),
        ({"config": NamelessConfig}, r"NamelessConfig\.name = '': must be a name; must be a datac"),
        ({"config": RequiredConfig}, r"RequiredConfig: .*'texts'; must be a dataclass with a def"),
        ({"config": dict}, r"AlgorithmSpec\.config = <class 'dict'>: must inherit AlgorithmConfig"),
        ({"inputs": ("texts",)}, r"AlgorithmSpec\.inputs = \('texts',\): must be some of \('clust"),
        ({"inputs": ()}, r"AlgorithmSpec\.inputs = \(\): must be some of"),
        ({"teacher": "no"}, r"AlgorithmSpec\.teacher = 'no': must be one of \('may', 'must'"),
    ],
)
def test_wrong_entry_is_refused_in_one_line(counting, fields, message):
    before = [*registry.ALGORITHMS.items()]
    spec = registry.AlgorithmSpec(counting.CountingConfig, counting.Counting)
    with pytest.raises(ValueError, match=rf"^{message}") as raised:
        registry.register(dataclasses.replace(spec, **fields))
    assert "\n" not in str(raised.value) and [*registry.ALGORITHMS.items()] == before


# ------------------------------------------------------------------------------- Two trained models


@dataclasses.dataclass(frozen=True)
class PairConfig(AlgorithmConfig):
    name: str = "pair"
    group_size: int = 4


class PairedReplies(NamedTuple):
    """The replies of two models and of the frozen policy about a cluster."""

    cluster: Cluster
    responder: Reply
    critic: Reply
    reader: Reply

    def record(self) -> dict[str, Any]:
        return {"answers": list(self.critic.texts)}


class Pair:
    """Algorithm with a second model that answers the policy's output.

    Every second step trains the second model on its answers, with advantage 1.
    """

    model_names = ("other", "reference_reader")
    trained = ("other",)

    def __init__(self, config: Any, context: AlgorithmContext):
        self._stream = context.deal(context.clusters())

    def rollout(self, ask: Any, key: Key, step: int) -> list[PairedReplies]:
        episodes = []
        for _, cluster in self._stream.next(2):
            (responder_reply,) = ask("responder", [cluster.documents[0]], 4)
            (critic_reply,) = ask(
                "critic", responder_reply.texts[:1], 2, model="other", temperature=1.0
            )
            (reader_reply,) = ask("responder", [cluster.documents[0]], 1, model="reference_reader")
            episodes.append(PairedReplies(cluster, responder_reply, critic_reply, reader_reply))
        return episodes

    def groups(self, episodes: Any, key: Key) -> tuple[list[TrainGroup], list[Annotation]]:
        groups = []
        for e in episodes:
            groups.append(e.responder.group([1.0, -1.0, 0.5, -0.5], "responder"))
            if key[1] % 2 == 0:
                groups.append(e.critic.group([1.0, 1.0], "critic", model="other"))
        return groups, [Annotation()] * len(episodes)

    def metrics(self, episodes: Any) -> Metrics:
        return Metrics()

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory) -> pathlib.Path:
    """Save a model that is larger than the policy; return the folder."""
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "other", width=48)


@pytest.fixture
def pair(policy, larger_model) -> Any:
    """Return a config of the algorithm."""
    return pair_config(policy, larger_model)


def pair_config(policy: pathlib.Path, other_folder: pathlib.Path) -> Any:
    algorithm = {"name": "pair", "group_size": 4}
    config = algorithm_config(policy, algorithm, checkpoint_every=1, keep_checkpoints=STEPS)
    with config.unlocked():
        config.other = extra_model()
        config.other.folder, config.other.compute_dtype = str(other_folder), "float32"
        config.other.update(epochs=3, groups_per_update=1)  # of two groups: 6 updates
        config.other.optimizer.learning_rate = 1e-2
    return config


@pytest.fixture(scope="module")
def uninterrupted_run(policy, larger_model, tmp_path_factory) -> epath.Path:
    """Run the algorithm from its first step to its last; return the workdir."""
    return loop.train(
        pair_config(policy, larger_model), epath.Path(tmp_path_factory.mktemp("whole") / "run")
    )


def lines_of(workdir: epath.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_second_model_is_updated_only_when_it_has_rows(pair, uninterrupted_run):
    lines = lines_of(uninterrupted_run)
    assert [("train/other/loss" in line) for line in lines] == [False, True, False]
    assert all(line["train/rows/responder"] == 8 for line in lines)
    assert lines[1]["train/rows/critic"] == 4
    assert (
        lines[1]["rollout/prompt_tokens/other"] > 0
        and lines[1]["rollout/answer_tokens/reference_reader"] > 0
    )
    before = weights.load(epath.Path(pair.other.folder), meshes.make_mesh())[1]
    after = weights.load(uninterrupted_run / "other", meshes.make_mesh())[1]
    assert before["embedding"].shape[-1] == 48
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2], ids=["before its update", "after its update"])
def test_second_model_resumes_bit_identically(pair, uninterrupted_run, step, tmp_path):
    halved = noise.end_earlier(uninterrupted_run, epath.Path(tmp_path / "halved"), step)
    loop.train(pair, halved)
    assert [*map(noise.steady, lines_of(uninterrupted_run))] == [
        *map(noise.steady, lines_of(halved))
    ]
    run = make_run(pair)
    ends = []
    for workdir in (uninterrupted_run, halved):
        with Checkpoints(workdir) as checkpoints:
            ends.append(runs.restore_or_init(run, checkpoints)[0].tree())
    assert ends[0].keys() == {"policy", "other", "reference_reader"}
    assert int(ends[0]["other"].step) == 6 and int(ends[0]["policy"].step) == STEPS
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
def test_rollout_weights_are_cast_anew_on_each_access(pair):
    """Weights in the compute dtype exist only while the caller holds them."""
    with pair.unlocked():
        pair.other.compute_dtype = "bfloat16"
    run = make_run(pair)
    states = runs.first_states(run)
    params = SharedParams(run, states)
    assert params["other"]["embedding"].dtype == "bfloat16"
    assert params["policy"]["embedding"].dtype == "float32"
    assert list(params) == ["policy", "other", "reference_reader"] and len(params) == 3
    assert params["other"]["embedding"].shape[-1] == 48
    assert params["policy"]["embedding"] is not params["policy"]["embedding"]
    np.testing.assert_array_equal(
        params["policy"]["embedding"], params["reference_reader"]["embedding"]
    )
    states.donate()
    with pytest.raises(RuntimeError, match="an update has donated these states"):
        params["policy"]


def test_several_updates_of_a_second_model_need_a_constant_schedule(pair):
    pair.other.optimizer.schedule = "cosine"
    message = r"other.optimizer.schedule = 'cosine': must be 'constant' if other.epochs"
    with pytest.raises(ValueError, match=message):
        make_run(pair)


def test_second_model_needs_a_folder(pair):
    with pair.unlocked():
        pair.other.folder = ""
    with pytest.raises(ValueError, match=r"other\.folder = '': must be a Hugging Face folder"):
        make_run(pair)


@pytest.mark.slow
def test_models_offloaded_to_the_host_train_identically(pair, uninterrupted_run, tmp_path):
    waiting = epath.Path(tmp_path / "waiting")
    for optimizer in (pair.optimizer, pair.other.optimizer):
        optimizer.offload = optimizer.offload_weights = True
    loop.train(pair, waiting)
    assert [*map(noise.steady, lines_of(uninterrupted_run))] == [
        *map(noise.steady, lines_of(waiting))
    ]
