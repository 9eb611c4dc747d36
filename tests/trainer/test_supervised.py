"""Tests of supervised fine-tuning: learning, invalid rows, equality of resumed runs."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from spell_jax.config import read_supervised
from spell_jax.configs import tiny_warm_start
from spell_jax.evaluation import generation
from spell_jax.learner.learner import Learner
from spell_jax.learner.non_finite import NonFinite
from spell_jax.policy import int8, lora, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import LoraConfig
from spell_jax.question_sets import tiny_world_rows, tuning_rows
from spell_jax.question_sets.rows import Row
from spell_jax.runtime import entry
from spell_jax.runtime.files.checkpoint import MisfitError
from spell_jax.runtime.files.durable import DiskError
from spell_jax.runtime.files.workdir_lock import locked
from spell_jax.runtime.hosts.preemption import EXIT_CODE, Preempted
from spell_jax.runtime.log.metrics import MetricsWriter, read_metrics
from spell_jax.trainer import supervised
from spell_jax.trainer.export import export
from tests import noise
from tests.policy import hf_folders
from tests.runtime.files import fake_hub

ROWS = [
    {"prompt": f"- Arvo city {city}\ncity of Arvo", "completion": f"answer is {city}"}
    for city in ("Oslo", "Rome", "Lima")
]


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    noise.use_one_device(monkeypatch)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def small_config(policy: pathlib.Path | str, source: pathlib.Path | str, **overrides) -> ConfigDict:
    config = tiny_warm_start.get_config()
    config.policy.folder = str(policy)
    config.source = str(source)
    config.steps, config.rows_per_step = 8, 2
    config.log_every = config.checkpoint_every = 1
    config.optimizer.learning_rate = 0.01
    config.optimizer.warmup_steps = 2
    config.packing.buckets = ((64, 24),)
    config.packing.token_budget = 128
    config.update(overrides)
    return config


def steady_metrics(workdir: pathlib.Path) -> list[dict]:
    return list(map(noise.steady, read_metrics(workdir)))


def test_loss_decreases_and_the_saved_policy_loads(policy, source, tmp_path):
    config = small_config(policy, source, steps=40, rows_per_step=3, checkpoint_every=100)
    folder = supervised.fine_tune(config, tmp_path / "run")
    # The loss equals the policy gradient's with advantage 1 and ratio 1, so -1 throughout.
    losses = [-line["train/mean_logprob"] for line in read_metrics(tmp_path / "run")]
    assert len(losses) == 40
    assert losses[-1] < 0.5 < 4 < losses[0]
    shape, params = weights.load(folder)
    assert shape == weights.load(policy)[0]
    assert (params["embedding"] != weights.load(policy)[1]["embedding"]).any()
    assert tokenizers.load(folder).encode("Oslo") == tokenizers.load(policy).encode("Oslo")
    # The run folder names the prompts that the policy was tuned on.
    assert generation.find_field(epath.Path(tmp_path / "run"), "prompts", "full") == "compact"


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt the process in place of update number `step`."""
    learn, steps = Learner.update, itertools.count(1)

    def killed(*args):
        if next(steps) == step:
            raise KeyboardInterrupt
        return learn(*args)

    monkeypatch.setattr(Learner, "update", killed)


def test_checkpoint_of_an_unfinished_run_is_exported(policy, source, tmp_path, monkeypatch):
    def config(steps: int) -> ConfigDict:
        config = small_config(policy, source, steps=steps)
        config.optimizer.schedule = "constant"  # otherwise it depends on the number of steps
        return config

    folder = supervised.fine_tune(config(2), tmp_path / "whole")
    with monkeypatch.context() as during:
        kill_at(during, 3)
        with pytest.raises(KeyboardInterrupt):
            supervised.fine_tune(config(8), tmp_path / "killed")
    assert not (tmp_path / "killed" / "policy").exists()
    assert export(tmp_path / "killed", tmp_path / "out", dtype="float32") == 2
    model = "model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (folder / model).read_bytes()


@pytest.mark.slow
def test_lost_metrics_are_in_the_checkpoint(policy, source, tmp_path, monkeypatch):
    """The disk ends a tuning, and damages its metrics later."""

    def config() -> ConfigDict:
        return small_config(policy, source, steps=4, log_every=1, checkpoint_every=100)

    def steady(workdir: pathlib.Path) -> list[dict]:
        return list(map(noise.steady, read_metrics(workdir)))

    uninterrupted_policy = supervised.fine_tune(config(), tmp_path / "whole")
    put = MetricsWriter._put

    def fill(self, lines):
        if len(lines) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, lines)

    workdir = tmp_path / "full"
    with monkeypatch.context() as during, pytest.raises(DiskError, match=r"step \d is saved with"):
        during.setattr(MetricsWriter, "_put", fill)
        supervised.fine_tune(config(), workdir)
    assert [line["step"] for line in read_metrics(workdir)] == [1]
    (workdir / "metrics.jsonl").write_bytes(bytes(100) + b"\n")
    resumed = supervised.fine_tune(config(), workdir)
    assert steady(workdir) == steady(tmp_path / "whole")
    model = "model.safetensors"
    assert (resumed / model).read_bytes() == (uninterrupted_policy / model).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["compute", "int8"])
def test_adapters_are_tuned_resumed_and_merged(policy, source, base_dtype, tmp_path, monkeypatch):
    def config() -> ConfigDict:
        config = small_config(policy, source, checkpoint_every=2)
        config.policy.update(lora_rank=2, lora_pattern="q_proj", base_dtype=base_dtype)
        return config

    uninterrupted_policy = supervised.fine_tune(config(), tmp_path / "whole")
    with monkeypatch.context() as during:
        kill_at(during, 6)
        with pytest.raises(KeyboardInterrupt):
            supervised.fine_tune(config(), tmp_path / "killed")
    resumed = supervised.fine_tune(config(), tmp_path / "killed")
    model = "model.safetensors"
    assert (resumed / model).read_bytes() == (uninterrupted_policy / model).read_bytes()
    (shape, before), (_, after) = weights.load(policy), weights.load(uninterrupted_policy)
    if base_dtype == "int8":
        before = lora.merge(
            dataclasses.replace(shape, lora=LoraConfig(2, base_dtype="int8")),
            int8.quantize_base(before),
        )[1]
    changed = {
        "/".join(path)
        for path, value in flatten_dict(after).items()
        if not np.array_equal(value, flatten_dict(before)[path])
    }
    assert changed == {"layers/attention/q_kernel"}
    export(tmp_path / "killed", tmp_path / "adapters", adapters=True)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_run_on_a_model_of_the_hub_keeps_its_commit(policy, source, tmp_path, monkeypatch):
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as hub:
        commit = hub.commit_folder("own/noise", policy)
        for steps in (3, 4):
            config = small_config("hf://own/noise", source, steps=steps)
            supervised.fine_tune(config, tmp_path / "run")
            saved = json.loads((tmp_path / "run" / "config.json").read_text())
            assert saved["policy"]["folder"] == f"hf://own/noise@{commit}"
            hub.commit("own/noise", {"config.json": b"moved on"})
        assert export(tmp_path / "run", tmp_path / "out") == 4
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert weights.load(tmp_path / "out")[0] == weights.load(policy)[0]


def test_wrong_rows_end_the_run_before_the_model_is_looked_for(policy, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "add", "output": "3"}\n')
    with pytest.raises(ValueError) as raised:
        supervised.fine_tune(small_config("no/model", path), tmp_path / "run")
    assert str(raised.value) == (
        f"source = {path}: none of its 1 lines is a row (line 1: must have prompt and completion, "
        "or prompt and solution, or messages, or text; has instruction, output)"
    )
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    line = {"prompt": turns, "completion": "c"}
    path.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(supervised, "make_learner", lambda *_: pytest.fail("too late"))
    with pytest.raises(ValueError, match=r"^source: a prompt with messages of system, user: "):
        supervised.fine_tune(small_config(policy, path), tmp_path / "run")


@pytest.mark.slow
def test_killed_run_resumes_to_bit_identical_weights(policy, source, tmp_path, monkeypatch):
    def config():
        return small_config(policy, source, checkpoint_every=2)

    uninterrupted_policy = supervised.fine_tune(config(), tmp_path / "whole")
    with monkeypatch.context() as during:
        kill_at(during, 6)
        with pytest.raises(KeyboardInterrupt):
            supervised.fine_tune(config(), tmp_path / "killed")
    # Step 5 was run and written, the last checkpoint is of step 4.
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    resumed = supervised.fine_tune(config(), tmp_path / "killed")
    model = "model.safetensors"
    assert (resumed / model).read_bytes() == (uninterrupted_policy / model).read_bytes()
    assert steady_metrics(tmp_path / "killed") == steady_metrics(tmp_path / "whole")


@pytest.mark.slow
def test_preempted_run_saves_and_resumes(policy, source, tmp_path, monkeypatch):
    def config():
        return small_config(policy, source, checkpoint_every=100)

    uninterrupted_policy = supervised.fine_tune(config(), tmp_path / "whole")
    learn, steps = Learner.update, itertools.count(1)

    def warned(*args):
        if next(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*args)

    with monkeypatch.context() as during:
        during.setattr(Learner, "update", warned)
        with pytest.raises(Preempted, match="SIGTERM") as ended:
            supervised.fine_tune(config(), tmp_path / "left")
    assert ended.value.code == EXIT_CODE
    assert [path.name for path in (tmp_path / "left" / "checkpoints").iterdir()] == ["5"]
    resumed = supervised.fine_tune(config(), tmp_path / "left")
    model = "model.safetensors"
    assert (resumed / model).read_bytes() == (uninterrupted_policy / model).read_bytes()
    assert steady_metrics(tmp_path / "left") == steady_metrics(tmp_path / "whole")


@pytest.mark.slow
def test_rows_of_non_finite_updates_are_written(policy, source, tmp_path, monkeypatch):
    noise.lose_numbers(monkeypatch)
    config = small_config(policy, source)
    config.optimizer.max_skipped = 2
    with pytest.raises(NonFinite) as error:
        supervised.fine_tune(config, tmp_path)
    path = tmp_path / "non_finite" / "2.jsonl"
    assert str(path) in error.value.__notes__[0]
    (first, second) = map(json.loads, path.read_text().splitlines())
    text_pairs = [(row["prompt"], row["completion"]) for row in ROWS]
    for line in (first, second):
        assert any(
            prompt in line["prompt"] and text in line["answer"] for prompt, text in text_pairs
        )


def test_random_policy_knows_the_gaps_of_its_tokenizer(tmp_path):
    words = hf_folders.word_piece()
    words["model"]["vocab"]["##."] = 9
    folder = hf_folders.write(tmp_path / "words", words, {"eos_token": "[SEP]"})
    config = small_config("", "tiny")
    config.policy.tokenizer = str(folder)
    _, shape, _ = supervised.make_policy(read_supervised(config))
    assert (shape.vocab_size, shape.unused_ids) == (10, ((6, 9),))


@pytest.mark.slow
def test_loss_on_texts_is_the_next_token_loss(policy, source):
    config = read_supervised(small_config(policy, source))
    shape, params = weights.load(policy)
    learner, tokenizer = supervised.make_learner(config, shape), tokenizers.load(policy)
    texts = ("Oslo is", "Rome and Lima are")
    groups = [tuning_rows.to_group(Row("", text, "text", ""), tokenizer) for text in texts]

    def loss(params):
        """Average the loss of plain forward passes over all tokens but the first of each text."""
        losses = []
        for text in texts:
            tokens = jnp.asarray([tokenizer.encode(text)])
            logprobs = jax.nn.log_softmax(transformer.logits(shape, params, tokens[:, :-1]))
            losses.append(-jnp.take_along_axis(logprobs, tokens[..., 1:, None], axis=-1).ravel())
        return jnp.concatenate(losses).mean()

    expected_loss, gradient = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, params))
    _, numbers = learner.update(learner.init(params), groups)
    assert -numbers["mean_logprob"] == pytest.approx(float(expected_loss), rel=1e-4)
    assert numbers["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-3)
    assert numbers["answer_tokens"] == sum(len(tokenizer.encode(text)) - 1 for text in texts)


@pytest.mark.slow
def test_rows_that_fit_no_bucket_are_counted(policy, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    long = {"prompt": "p", "completion": "answer " * 30}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], long, {})))
    with caplog.at_level(logging.INFO, "spell_jax"):
        supervised.fine_tune(small_config(policy, path, steps=3), tmp_path / "run")
    assert f"begins with the weights of {policy}" in caplog.text
    assert "3 rows were longer than packing's longest row" in caplog.text
    assert f"{path}: 1 lines were skipped, as logged at the start" in caplog.messages
    assert [line["train/refused_answers"] for line in read_metrics(tmp_path / "run")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("packing", "field", "longest"),
    [
        ({"buckets": ((16, 2), (64, 3)), "token_budget": 64}, "packing.buckets", (64, 3)),
        ({"buckets": "auto", "token_budget": 9}, "packing.token_budget = 9", (9, 9)),
    ],
)
def test_run_whose_rows_all_fit_no_row_is_refused(
    packing, field, longest, policy, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(Learner, "compile", lambda *_: pytest.fail("too late"))
    tokenizer = tokenizers.load(policy)
    sizes = [tuning_rows.to_group(Row(*row.values(), "", ""), tokenizer).size for row in ROWS]
    shortest = min(sizes, key=lambda size: size.tokens)
    config = small_config(policy, source)
    config.packing.update(packing)
    with pytest.raises(ValueError) as raised:
        supervised.fine_tune(config, tmp_path / "run")
    assert str(raised.value) == (
        f"{field}: no row of source = {str(source)!r} fits; a row may have {longest[0]} tokens, "
        f"{longest[1]} of them of its completion, and the shortest has {shortest.tokens}, "
        f"{shortest.answers} of them of its completion"
    )
    assert not (tmp_path / "run").exists()


def test_rows_that_train_no_tokenizer_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    config = small_config("", path)
    config.policy.vocab_size = 270
    messages = {
        "a b " * 20_000: "a new tokenizer is trained .* the shortest here has 80000; cut the texts",
        "a b c": "no tokenizer of 270 pieces can be trained on the texts .*; choose another size",
    }
    for text, message in messages.items():
        path.write_text(json.dumps({"text": text}) + "\n")
        fields = f"^source = '{path}', policy\\.vocab_size = 270: "
        with pytest.raises(ValueError, match=fields + message):
            supervised.fine_tune(config, tmp_path / "run")


@pytest.mark.slow
def test_resume_with_another_vocabulary_of_the_same_size_names_the_source(source, tmp_path):
    def config(source: pathlib.Path, steps: int) -> ConfigDict:
        config = small_config("", source, steps=steps, checkpoint_every=100)
        config.policy.update(vocab_size=320, layers=1, width=16, heads=1, kv_heads=1, head_size=16)
        return config

    supervised.fine_tune(config(source, 3), tmp_path / "run")
    new_source = tmp_path / "new.jsonl"
    new_source.write_text(json.dumps(ROWS[0] | {"completion": "the quick brown fox"}) + "\n")
    message = (
        f"^source = '{new_source}': was '{source}' in the run of .* run in another workdir.*rows"
    )
    with pytest.raises(MisfitError, match=message):
        supervised.fine_tune(config(new_source, 4), tmp_path / "run")


@pytest.mark.parametrize(
    ("epochs", "rows_per_step", "steps"), [(3, 2, 5), (0.1, 2, 1), (40, 3, 40), (0.7, 1, 3)]
)
def test_epochs_set_the_steps_and_bound_the_warm_up(source, epochs, rows_per_step, steps):
    fields = {"epochs": epochs, "rows_per_step": rows_per_step, "steps": 1000}
    config = small_config("tiny", source, **fields)
    config.optimizer.warmup_steps = 2
    rows = tuning_rows.open_rows(str(source), "compact", 0)  # 3 rows
    settled = supervised.settle_steps(read_supervised(config), rows)
    assert settled.steps == settled.optimizer.total_steps == steps
    assert settled.optimizer.warmup_steps == (2 if steps == 40 else 0)
    # The cosine ends with the run: at its last step it is at its lowest.
    rate = settled.optimizer.rate()
    assert rate(steps) == pytest.approx(0.05 * 0.01) and rate(steps - 1) > rate(steps)


def test_epochs_train_on_each_row_as_often(policy, source, tmp_path):
    config = small_config(policy, source, epochs=2, rows_per_step=3, steps=1000)
    supervised.fine_tune(config, tmp_path / "run")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 2


def test_epochs_beside_steps_are_refused(source, tmp_path):
    message = r"^steps = 8: has no effect with epochs = 2\.0; leave it out, or set epochs = 0$"
    with pytest.raises(ValueError, match=message):
        supervised.fine_tune(small_config("tiny", source, epochs=2), tmp_path / "run")


def test_epochs_of_rows_without_end_are_refused(tmp_path):
    config = small_config("tiny", "tiny", epochs=2)
    message = r"^epochs = 2\.0: must be 0 for source = 'tiny', whose rows have no end; set steps$"
    with pytest.raises(ValueError, match=message):
        supervised.fine_tune(config, tmp_path / "run")


def test_many_repetitions_of_a_row_are_told_at_the_start(source, caplog):
    rows = tuning_rows.open_rows(str(source), "compact", 0)
    for steps, repeats in ((75, 0), (76, 51)):  # of 2 rows: 50 and 50.7 times each of 3 rows
        caplog.clear()
        supervised.settle_steps(read_supervised(small_config("tiny", source, steps=steps)), rows)
        text = f"train {repeats} times on each of the 3 rows of {source}, which a policy then knows"
        assert (text in caplog.text) == bool(repeats) and ("epochs" in caplog.text) == bool(repeats)
    endless = tuning_rows.open_rows("tiny", "compact", 0)
    caplog.clear()
    supervised.settle_steps(read_supervised(small_config("tiny", "tiny", steps=10**6)), endless)
    assert not caplog.text


def test_rows_that_train_a_tokenizer_are_read_once(monkeypatch, tmp_path, caplog):
    class LearnerError(Exception):
        pass

    def make_learner(config, policy):
        raise LearnerError

    monkeypatch.setattr(supervised, "make_learner", make_learner)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (ROWS[0], {}, ROWS[1])))
    with pytest.raises(LearnerError):
        supervised.fine_tune(small_config("", path), tmp_path / "run")
    assert caplog.text.count(f"{path}:2: skipped") == 1


def test_new_policy_gets_its_own_tokenizer(monkeypatch):
    monkeypatch.setattr(supervised, "TOKENIZER_ROWS", 300)
    config = small_config("", "tiny")
    config.policy.vocab_size = 400
    config = read_supervised(config)
    _, shape, tokenizer = supervised.make_policy(config)
    assert shape.vocab_size == tokenizer.vocab_size <= 400
    for symbol in tiny_world_rows.SYMBOLS:
        assert tokenizer.count(symbol) == 1, symbol
    stream = tuning_rows.open_rows(config.source, config.prompts, config.seed)
    rows = itertools.islice(stream.start(300), 50)
    for text in ("Größe 漢字 \U0001f600", *(row.prompt + row.completion for row in rows)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    *_, second_tokenizer = supervised.make_policy(config)
    assert second_tokenizer.model == tokenizer.model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("epochs", -1.0),
        ("rows_per_step", 0),
        ("log_every", 0),
        ("checkpoint_every", 0),
        ("packing.token_budget", 1),
        ("optimizer.b1", 2.0),
        ("policy.folder", "no/such/folder"),
        ("policy.remat", "some"),
        ("source", "no/such/file"),
        ("prompts", "no/such/folder"),
    ],
)
def test_invalid_value_is_named_in_the_error(field, value, policy, source, tmp_path, monkeypatch):
    config = small_config(policy, source)
    section, _, name = field.rpartition(".")
    (config[section] if section else config)[name] = value
    if field == "prompts":
        config.source = "tiny"
    monkeypatch.setattr(entry, "setup_done", lambda: pytest.fail("the checks had ended"))
    with pytest.raises((ValueError, FileNotFoundError), match=str(value)) as failure:
        supervised.fine_tune(config, tmp_path)
    assert field in str(failure.value)
    assert not np.any([p.name == "policy" for p in tmp_path.iterdir() if p.is_dir()])


def test_workdir_in_use_is_refused_and_not_touched(policy, source, tmp_path):
    (workdir := tmp_path / "run").mkdir()
    with (
        locked(workdir),
        pytest.raises(ValueError, match=r"^workdir = .*: is in use by pid"),
    ):
        supervised.fine_tune(small_config(policy, source), workdir)
    assert [*workdir.iterdir()] == []
