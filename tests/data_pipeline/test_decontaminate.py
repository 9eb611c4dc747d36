import json
import random
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.data import edited_copy
from data_pipeline.decontaminate import (
    BALANCES,
    BenchmarkConfig,
    BenchmarkText,
    DecontaminateConfig,
    Index,
    make_decontaminate,
    read_benchmarks,
    store_items,
)
from data_pipeline.dedup import DedupConfig
from data_pipeline.records import SCHEMAS, digest, make_document, order
from data_pipeline.stages import Stages
from spell_jax.configs.data import paper


def some_text(seed: int, words: int = 100) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


def read(path, value, documents=(), questions=(), name="b"):
    """Write a benchmark of one file; return the set of (kind, text) that is read from it."""
    content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    path.write_text(content, encoding="utf-8")
    config = BenchmarkConfig(str(path), tuple(documents), tuple(questions))
    items = read_benchmarks({name: config})
    assert all(item.benchmark == name and item.id == digest(item.text) for item in items)
    return {(item.kind, item.text) for item in items}


def index(*texts: tuple[str, str], dedup=None, threshold=0.8) -> Index:
    items = [BenchmarkText("b", kind, digest(text), text) for kind, text in texts]
    return Index(sorted(items), dedup or DedupConfig(), DecontaminateConfig(threshold))


# ------------------------------------------------------------------------------------------ Reading


def test_hotpotqa_layout_is_read(tmp_path):
    row = {
        "question": "Who was it?",
        "answer": "him",
        "supporting_facts": [["A title", 0]],
        "context": [["A title", ["One sentence.", " And another."]], ["Other", ["A third."]]],
    }
    lines = json.dumps(row) + "\n\n" + json.dumps({**row, "question": "Who else?"}) + "\n"
    assert read(tmp_path / "h.jsonl", lines, ["context"], ["question"]) == {
        ("question", "Who was it?"),
        ("question", "Who else?"),
        ("document", "One sentence.\n\n And another."),
        ("document", "A third."),
    }


def test_musique_layout_is_read(tmp_path):
    row = {
        "paragraphs": [
            {"idx": 0, "title": "T", "paragraph_text": "Text one."},
            {"idx": 1, "title": "U", "paragraph_text": " Text two.\n"},
        ],
        "question": "What?",
        "question_decomposition": [{"question": "Part of it?", "answer": "x"}],
    }
    assert read(tmp_path / "m.jsonl", row, ["paragraph_text"], ["question"]) == {
        ("document", "Text one."),
        ("document", "Text two."),
        ("question", "What?"),
        ("question", "Part of it?"),
    }
    # The name of the list works too: objects inside a field are read recursively.
    texts = read(tmp_path / "m.jsonl", row, ["paragraphs"])
    assert ("document", "Text one.") in texts and ("document", "T") in texts


def test_squad_layout_is_read(tmp_path):
    questions = [{"question": f"Q{i}?", "answers": [{"text": "a"}]} for i in range(2)]
    paragraphs = [{"context": "中文上下文。", "qas": questions}, {"context": "Two", "qas": []}]
    value = {"version": 1, "data": [{"title": "t", "paragraphs": paragraphs}]}
    assert read(tmp_path / "s.json", value, ["context"], ["question"]) == {
        ("document", "中文上下文。"),
        ("document", "Two"),
        ("question", "Q0?"),
        ("question", "Q1?"),
    }


def test_paper_config_reads_documents_and_questions_of_all_benchmarks(tmp_path):
    """In the layouts of the evaluation's loaders; Frames has its documents in "wiki_items"."""
    page = {"title": "Oslo", "link": "https://x", "text": "A town."}
    rows = {
        "longbench_v2": {"context": "A long text.", "question": "Which one?", "choice_A": "this"},
        "longbench": {"context": "Passage 1", "input": "Who wrote it?", "answers": ["Ann Lee"]},
        "frames": {"Prompt": "Which town?", "Answer": "Oslo", "wiki_items": [page]},
        "docmath": {
            "paragraphs": ["Sales 3.", "| a |"],
            "question": "How much?",
            "ground_truth": 7,
        },
    }
    benchmarks = paper.get_config().decontaminate.benchmarks
    configs = {}
    for name, benchmark in benchmarks.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(rows.pop(name)))
        configs[name] = BenchmarkConfig(
            str(path), tuple(benchmark.document_fields), tuple(benchmark.question_fields)
        )
    assert not rows
    texts = {(item.benchmark, item.kind): item.text for item in read_benchmarks(configs)}
    assert texts == {
        ("longbench_v2", "document"): "A long text.",
        ("longbench_v2", "question"): "Which one?",
        ("longbench", "document"): "Passage 1",
        ("longbench", "question"): "Who wrote it?",
        ("frames", "document"): "A town.",
        ("frames", "question"): "Which town?",
        ("docmath", "document"): "Sales 3.\n\n| a |",
        ("docmath", "question"): "How much?",
    }


def test_parquet_has_the_texts_of_json(tmp_path):
    row = {"paragraphs": ["Sales 3.", "| a |"], "question": "How much?", "ground_truth": 7.5}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "b.parquet")
    config = BenchmarkConfig(str(tmp_path / "b.parquet"), ("paragraphs",), ("question",))
    texts = {(item.kind, item.text) for item in read_benchmarks({"docmath": config})}
    assert texts == {("document", "Sales 3.\n\n| a |"), ("question", "How much?")}


def test_long_contexts_are_also_split_at_blank_lines(tmp_path):
    long, many_words, short = "x" * 100, "y " * 60 + "y", "z" * 99
    row = {"input": "Q?", "context": f"{long}\n \n{short}\r\n\r\n{many_words}\nend", "length": 3}
    context = row["context"]
    assert read(tmp_path / "l.jsonl", row, ["context"], ["input"]) == {
        ("question", "Q?"),
        ("document", context),
        ("document", long),
        ("document", many_words + "\nend"),
    }
    # Lists of paragraphs are split too, but not lists of questions.
    row = {"paragraphs": [long, short], "question": [long, short]}
    assert read(tmp_path / "p.json", row, ["paragraphs"], ["question"]) == {
        ("document", f"{long}\n\n{short}"),
        ("document", long),
        ("question", f"{long}\n\n{short}"),
    }


def test_values_without_text_are_ignored(tmp_path):
    rows = [{"text": value} for value in (None, 3, True, [], {}, "", " \n", [1, None], "words")]
    assert read(tmp_path / "o.json", rows, ["text"]) == {("document", "words")}


def test_benchmarks_are_read_from_folders_and_patterns(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "a.txt").write_text("\ufeffA text\n", encoding="utf-8")
    (tmp_path / "deep" / "er" / "b.JSONL").write_text('{"c": "Bee 2"}', encoding="utf-8")
    (tmp_path / "deep" / "README.md").write_text("not read", encoding="utf-8")
    (tmp_path / "deep" / "er" / "c.json").write_text('[{"c": "Bee"}, {"q": "Q"}]', encoding="utf-8")
    expected = [
        ("document", "A text"),
        ("document", "Bee"),
        ("document", "Bee 2"),
        ("question", "Q"),
    ]
    folder = BenchmarkConfig(str(tmp_path / "deep"), ("c",), ("q",))
    items = read_benchmarks({"one": folder})
    assert sorted((item.kind, item.text) for item in items) == expected
    pattern = BenchmarkConfig(f"file://{tmp_path}/deep/*/*.json", ("c",), ("q",))
    all_items = read_benchmarks({"two": pattern, "one": folder})
    assert len(all_items) == 6 and all_items == sorted(all_items)
    assert all_items == read_benchmarks({"one": folder, "two": pattern})
    assert read_benchmarks({}) == []


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (None, {}, r"benchmarks.b.path = '.*none': must have .txt, .parquet, .jsonl, .jsonl.gz,"),
        ('{"c": "x"', {"document_fields": ("c",)}, r"benchmarks.b.path = .*f.json: line 1: Exp"),
        ('{"c": 1}\nx', {"document_fields": ("c",)}, r"benchmarks.b.path = .*f.json: line 2: Exp"),
        (b"\xff\xfe", {"document_fields": ("c",)}, r"benchmarks.b.path = .*f.json: 'utf-8' codec"),
        ("[" * 100_000, {"document_fields": ("c",)}, r"benchmarks.b.path = .*f.json: .*recursion"),
        ('{"c": "x"}', {}, r"benchmarks.b.path = '.*': must have .txt files, or fields"),
        (
            '{"c": "x"}',
            {"document_fields": ("c",), "question_fields": ("d",)},
            r"benchmarks.b.question_fields = \('d',\): must name fields with text in",
        ),
    ],
)
def test_invalid_benchmarks_are_rejected(tmp_path, content, config, message):
    path = tmp_path / ("none" if content is None else "f.json")
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^decontaminate\." + message):
        read_benchmarks({"b": BenchmarkConfig(str(path), **config)})


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match=r"benchmark.path = '': must be a file"):
        BenchmarkConfig("")
    with pytest.raises(ValueError, match=r"must not have what document_fields have, \['a'\]"):
        BenchmarkConfig("x", ("a", "b"), ("a",))
    for value in (0.0, 1.1):
        with pytest.raises(ValueError, match=rf"decontaminate.question_threshold = {value}: must"):
            DecontaminateConfig(value)


# ---------------------------------------------------------------------------------------- Searching


def test_near_duplicates_are_found_and_other_texts_are_not():
    texts = [some_text(i) for i in range(60)]
    text_index = index(*(("document", text) for text in texts))
    for i, text in enumerate(texts):
        assert text_index.find(text).text == text
        assert text_index.find(edited_copy(text, 0.9, 0.95, i)).text == text
        assert text_index.find(edited_copy(text, 0.4, 0.7, i)) is None
    assert text_index.find(some_text(100)) is None
    assert text_index.find("") is None
    assert index().find(texts[0]) is None


def test_questions_inside_texts_are_found():
    question = "Which of the two towns had the older stone bridge over the river?"  # 13 tokens
    document = some_text(1, 300)
    words = document.split()
    question_index = index(("question", question))

    def inside(text: str) -> bool:
        return question_index.find(" ".join([*words[:90], text, *words[90:]])) is not None

    assert inside(question) and inside(question.upper()) and inside("So: " + question)
    assert not question_index.find(document)
    # 9 shingles of 5 tokens: the first word is in one shingle, the second in two.
    assert inside(question.replace("Which", "What"))
    assert not inside(question.replace("of", "among"))
    assert index(("question", question), threshold=0.75).find(question.replace("of", "among"))
    # Documents of a benchmark are not searched for inside other texts.
    assert index(("document", question)).find(f"{document} {question}") is None


def test_short_questions_match_only_whole_texts():
    seven, eight = "one two three four five six seven", "one two three four five six seven eight"
    around = some_text(1)
    for text, held in ((seven, False), (eight, True)):
        question_index = index(("question", text))
        assert question_index.find(text) is not None
        assert (question_index.find(f"{around} {text} {around}") is not None) == held
    wide = DedupConfig(shingle_words=9)
    question_index = index(("question", eight), dedup=wide)
    assert (
        question_index.find(eight) is not None and question_index.find(f"{around} {eight}") is None
    )
    assert index(("question", eight + " nine"), dedup=wide).find(f"{around} {eight} nine")


def test_chinese_questions_are_found():
    question_index = index(("question", "这座古老的石桥建于哪一年？"))
    assert question_index.find("有人问：这座古老的石桥建于哪一年？没有人知道。" * 3)
    assert question_index.find("这座石桥很古老，没有人知道它建于什么时候。") is None


def test_items_with_shared_shingles_are_told_apart():
    question = "What is the name of the river that flows through"
    texts = [f"{question} town{i} in the country{i} of old?" for i in range(50)]
    question_index = index(*(("question", text) for text in texts))
    assert all(question_index.find(f"They asked: {text} No answer.").text == text for text in texts)
    assert question_index.find(f"{question} it") is None


# -------------------------------------------------------------------------------------------- Stage


@pytest.mark.slow
def test_stage_removes_and_counts_contaminated_documents(tmp_path):
    question = "Which of the two towns had the older stone bridge over the river?"
    items = [
        BenchmarkText(name, kind, digest(text), text)
        for name, kind, text in (
            ("squad", "document", some_text(1)),
            ("squad", "question", question),
            ("hotpot", "question", question),
            ("hotpot", "document", some_text(2)),
        )
    ]
    documents = [
        make_document(edited_copy(some_text(1), 0.88, 0.95, 1), "s", "near squad"),
        make_document(some_text(2), "t", "is hotpot"),
        make_document(f"{some_text(3)} {question}", "s", "asks"),
        *(make_document(some_text(10 + i), "s", f"clean {i}") for i in range(20)),
    ]
    documents[2]["part"] = 3
    results = []
    for number, options in enumerate(((), ("--direct_num_workers=2",))):
        folder = tmp_path / str(number)
        (folder / "read").mkdir(parents=True)
        table = pa.Table.from_pylist(documents[:: 1 - 2 * number], schema=SCHEMAS["documents"])
        pq.write_table(table, folder / "read" / "documents-0.parquet")
        stages = Stages(str(folder), options)
        settings = {"dedup": DedupConfig(), "config": DecontaminateConfig()}
        store_items(stages, items)
        make = partial(make_decontaminate, stages=stages, **settings)
        stage = stages.run_stage(
            "decontaminate", {}, make, (), BALANCES, documents="read/documents"
        )
        kept_documents = sorted(stages.read_records("decontaminate/documents"), key=order)
        removed = sorted(stages.read_records("decontaminate/removed"), key=lambda r: r["place"])
        results.append((kept_documents, removed, stage.counts))
    assert results[0] == results[1]
    kept_documents, removed, counts = results[0]
    assert kept_documents == sorted(documents[3:], key=order)
    assert [tuple(r.values()) for r in removed] == [
        ("contaminated", "s", "asks", 3, "hotpot:question"),
        ("contaminated", "t", "is hotpot", 0, "hotpot:document"),
        ("contaminated", "s", "near squad", 0, "squad:document"),
    ]
    assert {(c["what"], c["source"]): c["number"] for c in counts} == {
        ("documents read", "s"): 22,
        ("documents read", "t"): 1,
        ("documents kept", "s"): 20,
        ("documents removed: contaminated by hotpot", "s"): 1,
        ("documents removed: contaminated by hotpot", "t"): 1,
        ("documents removed: contaminated by squad", "s"): 1,
    }
