"""Tests of MRCR and HELMET, from small folders in the published layouts."""

from __future__ import annotations

import csv
import difflib
import json
import pathlib
import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.evaluation.benchmarks import helmet_labels, retrieval
from spell_jax.evaluation.benchmarks.base import BenchmarkItem
from spell_jax.evaluation.benchmarks.registry import COLUMNS, LOADERS, load
from spell_jax.evaluation.benchmarks.retrieval import score_mrcr

# ------------------------------------------------------------------------------------------ MRCR


def mrcr_row(number: int = 0, **changes) -> dict:
    messages = [
        {"role": "user", "content": "write a poem about tapirs"},
        {"role": "assistant", "content": "Tapirs walk."},
        {"role": "user", "content": "Prepend aYoo to the 1st (1 indexed) poem about tapirs."},
    ]
    return {
        "prompt": json.dumps(messages),
        "answer": "aYooTapirs walk.",
        "random_string_to_prepend": "aYoo",
        "n_needles": 2,
        "desired_msg_index": 1,
        "total_messages": 3,
        "n_chars": 100 + number,
        "date_added": "04-12-2025",
    } | changes


def write_parquet(path: pathlib.Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("files", [["2needle/2needle_0", "2needle/2needle_1"], ["2needle"]])
def test_mrcr_prompt_and_scores(tmp_path, files):
    for file in files:
        rows = [mrcr_row(i) for i in range(800 // len(files))]
        write_parquet(tmp_path / f"{file}.parquet", rows)
    benchmark = load("mrcr_2needle", tmp_path)
    item = benchmark.items[0]
    assert len(benchmark.items) == 800 and not benchmark.judged
    assert item.prompt == (
        "User: write a poem about tapirs\n\nAssistant: Tapirs walk.\n\n"
        "User: Prepend aYoo to the 1st (1 indexed) poem about tapirs."
    )
    assert item.question.startswith("Prepend") and item.references == ("aYooTapirs walk.",)
    assert item.fields["n_needles"] == 2 and item.fields["n_chars"] == 100
    assert benchmark.score("aYooTapirs walk.", item) == 1.0
    assert benchmark.score("Tapirs walk.", item) == 0.0
    write_parquet(tmp_path / f"{files[0]}.parquet", [mrcr_row()])
    with pytest.raises(ValueError, match=r"rows, but 800 are published"):
        load("mrcr_2needle", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must have 4needle/4needle_0 and "):
        load("mrcr_4needle", tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": "write a poem"}, "prompt = 'write a poem'; it must be a JSON list of messages"),
        ({"prompt": "[]"}, "prompt = .*; it must be a JSON list of messages"),
        ({"prompt": '[{"role": "user"}]'}, "prompt = .*; it must be a JSON list of messages"),
        ({"answer": "Tapirs"}, "answer = 'Tapirs'; it must be a text that begins with"),
        ({"answer": "Tapirs aYoo"}, "answer = .*; it must be a text that begins with"),
        ({"n_chars": "9"}, "n_chars = '9'; it must be a number"),
    ],
)
def test_malformed_mrcr_rows_are_rejected(tmp_path, change, message):
    write_parquet(tmp_path / "8needle.parquet", [mrcr_row(**change)])
    with pytest.raises(ValueError, match=rf"8needle.parquet, row 0: {message}"):
        load("mrcr_8needle", tmp_path, 1)


def mrcr_item(answer: str) -> BenchmarkItem:
    return BenchmarkItem("0", "", "", (f"KEY{answer}",), {"prefix": "KEY"})


@given(st.text("abcd efgh", max_size=300), st.text("abcd efgh", max_size=300))
def test_mrcr_score_matches_the_published_grader(answer, reply):
    """Formula in the dataset's README.md: check the prefix, strip it from both, ratio."""
    expected_score = difflib.SequenceMatcher(None, reply.strip(), answer).ratio()
    assert score_mrcr(f"KEY{reply.strip()}", mrcr_item(answer)) == pytest.approx(expected_score)
    assert score_mrcr(f"<think>KEY</think>{reply}", mrcr_item(answer)) == 0.0
    assert score_mrcr(f"<think>x</think>\nKEY{reply.strip()}", mrcr_item(answer)) == pytest.approx(
        expected_score
    )


def test_only_the_beginning_of_a_long_reply_is_matched():
    answer = "".join(chr(0x4E00 + i) for i in range(500))  # difflib skips frequent characters
    short = answer + "x" * 1400
    assert score_mrcr(f"KEY{short}", mrcr_item(answer)) == pytest.approx(1000 / 2400)
    late = "x" * 1400 + answer
    assert score_mrcr(f"KEY{late}", mrcr_item(answer)) == pytest.approx(1000 / 2400)
    assert score_mrcr(f"KEY{answer}{'x' * 100_000}", mrcr_item(answer)) == pytest.approx(
        1000 / 101_000
    )
    # Text after twice the reference and 1000 characters is not compared.
    behind = "x" * 2000 + answer
    assert score_mrcr(f"KEY{behind}", mrcr_item(answer)) == 0.0
    assert difflib.SequenceMatcher(None, behind, answer).ratio() > 0.3


# ------------------------------------------------------------------------------------------- RAG


def kilt_row(question: str, place: int, **changes) -> dict:
    passages = [{"title": f"T{i}", "text": f"Passage {i}."} for i in range(4)]
    passages[place % 4] = {"title": "Gold", "text": f"Of {question}.", "has_answer": True}
    return {"question": question, "answers": ["Ann Lee", "Lee"], "ctxs": passages} | changes


def write_lines(path: pathlib.Path, rows: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_kilt(folder: pathlib.Path, questions: int = 130, places: int = 6, k: int = 105) -> None:
    rows = [kilt_row(f"q{i}?", place) for i in range(questions) for place in range(places)]
    write_lines(folder / "data" / "kilt" / f"nq-dev-multikilt_1000_k{k}_dep6.jsonl", rows)
    shown = [kilt_row(f"shown {i}?", 0) for i in range(9)] + [kilt_row("shown 0?", 1)]
    write_lines(folder / "data" / "kilt" / "nq-train-multikilt_1000_k3_dep6.jsonl", shown)


def test_rag_prompts_and_scores(tmp_path):
    write_kilt(tmp_path)
    benchmark = load("helmet_nq", tmp_path)
    questions = Counter(item.question for item in benchmark.items)
    assert len(benchmark.items) == 600 and not benchmark.judged
    assert len(questions) == 100 and set(questions.values()) == {6}
    assert benchmark.items == load("helmet_nq", tmp_path).items
    assert benchmark.items[:9] == load("helmet_nq", tmp_path, 9).items
    assert benchmark.items == load("helmet_nq", tmp_path, 1000).items
    item = benchmark.items[0]
    assert item.prompt.endswith(f"Question: {item.question}")
    assert f"Document (Title: Gold): Of {item.question}." in item.prompt
    examples, _, _ = item.prompt.partition(f"Of {item.question}.")
    assert examples.count("Question: shown ") == 2 == examples.count("\nAnswer: Ann Lee\n")
    assert len({item.id for item in benchmark.items}) == 600
    assert benchmark.score("Answer: the poet LEE!", item) == 1.0
    assert benchmark.score("<think>Lee</think>Answer: Bo", item) == 0.0
    article = BenchmarkItem("", "", "", ("The",))
    assert benchmark.score("Answer: the poet", article) == 0.0
    assert benchmark.extract("Well.\nanswer: Bo Li\nMore", item) == "Bo Li"
    assert benchmark.extract("Bo Li\nMore", item) == "Bo Li"
    assert benchmark.extract("<think>answer: no</think>Bo Li\nMore", item) == "Bo Li"


def test_rag_length_selects_the_file_and_limit_is_checked(tmp_path):
    write_kilt(tmp_path, k=440)
    with pytest.raises(FileNotFoundError, match=r"nq-dev-multikilt_1000_k105_dep6, as"):
        load("helmet_nq", tmp_path)
    assert load("helmet_nq_64k", tmp_path).name == "helmet_nq_64k"
    write_kilt(tmp_path, questions=3, places=2)
    with pytest.raises(ValueError, match=r"6 times, once per position: 0 rows, but 100"):
        load("helmet_nq", tmp_path)
    assert len(load("helmet_nq", tmp_path, limit=5).items) == 5
    with pytest.raises(ValueError, match=r"limit = 7, but there are only 6 rows"):
        load("helmet_nq", tmp_path, limit=7)


def test_popqa_has_only_questions_about_rare_pages(tmp_path):
    def row(i: int, place: int) -> dict:
        popularity = (10**4, 10**3, 0)[i % 3] if i % 2 else 999
        return kilt_row(f"q{i}?", place, id=i, s_pop=popularity)

    rows = [row(i, place) for i in range(220) for place in range(6)]
    write_lines(tmp_path / "kilt" / "popqa_test_1000_k105_dep6.jsonl", rows)
    write_lines(tmp_path / "kilt" / "popqa_test_1000_k3_dep6.jsonl", rows[:60])
    benchmark = load("helmet_pop", tmp_path)
    ids = {int(item.fields["question_id"]) for item in benchmark.items}
    assert len(benchmark.items) == 600 and not any(i % 2 for i in ids)
    for item in benchmark.items:  # the question itself is never an example
        assert item.prompt.count(f"Question: {item.question}") == 1
    del rows[0]["s_pop"]
    write_lines(tmp_path / "kilt" / "popqa_test_1000_k105_dep6.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 0: no field 's_pop'"):
        load("helmet_pop", tmp_path)


def test_rag_answers_may_be_nested_but_not_missing(tmp_path):
    write_kilt(tmp_path, questions=1)
    path = tmp_path / "data" / "kilt" / "nq-dev-multikilt_1000_k105_dep6.jsonl"
    write_lines(path, [kilt_row("q?", 0, answers=[["a b"], ["c"]])])
    assert load("helmet_nq", tmp_path, 1).items[0].references == ("a b", "c")
    for answers in ([], [""], [3], "x"):
        write_lines(path, [kilt_row("q?", 0, answers=answers)])
        with pytest.raises(ValueError, match=r"row 0: answers = .*; it must be a list of"):
            load("helmet_nq", tmp_path, 1)


# ------------------------------------------------------------------------------------------- ICL


def texts(count: int, labels: int, prefix: str) -> list[tuple[str, str]]:
    return [(f"{prefix} text {i}", f"label{i % labels}") for i in range(count)]


def write_trec(folder: pathlib.Path, train: int = 5452, test: int = 500) -> None:
    for name, count in (("train_5500", train), ("TREC_10", test)):
        lines = [f"C{i % 6}:f{i % 50} {name} café {i} ?" for i in range(count)]
        (folder / f"{name}.label").write_text("\n".join(lines) + "\n", encoding="latin-1")


def write_icl(task: str, folder: pathlib.Path) -> None:
    kind = helmet_labels.TASKS[task]
    if task.startswith("trec"):
        write_trec(folder)
        if task == "trec_coarse":
            return
        path = folder / "train_5500.label"  # exactly 50 pairs of labels
        lines = path.read_text(encoding="latin-1").splitlines()
        for file in (path, folder / "TREC_10.label"):
            lines = file.read_text(encoding="latin-1").splitlines()
            label_lines = [
                f"C{i % 50 % 6}:f{i % 50} {x.split(' ', 1)[1]}" for i, x in enumerate(lines)
            ]
            file.write_text("\n".join(label_lines), encoding="latin-1")
    elif task == "banking77":
        for name, count in (("train", kind.train), ("test", kind.test)):
            with (folder / f"{name}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerows([("text", "category"), *texts(count, 77, name)])
    elif task == "clinic150":
        parts = {"train": 15_000, "val": 3_000, "test": 4_500}
        data = {name: texts(count, 150, name) for name, count in parts.items()}
        oos = {"oos_train": 250, "oos_val": 100, "oos_test": 1000}
        data |= {name: [(f"{name} {i}", "oos") for i in range(n)] for name, n in oos.items()}
        (folder / "data_oos_plus.json").write_text(json.dumps(data))
    else:
        columns = "userid;answerid;scenario;intent;status;answer_annotation;answer"
        lines = [f'1;{i};music;play{i % 68};; "say; [n : {i}] now";y' for i in range(25_715)]
        lines.append("1;9;music;play1;;null;y")
        name = "NLU-Data-Home-Domain-Annotated-All.csv"
        (folder / name).write_text("\n".join([columns, *lines]))


@pytest.mark.slow
@pytest.mark.parametrize("task", helmet_labels.TASKS)
def test_icl_prompts_and_scores(tmp_path, task):
    write_icl(task, tmp_path)
    kind = helmet_labels.TASKS[task]
    limit = None if task == "trec_coarse" else 20
    benchmark = load(f"helmet_{task}", tmp_path, limit)
    assert len(benchmark.items) == (limit or 500) and not benchmark.judged
    helmet_labels.read_pairs(task, tmp_path, complete=True)  # the published numbers
    item = benchmark.items[0]
    *shown, question_part = item.prompt.split("\n\n")[1:]
    assert question_part == f"{item.question}\nlabel:"
    assert len(shown) == kind.shots[1]
    written = Counter(example.rpartition("label: ")[2] for example in shown)
    assert set(written) == {str(i) for i in range(kind.labels)}
    assert max(written.values()) - min(written.values()) <= 1
    assert benchmark.items[:3] == load(f"helmet_{task}", tmp_path, 3).items[:3]
    reference = item.references[0]
    assert benchmark.score(f"label: {reference}\n\nlabel: x", item) == 1.0
    assert benchmark.score(reference, item) == 1.0
    assert benchmark.score(f"{reference}1", item) == 0.0 == benchmark.score("", item)
    # Questions have different mappings from labels to numbers.
    mappings = {i.references for i in benchmark.items if i.fields == item.fields}
    assert len(mappings) > 1 or limit


def test_icl_examples_are_shuffled_rounds_of_all_labels():
    by_label = {"a": list("1234567890"), "b": ["x"], "c": list("pqrst")}
    examples = helmet_labels.balanced(by_label, 28, random.Random(0))
    rounds = [tuple(label for _, label in examples[at : at + 3]) for at in range(0, 27, 3)]
    assert len(examples) == 28 and all(sorted(labels) == ["a", "b", "c"] for labels in rounds)
    assert len(set(rounds)) > 2
    assert Counter(label for _, label in examples[27:]).total() == 1
    texts = Counter(text for text, _ in examples)
    assert texts["x"] >= 9 and max(texts[text] for text in "1234567890") == 1
    assert {texts[text] for text in "pqrst"} <= {1, 2}  # every text is used before one repeats


def test_icl_reference_agrees_with_the_examples(tmp_path):
    write_trec(tmp_path)
    item = load("helmet_trec_coarse", tmp_path, 1).items[0]
    train = dict(helmet_labels.read_pairs("trec_coarse", tmp_path, True)[0])
    blocks = item.prompt.split("\n\n")[1:-1]
    shown = dict(block.split("\nlabel: ") for block in blocks)
    (number,) = {label for text, label in shown.items() if train[text] == item.fields["label"]}
    assert (number,) == item.references
    assert "café" in item.prompt


def test_every_nlu_label_keeps_an_example(tmp_path):
    write_icl("nlu", tmp_path)
    path = tmp_path / "NLU-Data-Home-Domain-Annotated-All.csv"
    path.write_text(path.read_text() + "\n" + "\n".join(f"1;1;rare;{i};;x;" for i in range(30)))
    train, test = helmet_labels.read_pairs("nlu", tmp_path, complete=False)
    assert dict(train + test)["say; 70 now"] == "music_play2"  # without annotations
    places = [int(text.split()[1]) for text, label in test if label.startswith("music")]
    assert min(places) < 300 and max(places) > 25_400  # test rows come from the whole file
    assert len({label for _, label in train}) == 98
    assert len(test) == 2575 and len(train) == 23_170


def test_malformed_label_files_are_rejected(tmp_path):
    write_trec(tmp_path, train=5451)
    with pytest.raises(ValueError, match=r"trec_coarse, examples: 5451 rows, but 5452"):
        load("helmet_trec_coarse", tmp_path)
    assert len(load("helmet_trec_coarse", tmp_path, 2).items) == 2
    (tmp_path / "TREC_10.label").write_text("C1:x What\xf0is ?\n", "latin-1")
    assert load("helmet_trec_coarse", tmp_path, 1).items[0].question == "What is ?"
    (tmp_path / "TREC_10.label").write_text("C9:x What ?\n")
    with pytest.raises(ValueError, match=r"trec_coarse: no example has the label 'C9'"):
        load("helmet_trec_coarse", tmp_path, 1)
    (tmp_path / "TREC_10.label").write_text("What ?\n")
    with pytest.raises(ValueError, match=r"TREC_10.label, row 0: must be COARSE:fine and"):
        load("helmet_trec_coarse", tmp_path, 1)
    (tmp_path / "data_oos_plus.json").write_text('{"train": [["a"]]}')
    with pytest.raises(ValueError, match=r"train = .*; it must be a list of \[text, label\]"):
        load("helmet_clinic150", tmp_path, 1)
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("sentence,label\na,b\n")
    with pytest.raises(ValueError, match=r"train.csv, row 0: no field 'text'"):
        load("helmet_banking77", tmp_path, 1)


@pytest.mark.parametrize(
    ("task", "columns", "names", "splits"),
    [
        ("trec_coarse", {"coarse_label": 1, "fine_label": 0}, ["ABBR", "DESC"], ("train", "test")),
        (
            "trec_fine",
            {"coarse_label": 0, "fine_label": 1},
            ["ABBR:a", "ABBR:b"],
            ("train", "test"),
        ),
        ("banking77", {"label": 1}, ["age_limit", "cash"], ("train", "test")),
        ("clinic150", {"intent": 1}, ["oos", "time"], ("train", "validation")),
    ],
)
def test_labels_of_the_hub_have_their_names(tmp_path, task, columns, names, splits):
    """The hub stores numbers of classes; the metadata of the file has their names."""
    (label,) = (column for column, value in columns.items() if value)
    features = {column: {"names": names, "_type": "ClassLabel"} for column in columns}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    (tmp_path / "data").mkdir()
    for split in splits:
        rows = {column: [0, 0] for column in columns} | {label: [0, 1], "text": [" a\n", "b"]}
        table = pa.table(rows).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    pairs = [("a", names[0]), ("b", names[1])]
    assert helmet_labels.read_pairs(task, tmp_path, complete=False) == (pairs, pairs)


def test_nlu_of_the_hub_has_a_label_of_scenario_and_intent(tmp_path):
    rows = [{"text": f"at {i}", "scenario": "alarm", "label": f"alarm_{i % 2}"} for i in range(20)]
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", rows)
    train, test = helmet_labels.read_pairs("nlu", tmp_path, complete=False)
    assert len(train) == 18 and len(test) == 2
    assert {label for _, label in train} == {"alarm_0", "alarm_1"}


def test_banking77_is_found_in_its_repository_and_its_texts_are_stripped(tmp_path):
    (tmp_path / "banking_data").mkdir()
    for name in ("train", "test"):
        text = 'text,category\n"\n\nWhere is my card?\n",arrival\n'
        (tmp_path / "banking_data" / f"{name}.csv").write_text(text)
    train, test = helmet_labels.read_pairs("banking77", tmp_path, complete=False)
    assert train == test == [("Where is my card?", "arrival")]


def test_csv_files_may_have_a_byte_order_mark_and_huge_fields_raise(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text('text,category\n "a, b",c\n', "utf-8-sig")
    train, test = helmet_labels.read_pairs("banking77", tmp_path, complete=False)
    assert train == test == [("a, b", "c")]
    (tmp_path / "test.csv").write_text('text,category\na,c\n"' + "x" * 200_000)
    with pytest.raises(ValueError, match=r"test.csv, row 1: field larger than field limit"):
        load("helmet_banking77", tmp_path, 1)


# ---------------------------------------------------------------------------------------- Summaries


def test_infbench_prompts_and_scores(tmp_path):
    rows = [
        {"id": i, "context": f"Book {i}.", "input": "", "answer": [f"Plot {i}.", "Or so."]}
        for i in range(103)
    ]
    write_lines(tmp_path / "longbook_sum_eng.jsonl", rows)
    benchmark = load("helmet_infbench_sum", tmp_path)
    assert len(benchmark.items) == 100 and not benchmark.judged
    item = benchmark.items[7]
    assert f"Book {item.id}." in item.prompt and item.references == (f"Plot {item.id}.", "Or so.")
    assert item.prompt.count("Summary: Plot") == 2
    assert not any(f"Summary: {item.references[0]}" in item.prompt for item in benchmark.items)
    assert benchmark.score(f"Summary: plot {item.id}", item) == 1.0
    assert benchmark.score("Summary: or so", item) == 1.0
    assert load("helmet_infbench_sum", tmp_path, 4).items == benchmark.items[:4]
    assert load("helmet_infbench_sum", tmp_path, 101).items == benchmark.items
    assert [int(item.id) for item in benchmark.items] != list(range(100))  # sampled from all
    write_lines(tmp_path / "longbook_sum_eng.jsonl", rows[1:])
    with pytest.raises(ValueError, match=r"102 rows, but 103 are published"):
        load("helmet_infbench_sum", tmp_path)
    write_lines(tmp_path / "longbook_sum_eng.jsonl", rows[:3])
    with pytest.raises(ValueError, match=r"limit = 5, but there are only 3 rows"):
        load("helmet_infbench_sum", tmp_path, 5)


def write_lexsum(folder: pathlib.Path, cases: int = 454) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def case(i: int, part: str) -> dict:
        short = f"{part} short {i}." if i < 312 else None
        documents = [f"d{i % 5}", "d0"]
        return {"case_id": f"{part}-{i}", "case_documents": documents, "summary/short": short}

    write_lines(folder / "dev.json", [case(i, "dev") for i in range(cases)])
    write_lines(folder / "train.json", [case(i, "train") for i in range(320)])
    sources = {f"d{i}": {"doc_text": f"Document {i}.", "doc_title": "x"} for i in range(5)}
    text = json.dumps(sources)[:-1] + ', "unused": {"doc_text": NaN}}'  # as in the real file
    (folder / "sources.json").write_text(text)


def test_multi_lexsum_prompts_and_references(tmp_path):
    folder = tmp_path / "releases" / "v20230518"
    write_lexsum(folder)
    benchmark = load("helmet_multi_lexsum", tmp_path)
    item = benchmark.items[3]
    number = int(item.id.removeprefix("dev-"))
    assert len(benchmark.items) == 100
    assert f"Document {number % 5}.\n\nDocument 0." in item.prompt
    assert item.prompt.count("Summary: train short") == 2
    assert item.references == (f"dev short {number}.",)
    assert load("helmet_multi_lexsum", folder, 2).items == benchmark.items[:2]
    (folder / "sources.json").write_text('{"d0": {"doc_text": "x"}}')
    with pytest.raises(ValueError, match=r"sources.json: no field 'd\d' \(the document of"):
        load("helmet_multi_lexsum", tmp_path)
    write_lexsum(folder, cases=300)
    with pytest.raises(ValueError, match=r"summary/short: 300 rows, but 312 are published"):
        load("helmet_multi_lexsum", tmp_path)


def test_summary_follows_the_word_summary():
    item = BenchmarkItem("0", "", "", ("police killed the gunman",))
    assert retrieval.score_summary("Well.\nSummary: Police killed\nthe gunman", item) == 1.0
    assert retrieval.score_summary("police killed the gunman", item) == 1.0
    twice = "Summary: a word or two\nSummary: police killed the gunman"
    assert retrieval.score_summary(twice, item) == 1.0
    assert retrieval.score_summary("<think>police killed the gunman", item) == 0.0


# ----------------------------------------------------------------------------------------- Registry


def test_columns_refer_to_existing_benchmarks():
    assert {name for names in COLUMNS.values() for name in names} <= set(LOADERS)
    assert len(LOADERS) == 6 + 5 + 6 + 3 + 5 * 9 + 2 + 1


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_raises_for_an_empty_folder(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"must have .*docs/evaluation.md"):
        load(name, tmp_path)


@pytest.mark.slow
@given(st.text(max_size=200))
def test_score_of_any_text_is_between_0_and_1(text):
    item = BenchmarkItem("0", "", "", ("KEYx",), {"prefix": "KEY"})
    for score in (
        retrieval.score_mrcr,
        retrieval.score_rag,
        retrieval.score_icl,
        retrieval.score_summary,
    ):
        assert 0.0 <= score(text, item) <= 1.0
