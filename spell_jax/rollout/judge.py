"""External judge: verdicts in place of the rule or beside it (paper section 4.6, spec 11).

1. A template turns each (question, prediction, reference) into one prompt: a question of yes or no,
   or one of three grades (EAPO). A chat endpoint or a local policy replies to new prompts.
2. A reply is parsed as 1, 0 or MALFORMED. Without a reply, the verdict is UNANSWERED.
3. Replies may be appended to a file as they arrive: a restarted judge sends only the other prompts.
4. Missing replies are counted and logged, never raised.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from spell_jax.rollout.flags import SIZES, check_model
from spell_jax.rollout.repliers import Replier, make_replier
from spell_jax.runtime import fault_injection
from spell_jax.runtime.files.jsonl import append_records, read_records
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.verdicts import (
    JUDGE_TEMPLATES,
    MALFORMED,
    UNANSWERED,
    Parse,
    Template,
    parse_judgement,
)

log = logging.getLogger(__name__)

Item = tuple[Any, ...]  # fields of a prompt, such as question, prediction and reference
# (question, prediction, reference) triples -> 1 (right), 0 (wrong) or -1 (no verdict).
JudgeFunction = Callable[[Sequence[tuple[str, str, str]]], Sequence[int]]
REPLIES = "judge.jsonl"
_MOST_SILENT, _FEWEST_ASKED = 3, 4  # of VerdictWatch: steps in a row, answers of a step


class Judge:
    """Cached verdicts on answers.

    `counts` are totals since the start: "asked" (prompts sent), "cached" (items answered from the
    cache), "failed" (prompts without a reply), "malformed" (replies without a verdict).
    """

    def __init__(
        self,
        ask: Replier,
        write_prompt: Callable[..., str],
        model: str = "",
        parse: Parse = parse_judgement,
        cache_size: int = 100_000,
        cache_file: str | os.PathLike[str] | None = None,
    ):
        """Load the cache file if there is one.

        `write_prompt` makes the prompt of an Item, `parse` the verdict of a reply. `model`, the
        name of the model that replies, is part of the cache key. The `cache_size` >= 1 most
        recently used verdicts stay in memory. `cache_file` is a JSONL file of all replies, which
        several models may share.
        """
        if cache_size < 1:
            raise ValueError(f"cache_size = {cache_size}: must be at least 1")
        self.counts = {"asked": 0, "cached": 0, "failed": 0, "malformed": 0}
        self.model = model
        self._ask = ask
        self._write_prompt = write_prompt
        self._parse = parse
        self._cache_size = cache_size
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._file = pathlib.Path(cache_file) if cache_file else None
        if self._file and self._file.exists():
            # Replies are stored, not verdicts, so a changed parser reads old files anew.
            verdicts, _ = read_records(
                self._file, lambda line: (str(line["key"]), parse(line["reply"]))
            )
            self._cache.update(verdicts)

    def judge(self, items: Sequence[Item]) -> list[int]:
        """Return one verdict per item, in order; MALFORMED and UNANSWERED are negative."""
        prompts = [self._write_prompt(*item) for item in items]
        keys = [self._key(prompt) for prompt in prompts]
        # Equal items, such as equal answers of a group, are asked once.
        prompt_of = dict(zip(keys, prompts, strict=True))
        verdicts = {key: self._cache[key] for key in prompt_of if key in self._cache}
        unknown = [prompt for key, prompt in prompt_of.items() if key not in verdicts]
        self.counts["cached"] += len(prompts) - len(unknown)
        self.counts["asked"] += len(unknown)
        for index, reply in self._ask(unknown):
            # A local policy replies on all processes, to the prompts of process 0.
            if index < len(unknown):
                verdicts[self._key(unknown[index])] = self._record(unknown[index], reply)
        if failed := [*verdicts.values()].count(UNANSWERED):
            self.counts["failed"] += failed
            last = self._ask.last_failure
            log.warning(
                "%s: no reply to %d of %d prompts; the rule's scores stand where there is a rule%s",
                *(self.model, failed, len(unknown), f". Last: {last}" if last else ""),
            )
        replied = [verdicts[self._key(prompt)] for prompt in unknown]
        if replied and set(replied) == {MALFORMED}:
            log.warning("%s: no verdict in any of %d replies", self.model, len(replied))
        for key in prompt_of:  # the order of use must not depend on the order of arrival
            if key in self._cache:
                self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [verdicts[key] for key in keys]

    def _key(self, prompt: str) -> str:
        # A digest, because prompts are long. JSON keeps model and prompt apart.
        content = json.dumps([self.model, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _record(self, prompt: str, reply: str | None) -> int:
        """Return the verdict of a reply and cache it; a missing reply is not cached."""
        if reply is None:
            return UNANSWERED
        verdict, key = self._parse(reply), self._key(prompt)
        self.counts["malformed"] += verdict == MALFORMED
        self._cache[key] = verdict
        # An empty reply was cut off. It is not stored, so a restart asks again, maybe with more
        # tokens.
        if self._file and reply:
            append_records(self._file, [{"key": key, "model": self.model, "reply": reply}])
        fault_injection.point("judged")
        return verdict


class VerdictWatch:
    """Watch over the steps of a run in which the external judge gave no verdict.

    A judge without a verdict in the first step of a run is set up wrongly: the step ends the run.
    Later, also after a resume, a server may be down for a while: the run ends after _MOST_SILENT
    such steps in a row.
    """

    def __init__(self, finished_steps: int) -> None:
        """Start the watch of a run that has done `finished_steps` steps."""
        self._silent_in_a_row = 0 if finished_steps else _MOST_SILENT - 1

    def ends_run(self, failed: float, num_asked: float) -> bool:
        """Return whether to end the run before the update of a step.

        Args:
          failed: answers of the step without a verdict.
          num_asked: answers that were sent to the judge.
        """
        if num_asked < _FEWEST_ASKED:  # too few to tell, or none
            return False
        self._silent_in_a_row = self._silent_in_a_row + 1 if failed == num_asked else 0
        return self._silent_in_a_row >= _MOST_SILENT


def make_judge(
    prompts: Prompts,
    template: str | Template = "yes_no",
    cache_file: pathlib.Path | None = None,
    **source: Any,
) -> Judge:
    """Make the judge that asks in the words of a template, or of the template with this name.

    `source` says which model judges: url and model, or policy, as in make_replier, with its errors.
    """
    ask, model = make_replier("judge", **source)
    write, parse = JUDGE_TEMPLATES[template] if isinstance(template, str) else template
    return Judge(ask, functools.partial(write, prompts), model, parse, cache_file=cache_file)


def judge_of_flags(
    flag_values: Any, out: pathlib.Path, sizes: SamplerConfig, template: Template | None = None
) -> Judge | None:
    """Make the judge that the flags (flags.py) select, if any.

    `template` replaces --judge_template's. The replies are kept in OUT/judge.jsonl. `sizes` are the
    sampler sizes of a judging policy. Raises the errors of check_model and make_judge.
    """
    if not check_model(flag_values, "judge"):
        return None
    if policy := flag_values.judge_policy:
        source = {"policy": policy, "dtype": flag_values.dtype, "sizes": sizes}
    else:
        source = {
            "url": flag_values.judge_url,
            "model": flag_values.judge_model,
            # A reasoning judge may write thousands of tokens.
            "timeout_s": 600.0,
            # Two minutes of back-off, enough for a server restart.
            "attempts": 8,
            "workers": flag_values.judge_workers,
            "requests_per_s": flag_values.judge_rate,
        }
    return make_judge(
        prompt_sets.load("full"),
        template or flag_values.judge_template,
        out / REPLIES if jax.process_index() == 0 else None,
        sampling={"max_tokens": flag_values.judge_max_tokens},
        **source,
    )


def read_sizes(flag_values: Any) -> SamplerConfig:
    return SamplerConfig(**{name: getattr(flag_values, name) for name in SIZES})
