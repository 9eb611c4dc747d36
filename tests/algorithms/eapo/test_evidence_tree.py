"""Tests of the evidence tree: sampling of branches, selection, and output lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spell_jax.algorithms.eapo import evidence_tree
from spell_jax.algorithms.eapo.evidence_tree import EvidenceTree, TreeConfig
from spell_jax.data.samples import Sample
from spell_jax.rollout.text_model import TextModel
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import prompts

PROMPTS = prompts.load("compact")
DOCUMENTS = ["Arvo lives in Oslo.", "Bela lives in Rome."]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 200}


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {"documents": DOCUMENTS, "question": f"Q{number}?"} | fields


class Scripted(TextModel):
    """Policy whose tokens are bytes.

    Attributes:
      said: texts that it samples, by question: evidence branches, and reasonings by the evidence
        that they continue.
      calls: (number of prompts, width, stop string) of each call.
    """

    def __init__(
        self, evidence: Mapping[str, Sequence[str]], reasonings: Mapping[str, Sequence[str]]
    ):
        self.said = evidence, reasonings
        self.calls: list[tuple[int, int, str]] = []
        self.prompts: list[str] = []
        self.keys: list[list[int]] = []
        self.config = SimpleNamespace(max_positions=1000)
        self.tokenizer = SimpleNamespace(
            open_thought=lambda text: "",
            chat=lambda text: list(text.encode()),
            decode=lambda ids: bytes(ids).decode(),
        )

    def sample(self, ids, width: int, keys: np.ndarray, options: Sequence[Options], _=None):
        if not ids:
            return
        (end,) = options[0].stop_strings
        self.calls.append((len(ids), width, end))
        for place in reversed(range(len(ids))):  # results arrive in any order
            prompt = bytes(ids[place].tolist()).decode()
            self.prompts.append(prompt)
            self.keys.append(keys[place].tolist())
            question = prompt[prompt.index("Q") :][:2]
            texts = self.said[0][question]
            if end == "</answer>":
                quoted = prompt.partition("<evidence>")[2].partition("</evidence>")[0]
                texts = self.said[1][quoted]
            yield place, [_sample(text, end) for text in texts[:width]]


def _sample(text: str, end: str) -> Sample:
    ended = end in text
    tokens = np.array([*text.encode(), *([] if ended else [0])], np.int32)
    return Sample(tokens, np.full(len(tokens), -0.5, np.float32), True, end if ended else "")


def branch(quoted: str) -> str:
    return f"<analysis>a</analysis><evidence>{quoted}</evidence>"


def conclusion(reasoning: str, answer: str) -> str:
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


EVIDENCE = {
    "Q0": [branch("Bela"), branch("Arvo lives"), branch("Oslo")],
    "Q1": ["no sections", branch("Rome"), "<evidence>x</evidence>"],
    "Q2": ["none", "none", "none"],
    "Q3": [branch("Bergen") + "<rea"],
}
REASONINGS = {
    "Bela": [conclusion("b", "Rome"), conclusion("c", "Oslo"), "end"],
    "Arvo lives": [conclusion("d", "Oslo"), conclusion("e", "Bergen"), conclusion("f", "Oslo")],
    "Oslo": [conclusion("g", "Oslo")] * 3,
    "Rome": [conclusion("h", "Rome")] * 3,
    "Bergen": [conclusion("i", "Bergen").removeprefix("<rea") + ". So"],
}


def grow(records=None, seed: int = 0, judge=None, embed=None, rerank=None, **config: Any):
    """Run EvidenceTree on the records; return (lines of the output, the policy)."""
    policy: Any = Scripted(EVIDENCE, REASONINGS)
    records = records or [request(0, answer="Oslo"), request(1), request(2)]
    tree = EvidenceTree(policy, TreeConfig(**config), PROMPTS, SAMPLING, judge, embed, rerank)
    texts = [evidence_tree.make_prompt(record, PROMPTS) for record in records]
    return tree.answer(records, texts, seed), policy


class Judge:
    """Judge that replies by a word of the prompt."""

    def __init__(self, replies: Mapping[str, str | None]):
        self.replies = replies
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]):
        self.asked += texts
        for index, text in reversed(list(enumerate(texts))):
            yield index, next(r for word, r in self.replies.items() if word in text)


def chosen_indices(branches: Sequence[dict[str, Any]]) -> list[int]:
    return [i for i, candidate in enumerate(branches) if candidate["chosen"]]


def test_tree_without_selection_samples_one_branch():
    lines, policy = grow(evidence_by="none")
    assert policy.calls == [(3, 1, "</evidence>"), (1, 1, "</answer>")]
    first, second, third = lines
    assert policy.prompts[-1] == PROMPTS.evidence(DOCUMENTS, "Q0?") + branch("Bela")
    assert first["prediction"] == first["stated"] == "Rome" and first["right"] is False
    (only_branch,) = first["branches"]
    assert only_branch["text"] == branch("Bela") and only_branch["verbatim"] == 1.0
    assert only_branch["tokens"] == len(branch("Bela")) and only_branch["score"] is None
    assert only_branch["logprob"] == -0.5 * only_branch["tokens"]
    assert first["reasonings"][0]["text"] == branch("Bela") + conclusion("b", "Rome")
    assert second["prediction"] is second["stated"] is None and second["reasonings"] == []
    assert "right" not in second and chosen_indices(second["branches"]) == []
    assert third["branches"][0]["well_formed"] is False
    assert third["branches"][0]["verbatim"] == 0.0


def test_every_branch_is_continued_beside_the_chosen_one():
    judge = Judge({"Q0": "1 2\n2 5\n3 4"})
    lines, policy = grow(judge=judge, every_branch=True)
    plain_lines, _ = grow(judge=judge)
    assert policy.calls[2:] == [(4, 1, "</answer>")]  # three branches of Q0, one of Q1
    quoted_evidence = ("Bela", "Arvo lives", "Oslo")
    assert [path["text"] for path in lines[0]["paths"]] == [
        branch(quoted) + REASONINGS[quoted][0] for quoted in quoted_evidence
    ]
    assert len(lines[1]["paths"]) == 1 and "paths" not in lines[2]
    assert len({*map(tuple, policy.keys[-4:])}) == 4
    # Nothing else changes.
    for line, plain_line in zip(lines, plain_lines, strict=True):
        assert {name: line[name] for name in plain_line} == plain_line


def test_a_judge_reads_the_sentence_that_states_a_number():
    """Extraction drops "million" and the currency."""
    evidence_by_question = {"Q0": [branch("x")]}
    policy: Any = Scripted(evidence_by_question, {"x": [conclusion("r", "$3.5 million")]})
    record = request(0, task="financial_math", answer="3.5")
    text = evidence_tree.make_prompt(record, PROMPTS)
    tree = EvidenceTree(policy, TreeConfig(evidence_by="none"), PROMPTS, SAMPLING)
    (line,) = tree.answer([record], [text], 0)
    assert "$3.5 million" in line["stated"] and "million" not in line["prediction"]


def test_every_branch_needs_several_sets_of_evidence():
    for fields in ({"evidence_by": "none"}, {"width": 1}):
        with pytest.raises(ValueError, match="every_branch = True: needs several sets"):
            TreeConfig(every_branch=True, **fields)


def test_token_may_extend_past_a_closing_tag():
    lines, policy = grow([request(3)], evidence_by="none")
    assert policy.prompts[-1].endswith(branch("Bergen") + "<rea")
    assert lines[0]["branches"][0]["text"] == branch("Bergen")
    assert lines[0]["reasonings"][0]["text"] == branch("Bergen") + conclusion("i", "Bergen")
    assert lines[0]["prediction"] == "Bergen"


def test_judge_selects_among_well_formed_evidence():
    judge = Judge({"Q0": '{"scores": [2, 5, 5]}'})
    lines, policy = grow(judge=judge)
    assert policy.calls == [(3, 3, "</evidence>"), (2, 1, "</answer>")]
    assert judge.asked == [PROMPTS.evidence_scores("Q0?", ["Bela", "Arvo lives", "Oslo"])]
    assert [candidate["score"] for candidate in lines[0]["branches"]] == [2, 5, 5]
    assert chosen_indices(lines[0]["branches"]) == [1]  # the first of several equal ones
    assert lines[0]["prediction"] == "Oslo" and lines[0]["right"] is True
    assert chosen_indices(lines[1]["branches"]) == [1] and lines[1]["prediction"] == "Rome"


def test_judge_can_also_select_reasonings():
    second = "Arvo lives\n1\nQ0?\nd\n2\nQ0?\ne\n3\nQ0?\nf"
    judge = Judge({second: "1 1\n2 4\n3 2", "Q0": "1 1\n2 3\n3 2"})
    lines, policy = grow([request(0)], judge=judge, reasoning_by="judge")
    assert policy.calls == [(1, 3, "</evidence>"), (1, 3, "</answer>")]
    assert len(judge.asked) == 2
    assert chosen_indices(lines[0]["reasonings"]) == [1] and lines[0]["prediction"] == "Bergen"
    judge = Judge({"Q0?\nBela\n1\nQ0?\nb\n2\nQ0?\nc\nscores": "1 1\n2 4"})
    lines, policy = grow([request(0)], judge=judge, evidence_by="none", reasoning_by="judge")
    assert policy.calls == [(1, 1, "</evidence>"), (1, 3, "</answer>")]
    assert chosen_indices(lines[0]["reasonings"]) == [1] and lines[0]["prediction"] == "Oslo"
    assert [reasoning["well_formed"] for reasoning in lines[0]["reasonings"]] == [True, True, False]


def test_reasonings_have_scores_up_to_4(caplog):
    """The scale of the paper's reasoning judge (EAPO, Appendix E); 5 is no score of it."""
    judge = Judge({"Q0": "1 1\n2 5"})
    lines, _ = grow([request(0)], judge=judge, evidence_by="none", reasoning_by="judge")
    assert [reasoning["score"] for reasoning in lines[0]["reasonings"]] == [None] * 3
    assert "no scores of 1 of 1 groups" in caplog.text


@pytest.mark.parametrize(("best", "expected_index"), [(2, 2), (1, 1), (0, 1), (3, 1), ("2", 1)])
def test_best_choice_of_the_judge_decides_a_tie(best, expected_index):
    reply = json.dumps({"reason": "The last two agree.", "scores": [2, 5, 5], "best_choice": best})
    lines, _ = grow([request(0)], judge=Judge({"Q0": reply}))
    assert chosen_indices(lines[0]["branches"]) == [expected_index]


@pytest.mark.parametrize("reply", [None, "", "the second", "1 1\n2 5"])
def test_failed_scoring_selects_the_first_branch(reply, caplog):
    lines, _ = grow([request(0)], judge=Judge({"Q0": reply}))
    assert chosen_indices(lines[0]["branches"]) == [0]
    assert [candidate["score"] for candidate in lines[0]["branches"]] == [None] * 3
    assert "no scores of 1 of 1 groups" in caplog.text


def test_evidence_is_selected_by_similarity_to_the_question():
    angles = {"Q0?": 0.0, "Bela": 2.0, "Arvo lives": 1.0, "Oslo": 0.5}

    def embed(texts: Sequence[str]) -> np.ndarray:
        turned = [angles[text] for text in texts]
        return np.stack([np.cos(turned), np.sin(turned)], 1).astype(np.float32)

    lines, _ = grow(embed=embed, evidence_by="similarity")
    scores = [candidate["score"] for candidate in lines[0]["branches"]]
    assert scores == pytest.approx(np.cos([2.0, 1.0, 0.5]), abs=1e-6)
    assert chosen_indices(lines[0]["branches"]) == [2] and lines[0]["prediction"] == "Oslo"


def test_any_right_answer_is_right():
    answer_fields = {"answer": "Rome, Italy", "answers": ["Rome, Italy", "Rome"]}
    lines, _ = grow(
        [request(0, **answer_fields), request(0, answer="Rome, Italy")], evidence_by="none"
    )
    assert [line["right"] for line in lines] == [True, False]


def test_oracle_selects_by_the_known_evidence():
    evidence_fields = {"evidence": ["Arvo lives in Oslo."]}
    lines, _ = grow([request(0, **evidence_fields)], evidence_by="oracle")
    assert [candidate["rouge_l"] for candidate in lines[0]["branches"]] == [0.0, 0.5, 0.25]
    assert [candidate["score"] for candidate in lines[0]["branches"]] == [0.0, 0.5, 0.25]
    assert chosen_indices(lines[0]["branches"]) == [1] and lines[0]["best_chosen"] == 1.0


def test_choice_is_compared_to_the_oracle():
    requests = [request(0, evidence=["Arvo lives in Oslo."]), request(1), request(2, evidence=[])]
    for scores, share in ("[2, 5, 1]", 1.0), ("[2, 5, 5]", 0.5), ("[5, 2, 2]", 0.0):
        judge = Judge({"Q0": f'{{"scores": {scores}}}'})
        lines, _ = grow(requests, judge=judge)
        assert lines[0]["best_chosen"] == share
        assert all("best_chosen" not in line for line in lines[1:])
    lines, _ = grow(requests, judge=Judge({"Q0": None}))
    assert lines[0]["best_chosen"] is None  # nothing was scored
    lines, _ = grow([request(1, evidence=["Rome"])], judge=Judge({}))
    assert lines[0]["best_chosen"] is None  # a single well-formed branch
    assert [candidate["rouge_l"] for candidate in lines[0]["branches"]] == [None, 1.0, None]


def test_evidence_is_selected_by_a_reranker():
    reranker_prompts = []

    def rerank(texts: Sequence[str]) -> list[float | None]:
        reranker_prompts.extend(texts)
        return [0.2, None, 0.9]

    lines, _ = grow(rerank=rerank, evidence_by="reranker")
    assert reranker_prompts == [
        PROMPTS.reranker("Q0?", text) for text in ("Bela", "Arvo lives", "Oslo")
    ]
    assert [candidate["score"] for candidate in lines[0]["branches"]] == [0.2, None, 0.9]
    assert chosen_indices(lines[0]["branches"]) == [2] and lines[0]["prediction"] == "Oslo"


def test_reranker_scores_by_the_probability_of_yes(caplog):
    replies = {"a": ("yes", 0.75), "b": (" No", 0.9), "c": ("Yes", 0.5), "d": ("Maybe", 0.9)}

    class Words(Scripted):
        def sample(self, ids, width, keys, options, _=None):
            assert (width, options[0].temperature, options[0].max_tokens) == (1, 0.0, 1)
            assert keys.shape == (len(ids), 2)
            for place in reversed(range(len(ids))):
                word, probability = replies[bytes(ids[place].tolist()).decode()]
                tokens = np.array([*word.encode()], np.int32)
                # As if all of the word but its first byte were certain.
                logprobs = np.log(np.float32([probability] + [1] * (len(tokens) - 1)))
                yield place, [Sample(tokens, logprobs, False)]

        def release(self):
            self.released = True

    policy: Any = Words({}, {})
    scores = evidence_tree.Reranker(policy)(["b", "too long" * 200, "a", "d", "c"])
    expected_scores = [0.1, None, 0.75, None, 0.5]
    assert [score and pytest.approx(score, abs=1e-6) for score in expected_scores] == scores
    assert policy.released and "no score of 2 of 5" in caplog.text


def test_sampling_keys_depend_on_seed_and_position():
    _, policy = grow(evidence_by="none")
    _, second_policy = grow(evidence_by="none")
    assert policy.keys == second_policy.keys and len({*map(tuple, policy.keys)}) == 4
    _, other_seed_policy = grow(evidence_by="none", seed=1)
    assert not {*map(tuple, policy.keys)} & {*map(tuple, other_seed_policy.keys)}
    _, alone = grow([request(0)], evidence_by="none")
    # keys of the first of three requests, and of the last one sampled
    assert alone.keys == [policy.keys[2], policy.keys[3]]


def test_overlong_prompts_are_not_sampled(caplog):
    long = request(1, documents=["x" * 1000])
    lines, policy = grow([request(0), long], evidence_by="none")
    assert policy.calls[0][0] == 1 and "1 prompts are longer than 600 tokens" in caplog.text
    assert lines[1]["branches"] == [] and lines[1]["prediction"] is None
    assert lines[0]["prediction"] == "Rome"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": "x"}, "documents = 'x'"),
        ({"documents": [1]}, "documents ="),
        ({"question": ""}, "question = ''"),
        ({"question": None}, "question = None"),
        ({"task": "essay"}, "task: 'essay'"),
        ({"evidence": "x"}, "evidence = 'x'"),
        ({"evidence": [None]}, "evidence ="),
        ({"answers": "x"}, "answers = 'x'"),
    ],
)
def test_invalid_request_field_is_named_in_the_error(change, message):
    with pytest.raises(ValueError, match=message):
        evidence_tree.make_prompt(request(0) | change, PROMPTS)


def test_oracle_needs_the_evidence():
    request_with_evidence = request(0, evidence=["Arvo lives in Oslo."])
    assert evidence_tree.make_prompt(request_with_evidence, PROMPTS, needs_evidence=True)
    for line in (request(0), request(0, evidence=[])):
        with pytest.raises(ValueError, match=r"evidence = \[\]: must be the known evidence"):
            evidence_tree.make_prompt(line, PROMPTS, needs_evidence=True)


@pytest.mark.parametrize(
    ("field", "value"), [("width", 0), ("evidence_by", "luck"), ("reasoning_by", "similarity")]
)
def test_invalid_tree_field_is_named_in_the_error(field: str, value: Any):
    with pytest.raises(ValueError, match=f"{field} = "):
        TreeConfig(**{field: value})
