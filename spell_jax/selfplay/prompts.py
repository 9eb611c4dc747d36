"""Prompt templates of every role: text files with placeholders that are filled in one pass.

1. A prompt set is a folder of text files: "full" for real models, "compact" for policies with a
   tiny vocabulary, or a user's folder. It overlays the full set: its files replace the full set's
   files of the same name.
2. A placeholder is a lower-case word in braces, such as {documents}. Other braces (JSON examples)
   are literal. One newline at the end of a file is not part of the prompt.

tests/selfplay/test_prompts.py lists each requirement of Appendix G next to the words of the full
set that meet it. The wording is ours. Departures, with the spec section that asks for them: the
JSON object is in a fenced block and has no trailing comma (2.3), the requested letter is filled in
(2.2), verdicts have double brackets (6).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spell_jax.data.clusters import LETTERS, TASKS
from spell_jax.runtime.files import remote
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.rules import check_task

NO_DOCUMENTS = "Empty"  # stands for the documents, as in the public code (spec 2.5)
ROLES = ("questioner", "responder", "verifier")  # of the policy
PACKAGED = Path(__file__).parent / "templates"
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

# File name -> its placeholders. A question mark makes a placeholder optional.
PLACEHOLDERS = {
    "example.txt": "question answer number?",  # one earlier question
    "answer_first.txt": "answer",  # end of a questioner's prompt
    "verifier.txt": "question answer reference",
    "judge.txt": "question answer reference",
    "judge_grades.txt": "question answer reference",
    "reasoning_diversity.txt": "question choices number?",
    "error_kind.txt": "question answer reference",
    "reconstruction.txt": "document options",
    "gap.txt": "number",  # mark of a missing paragraph in the document to reconstruct
    "evidence.txt": "documents question",
    "evidence_scores.txt": "question choices number?",
    "reasoning_scores.txt": "question evidence choices number?",
    "reranker.txt": "question text",
    "scored.txt": "number text question?",  # one evidence set or reasoning to be scored
}
for _task in TASKS:
    _letter = " letter" if _task == "multiple_choice" else ""
    PLACEHOLDERS[f"questioner_{_task}.txt"] = f"documents{_letter}"
    PLACEHOLDERS[f"questioner_{_task}_history.txt"] = f"documents examples{_letter}"
    PLACEHOLDERS[f"responder_{_task}.txt"] = "documents question"


@dataclass(frozen=True)
class Prompts:
    """One prompt set. Every method returns the text of a single user turn."""

    texts: Mapping[str, str]  # file name -> template, for every file name in PLACEHOLDERS

    def questioner(
        self,
        task: str,
        documents: Sequence[str],
        history: Sequence[Entry] = (),
        letter: str | None = None,
        cue: str = "",
    ) -> str:
        """Build the prompt for a new question about the documents (Appendix G, spec 2.2).

        `documents` are the m documents shown, in corpus order. With a `history` of earlier
        questions, oldest first, the prompt asks for a harder one. `letter`, A to D, names the
        correct option of a multiple choice and is ignored for other tasks. A `cue` ends the prompt.
        An unknown task or letter is a ValueError.
        """
        check_task(task)
        if task == "multiple_choice" and letter not in LETTERS:
            raise ValueError(f"letter={letter!r}: a multiple-choice prompt needs one of {LETTERS}")
        examples = "\n".join(
            self._fill("example.txt", number=str(i), question=past.question, answer=past.answer)
            for i, past in enumerate(history, 1)
        )
        prompt = self._fill(
            f"questioner_{task}_history.txt" if history else f"questioner_{task}.txt",
            documents=_join(documents),
            examples=examples,
            letter=letter or "",
        )
        return f"{prompt} {cue}" if cue else prompt

    def answer_first(self, answer: str) -> str:
        """Build the cue that asks a questioner for a question with this answer (2103.07449)."""
        return self._fill("answer_first.txt", answer=answer)

    def responder(self, task: str, documents: Sequence[str], question: str) -> str:
        """Build the prompt for an answer from n documents, or from none (grounding filter, 2.5)."""
        check_task(task)
        return self._fill(f"responder_{task}.txt", documents=_join(documents), question=question)

    def verifier(self, question: str, answer: str, reference: str) -> str:
        """Build the prompt that asks whether answer and reference are equivalent (spec 6)."""
        return self._fill("verifier.txt", question=question, answer=answer, reference=reference)

    def judge(self, question: str, answer: str, reference: str) -> str:
        """Build the prompt that asks a judge if the answer contains the reference (Table 5)."""
        return self._fill("judge.txt", question=question, answer=answer, reference=reference)

    def judge_grades(self, question: str, answer: str, reference: str) -> str:
        """Build the prompt that asks a judge for one of three grades (EAPO, Appendix E)."""
        return self._fill("judge_grades.txt", question=question, answer=answer, reference=reference)

    def reasoning_diversity(self, question: str, reasonings: Sequence[str]) -> str:
        """Build the prompt that asks a judge if reasonings differ in substance (EAPO, Table 2)."""
        return self._fill_scores("reasoning_diversity.txt", reasonings, question=question)

    def error_kind(self, question: str, answer: str, reference: str) -> str:
        """Build the prompt that asks a judge why a response is wrong (EAPO, Figure 9)."""
        return self._fill("error_kind.txt", question=question, answer=answer, reference=reference)

    def reconstruction(self, document: str, options: Mapping[str, str]) -> str:
        """Build the prompt for the order in which options (letter -> text) fill the gaps."""
        listed = "\n".join(f"({letter}) {text}" for letter, text in options.items())
        return self._fill("reconstruction.txt", document=document, options=listed)

    def gap(self, number: int) -> str:
        """Return the mark of a document's missing paragraph; numbers start at 1."""
        return self._fill("gap.txt", number=str(number))

    def evidence(self, documents: Sequence[str], question: str) -> str:
        """Build the prompt for an answer in sections, with evidence from n documents (EAPO 2.1)."""
        return self._fill("evidence.txt", documents=_join(documents), question=question)

    def evidence_scores(self, question: str, evidence: Sequence[str]) -> str:
        """Build the prompt for scores from 1 to 5 of a group's evidence sets (EAPO 3.2)."""
        return self._fill_scores("evidence_scores.txt", evidence, question=question)

    def reranker(self, question: str, evidence: str) -> str:
        """Build the prompt that asks a reranker whether evidence helps, yes or no (EAPO 2.2)."""
        return self._fill("reranker.txt", question=question, text=evidence)

    def reasoning_scores(self, question: str, evidence: str, reasonings: Sequence[str]) -> str:
        """Build the prompt for scores from 1 to 4 of reasonings from one evidence (EAPO 2.2)."""
        return self._fill_scores(
            "reasoning_scores.txt", reasonings, question=question, evidence=evidence
        )

    def _fill_scores(self, name: str, scored: Sequence[str], **values: str) -> str:
        choices = "\n".join(
            self._fill("scored.txt", question=values["question"], number=str(i), text=text)
            for i, text in enumerate(scored, 1)
        )
        return self._fill(name, choices=choices, number=str(len(scored)), **values)

    def _fill(self, name: str, **values: str) -> str:
        # One pass: a placeholder that stands in a document stays as it is.
        return PLACEHOLDER.sub(lambda match: values[match[1]], self.texts[name])


def load(name_or_folder: str | Path) -> Prompts:
    """Read a prompt set: "full", "compact", or a folder that overlays the full set.

    Raises FileNotFoundError if there is no such folder. Raises ValueError if the folder contains no
    template, or a file has an unknown name, is not UTF-8, or has missing or unknown placeholders.
    """
    texts = _read_folder(PACKAGED / "full")
    if name_or_folder == "full":
        return Prompts(texts)
    folder = PACKAGED / "compact" if name_or_folder == "compact" else remote.fetch(name_or_folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"prompts = {str(name_or_folder)!r}: must be 'full', 'compact' or a folder"
        )
    return Prompts(texts | _read_folder(folder))


def _read_folder(folder: Path) -> dict[str, str]:
    texts = {}
    for path in sorted(folder.glob("[!.]*")):
        if path.name not in PLACEHOLDERS:
            template_names = ", ".join(sorted(PLACEHOLDERS))
            raise ValueError(f"{path}: unknown template; the names are {template_names}")
        try:
            text = path.read_text(encoding="utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error})") from error
        _check_placeholders(path, text)
        texts[path.name] = text
    if not texts:
        raise ValueError(f"{folder}: contains no template, such as verifier.txt")
    return texts


def _check_placeholders(path: Path, text: str) -> None:
    placeholders = PLACEHOLDERS[path.name].split()
    required = {name for name in placeholders if not name.endswith("?")}
    allowed = {name.removesuffix("?") for name in placeholders}
    present = set(PLACEHOLDER.findall(text))
    listed = ", ".join(f"{{{name}}}" for name in sorted(allowed))
    for problem, names in (("unknown", present - allowed), ("missing", required - present)):
        if names:
            raise ValueError(
                f"{path}: {problem} placeholder {{{min(names)}}}; this file takes {listed}"
            )


def _join(documents: Sequence[str]) -> str:
    return "\n".join(documents) if documents else NO_DOCUMENTS
