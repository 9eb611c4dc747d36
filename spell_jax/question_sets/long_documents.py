"""Selects training documents by length, with a quota for each domain (document reconstruction).

    python -m spell_jax.question_sets.long_documents --domain=books:8000 --domain=arxiv:3000
        --domain=code:3000 --tokenizer=FOLDER --out=FILE.jsonl [--max_tokens=65000
        --selection=longest --seed=0 --texts]

1. A domain is a folder of .txt and .md files, or a .jsonl of {"text"}; the number after the colon
   is its quota. Files and lines without a text are logged or counted, and skipped.
2. The documents of a domain are taken by --selection: the longest first (by characters), the
   shortest first, or in random order (the paper's section 5.4), until the quota is reached.
   Documents of more than --max_tokens are dropped and counted, never cut.
3. FILE.jsonl is a `data.source` with one document in each cluster, or with --texts has lines
   {"text"}, which spell_jax.sft takes. The last line printed, also in FILE.summary.json, has all
   counts.

The paper takes 8,000 books and 3,000 documents each of arXiv and code. Leave room for the prompt's
own words and labels: the default limit fits prompts of 65,536 tokens. The texts of one domain must
fit into memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import pathlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from spell_jax.data.clusters import SELECTIONS, ClusterReport, folder_texts, is_text
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import find_folder
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.files.jsonl import read_records, write_json, write_records

log = logging.getLogger("spell_jax.question_sets.long_documents")  # __name__ may be "__main__"


@dataclasses.dataclass(frozen=True)
class SelectionConfig:
    """Documents that are taken.

    Attributes:
      max_tokens: Largest number of tokens of a document; longer ones are dropped.
      selection: Which documents come first, one of SELECTIONS.
      seed: Seed of the random selection.
    """

    max_tokens: int = 65_000
    selection: str = "longest"
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", max_tokens=1, seed=0)
        check_choice(self, "", selection=SELECTIONS)


@dataclasses.dataclass(frozen=True)
class Domain:
    """A source of documents and the most that are taken from it."""

    path: pathlib.Path
    quota: int

    @property
    def name(self) -> str:
        return self.path.stem


def parse_domains(values: Sequence[str]) -> list[Domain]:
    """Parse PATH:QUOTA values; ValueError for a bad one, FileNotFoundError without the path."""
    domains = []
    for value in values:
        path, _, quota = value.rpartition(":")
        if not path or not quota.isdecimal() or int(quota) < 1:
            raise ValueError(f"domain = {value!r}: must be PATH:QUOTA, with a quota of at least 1")
        domains.append(Domain(pathlib.Path(path), int(quota)))
        if not domains[-1].path.exists():
            raise FileNotFoundError(f"domain = {value!r}: no such file or folder")
    names = [domain.name for domain in domains]
    if len({*names}) != len(names):
        raise ValueError(f"domain = {names}: must have different names")
    return domains


def read_texts(path: pathlib.Path) -> tuple[list[str], int]:
    """Return (texts of a folder or a .jsonl, number of files or lines skipped)."""
    if path.is_dir():
        report = ClusterReport()
        return list(folder_texts(path, report)), report.skipped.total()
    return read_records(path, _parse_text)


def _parse_text(record: Any) -> str:
    if not is_text(record["text"]):
        raise ValueError("text must be a non-empty string")
    return record["text"]


def take_texts(
    texts: list[str],
    quota: int,
    config: SelectionConfig,
    count_tokens: Callable[[str], int],
    counts: Counter[str],
) -> Iterator[str]:
    """Yield at most `quota` texts in the order of the selection; update the domain's counts."""
    if config.selection == "random":
        order = random.Random(config.seed).sample(texts, len(texts))
    else:
        # Characters, not tokens: only the documents that are taken need their tokens counted.
        order = sorted(texts, key=len, reverse=config.selection == "longest")
    for text in order:
        if counts["written"] == quota:
            return
        tokens = count_tokens(text)
        if tokens > config.max_tokens:
            counts["over_limit"] += 1
        else:
            counts["written"] += 1
            counts["tokens"] += tokens
            yield text


def build(
    domains: Sequence[Domain],
    out: str | os.PathLike[str],
    config: SelectionConfig,
    count_tokens: Callable[[str], int],
    as_texts: bool = False,
) -> dict[str, Any]:
    """Write the documents of all domains to `out`, and return the summary.

    The summary also goes to `out`.summary.json. A domain with fewer documents than its quota is
    logged. ValueError if no document is written.
    """
    counts = {domain.name: Counter[str]() for domain in domains}

    # A generator for each domain: its texts are freed before the next domain's are read.
    def records(domain: Domain) -> Iterator[dict[str, Any]]:
        domain_counts = counts[domain.name]
        texts, domain_counts["skipped"] = read_texts(domain.path)
        domain_counts["read"] = len(texts)
        taken_texts = take_texts(texts, domain.quota, config, count_tokens, domain_counts)
        for number, text in enumerate(taken_texts):
            name = f"{domain.name}-{number:05d}"
            yield {"text": text} if as_texts else {"id": name, "documents": [text]}
        written = domain_counts["written"]
        if written < domain.quota:
            log.warning("%s: %d of %d documents", domain.path, written, domain.quota)

    write_records(out, itertools.chain.from_iterable(map(records, domains)))
    keys = ("read", "skipped", "over_limit", "written", "tokens")
    summary = {
        name: {key: domain_counts[key] for key in keys} for name, domain_counts in counts.items()
    }
    summary |= dataclasses.asdict(config)
    write_json(f"{out}.summary.json", summary)
    if not any(domain_counts["written"] for domain_counts in counts.values()):
        raise ValueError(f"domain = {[*counts]}: no document was written; {summary}")
    return summary


def main(_) -> None:
    logging.getLogger("data_pipeline").setLevel(logging.INFO)
    values = flags.FLAGS
    config = dataclass_flags.read(SelectionConfig, values)
    folder = find_folder(values.tokenizer, "--tokenizer", with_weights=False)
    count = tokenizers.load(folder).count
    domains = parse_domains(values.domain)
    print(json.dumps(build(domains, values.out, config, count, values.texts)))


if __name__ == "__main__":
    flags.DEFINE_multi_string("domain", None, "PATH:QUOTA of a domain; repeatable.", required=True)
    flags.DEFINE_string("tokenizer", None, "Policy folder; its tokenizer counts.", required=True)
    flags.DEFINE_string("out", None, "JSONL file to write.", required=True)
    dataclass_flags.define(SelectionConfig)
    flags.DEFINE_bool("texts", False, "Whether lines are {'text'}, for spell_jax.sft.")
    entry.run_main(main)
