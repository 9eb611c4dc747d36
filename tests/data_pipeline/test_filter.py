import sys
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.filter import FilterConfig, filter_documents, rejection_reason
from data_pipeline.records import make_document
from data_pipeline.stages import Stages
from spell_jax.runtime import config as settings

ENGLISH = "The ship left the harbour at dawn, and nobody on the quay knew where it was bound. " * 3
FRENCH = "Le navire quitta le port à l'aube, et personne sur le quai ne savait où il allait. " * 3
ANY = FilterConfig(min_characters=1, languages=())

PREDICATES = """
NUMBER = 3

def has_ship(document):
    found = "ship" in document["text"]
    document["text"] = "changed"
    return found

def breaks(document):
    raise ValueError("place \\ud800 " + document["place"])

def has_no_truth(document):
    import numpy
    return numpy.zeros(2)
"""


@pytest.fixture
def predicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with predicates; return the module's name."""
    (tmp_path / "tried_predicates.py").write_text(PREDICATES)
    (tmp_path / "tried_broken.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("tried_predicates", None)
    return "tried_predicates"


def reason(text: str, config: FilterConfig, quality: float | None = None) -> str | None:
    rejection = rejection_reason(make_document(text, "s", "p", quality=quality), config)
    return rejection[0] if rejection else None


def test_min_quality_applies_only_to_scored_documents():
    config = FilterConfig(min_quality=0.5)
    assert reason(ENGLISH, config) is None
    assert reason(ENGLISH, config, 0.5) is None
    assert reason(ENGLISH, config, 0.49) == "low quality"


@pytest.mark.parametrize("quality", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_quality_is_a_bad_score(quality: float):
    assert reason(ENGLISH, FilterConfig(min_quality=-9.0), quality) == "bad score"


def test_length_limits_are_inclusive():
    config = FilterConfig(min_characters=3, max_characters=5, languages=())
    lengths = {n: reason("x" * n, config) for n in range(2, 7)}
    assert lengths == {2: "too short", 3: None, 4: None, 5: None, 6: "too long"}


def test_documents_in_other_languages_are_rejected():
    assert reason(FRENCH, FilterConfig()) == "another language"
    assert reason(FRENCH, FilterConfig(languages=("en", "fr"))) is None
    assert reason(FRENCH, FilterConfig(languages=())) is None
    # Only the beginning is examined.
    assert reason(ENGLISH * 9 + FRENCH * 50, FilterConfig()) is None


def test_first_matching_reason_is_reported(predicates: str):
    config = FilterConfig(min_characters=10, max_characters=400, predicate=f"{predicates}:has_ship")
    assert reason("court", config, 0.1) == "low quality"
    assert reason("court", config) == "too short"
    assert reason(FRENCH * 9, config) == "too long"
    assert reason(FRENCH, config) == "another language"
    assert reason(ENGLISH.replace("ship", "boat"), config) == "predicate"
    assert reason(ENGLISH, config) is None


@pytest.mark.slow
def test_predicate_errors_are_counted_and_listed(predicates: str, tmp_path: Path):
    documents = [make_document(ENGLISH, "s", f"p{i}", part=i) for i in range(2)]
    documents += [make_document("short", "s", "q"), make_document("long enough", "other", "r")]
    configs = {"s": FilterConfig(predicate=f"{predicates}:breaks"), "other": ANY}
    stages = Stages(str(tmp_path / "out"))
    stage = stages.run_stage("filter", {}, partial(_make, documents=documents, configs=configs))
    assert {(c["what"], c["source"]): c["number"] for c in stage.plain_counts} == {
        ("documents removed: predicate failed", "s"): 2,
        ("documents removed: too short", "s"): 1,
        ("documents kept", "other"): 1,
    }
    removed = sorted(stages.read_records("filter/removed"), key=lambda r: r["place"])
    assert [(r["reason"], r["source"], r["place"], r["part"]) for r in removed] == [
        ("predicate failed", "s", "p0", 0),
        ("predicate failed", "s", "p1", 1),
    ]
    assert removed[0]["because"] == "ValueError: place ? p0"
    assert list(stages.read_records("filter/documents")) == [documents[-1]]


def _make(pipeline, documents, configs):
    import apache_beam as beam

    return filter_documents(pipeline | "create" >> beam.Create(documents), configs)


def test_result_without_truth_value_is_a_predicate_failure(predicates: str):
    config = FilterConfig(predicate=f"{predicates}:has_no_truth")
    assert reason(ENGLISH, config) == "predicate failed"


def test_predicate_cannot_change_the_document(predicates: str):
    document = make_document(ENGLISH, "s", "p")
    assert rejection_reason(document, FilterConfig(predicate=f"{predicates}:has_ship")) is None
    assert document["text"] == ENGLISH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_quality": float("nan")}, "filter.min_quality = nan: must be a finite"),
        ({"min_characters": 0}, "filter.min_characters = 0: must be at least 1"),
        ({"max_characters": 99}, "filter.max_characters = 99: must be at least min_char"),
        ({"languages": ("english",)}, r"filter.languages = .*'english' must be one of af, .*en"),
        ({"predicate": "module"}, "filter.predicate = 'module': must be 'package.module:func"),
        ({"predicate": "no.such:f"}, "'no.such:f': cannot be imported, ModuleNotFoundError"),
        ({"predicate": "tried_broken:f"}, "cannot be imported, RuntimeError: at import"),
        ({"predicate": "tried_predicates:f"}, "cannot be imported, AttributeError"),
        ({"predicate": "tried_predicates:NUMBER"}, "must be a function, is int"),
    ],
)
def test_error_names_invalid_config_field(predicates: str, fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        FilterConfig(**fields)


def test_filter_config_is_built_from_a_section():
    section = {"min_quality": 2, "languages": ["en", "zh"]}
    config = settings.build(FilterConfig, section, "filter")
    assert config == FilterConfig(min_quality=2.0, languages=("en", "zh"))
