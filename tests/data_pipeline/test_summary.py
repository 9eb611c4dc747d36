"""Tests of the console's summary: names, units, numbers of all stages."""

from __future__ import annotations

from data_pipeline.records import Count, Removed
from data_pipeline.summary import kept_documents, skipped_files, summary_lines


def counts(**stages: dict[str, int]) -> dict[str, list[Count]]:
    return {
        stage: [Count(what=what, source="mine", number=number) for what, number in events.items()]
        for stage, events in stages.items()
    }


def removed(reason: str, place: str) -> Removed:
    return Removed(reason=reason, source="mine", place=place, part=0, because="")


COUNTS = counts(
    read={
        "files read": 1200,
        "files skipped: damaged": 1,
        "files skipped: of another type": 5,
        "rows skipped: bad row": 101,
        "rows skipped: empty": 1,
        "documents read": 1300,
        "documents kept": 1290,
        "documents removed: too short": 10,
        "characters read = 100": 1300,
    },
    dedup={
        "documents read": 1290,
        "documents kept": 1282,
        "documents removed: near duplicate": 8,
    },
    cut={"documents read": 1282, "pieces made": 3000, "documents removed: too few tokens": 2},
    tasks={"documents": 2990, "documents removed: left over": 10},
)
SKIPPED = [
    *(removed("of another type", f"{letter}.bin") for letter in "ebdca"),
    removed("damaged", "scan.pdf"),
    *(removed("bad row", f"a.jsonl#{number:09d}") for number in range(100)),
    removed("empty", "b.jsonl#000000007"),
]


def test_every_reason_has_its_number_and_the_first_names():
    lines = summary_lines(COUNTS, SKIPPED, {"general_qa": 300, "multiple_choice": 299})
    assert [line.strip() for line in lines] == [
        "files      1,200 read, 6 skipped",
        "1 damaged: mine:scan.pdf",
        "5 of another type: mine:a.bin, mine:b.bin, mine:c.bin and 2 more",
        "rows       102 skipped",
        "101 bad row: mine:a.jsonl#000000000, mine:a.jsonl#000000001, mine:a.jsonl#000000002 and "
        "98 more",
        "1 empty: mine:b.jsonl#000000007",
        "documents  1,300 read, 1,282 kept",
        "8 near duplicate",
        "10 too short",
        "pieces     3,000 made, 2,990 in clusters",
        "10 left over",
        "2 too few tokens",
        "clusters   300 general_qa, 299 multiple_choice",
    ]
    assert summary_lines(COUNTS, SKIPPED[::-1], {}) == [*lines[:-1], "clusters   "]


def test_documents_kept_are_those_of_the_last_stage_that_removes_some():
    assert (kept_documents(COUNTS), skipped_files(COUNTS)) == (1282, 6)
    assert kept_documents(COUNTS | counts(decontaminate={"documents kept": 1281})) == 1281
    assert kept_documents({}) == 0


def test_a_build_without_skipped_files_has_no_lines_for_them():
    read = counts(read={"files read": 2, "documents read": 2, "documents kept": 2})
    assert summary_lines(read, [], {"general_qa": 1}) == [
        "files      2 read, 0 skipped",
        "documents  2 read, 2 kept",
        "pieces     0 made, 0 in clusters",
        "clusters   1 general_qa",
    ]
