"""Filters documents by score, length, language and a user-defined predicate.

The first check that fails is the reason. Rejected documents, maybe a billion, are only counted.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import apache_beam as beam

from data_pipeline.records import Document, event, removed, rounded, sized
from spell_jax.runtime.config import check_least

# The beginning of a text tells its language; 2,000 characters are classified in 0.2 ms.
LANGUAGE_CHARACTERS = 2_000

Predicate = Callable[[Document], Any]  # the truth value of its result is used


@dataclass(frozen=True)
class FilterConfig:
    """Conditions on the documents that are kept.

    Attributes:
      min_quality: Least score; ignored for documents without a score.
      min_characters: Least length of the text in characters, inclusive.
      max_characters: Largest length of the text in characters, inclusive.
      languages: ISO 639-1 codes that py3langid knows; () allows any language.
      predicate: "package.module:function" from a Document to true if it is kept; "" for none.
        Workers import it, so it must be installed there.
    """

    min_quality: float = 1.0
    min_characters: int = 100
    max_characters: int = 32_768
    languages: tuple[str, ...] = ("en",)
    predicate: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.min_quality):
            raise ValueError(f"filter.min_quality = {self.min_quality}: must be a finite number")
        check_least(self, "filter.", min_characters=1)
        if self.max_characters < self.min_characters:
            raise ValueError(
                f"filter.max_characters = {self.max_characters}: must be at least "
                f"min_characters = {self.min_characters}"
            )
        check_languages("filter.languages", self.languages)
        if self.predicate:
            _predicate(self.predicate)


def check_languages(field: str, languages: tuple[str, ...]) -> None:
    """Raise ValueError if the classifier does not know an ISO 639-1 code in a config field."""
    if not languages:
        return
    known_languages = sorted(
        code for code in _identifier().labels if re.fullmatch("[a-z]{2}", code)
    )
    for code in languages:
        if code not in known_languages:
            raise ValueError(
                f"{field} = {languages}: {code!r} must be one of {', '.join(known_languages)}"
            )


def rejection_reason(document: Document, config: FilterConfig) -> tuple[str, str] | None:
    """Return None if the document is kept, else (reason, the predicate's error or "")."""
    quality, characters = document["quality"], len(document["text"])
    # Cheapest check first. The classifier and the user's predicate come last.
    if quality is not None and not math.isfinite(quality):
        return "bad score", ""
    if quality is not None and quality < config.min_quality:
        return "low quality", ""
    if characters < config.min_characters:
        return "too short", ""
    if characters > config.max_characters:
        return "too long", ""
    if config.languages and language(document["text"]) not in config.languages:
        return "another language", ""
    if not config.predicate:
        return None
    predicate = _predicate(config.predicate)
    try:
        # A copy, so that a predicate cannot change the document.
        stays = bool(predicate(Document(**document)))
    except Exception as error:
        return "predicate failed", describe_error(error)
    return None if stays else ("predicate", "")


def language(text: str) -> str:
    """Return the ISO 639-1 code of the text's language, or py3langid's own code if none exists."""
    return _identifier().classify(text[:LANGUAGE_CHARACTERS])[0]


def describe_error(error: Exception) -> str:
    """Return type and message of an error as valid UTF-8, at most 500 characters."""
    return valid_utf8(f"{type(error).__name__}: {error}"[:500])


def valid_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def filter_documents(
    documents: beam.PCollection, configs: Mapping[str, FilterConfig]
) -> dict[str, beam.PCollection]:
    """Filter documents by their source's conditions; list documents on which the predicate raised.

    Events by source: "documents kept", "documents removed: REASON", "characters read = N" and
    "characters kept = N".
    """
    filtered: Any = documents | "filter documents" >> beam.FlatMap(
        _filter, dict(configs)
    ).with_outputs("removed", "counts", main="documents")
    return {name: filtered[name] for name in ("documents", "removed", "counts")}


def _filter(document: Any, configs: Mapping[str, FilterConfig]) -> Iterator[Any]:
    source, characters = document["source"], rounded(len(document["text"]))
    yield event(sized("characters read", characters), source)
    rejection = rejection_reason(document, configs[source])
    if rejection is None:
        yield event("documents kept", source)
        yield event(sized("characters kept", characters), source)
        yield document
        return
    reason, because = rejection
    yield event(f"documents removed: {reason}", source)
    # An error of the user's code is worth a name; a billion short documents are not.
    if reason == "predicate failed":
        yield removed(document, reason, because)


@cache
def _identifier() -> Any:
    """Load py3langid's model, once per process because it takes 0.6 s."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


@cache
def _predicate(name: str) -> Predicate:
    where = f"filter.predicate = {name!r}"
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(f"{where}: must be 'package.module:function'")
    try:
        predicate = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(f"{where}: cannot be imported, {type(error).__name__}: {error}") from error
    if not callable(predicate):
        raise ValueError(f"{where}: must be a function, is {type(predicate).__name__}")
    return predicate
