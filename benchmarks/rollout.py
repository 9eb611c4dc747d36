"""Benchmarks of sampling: shared prompts, continuous batching, verdicts, and a step of SPELL.

1. Weights and tokens are random. Answer lengths are forced: no token ends an answer.
2. Programs are compiled by short requests before anything is timed.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.base import (
    SAMPLING,
    Prompts,
    SamplerBenchmark,
    best_seconds,
    make_learner,
    random_group,
    random_params,
    sample_answers,
)
from benchmarks.sides.contract import share_documents
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.samples import Sample
from spell_jax.launch import work
from spell_jax.learner import packing
from spell_jax.learner.learner import Learner
from spell_jax.policy import weights
from spell_jax.sampler.answers import SlotTokens
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.session import Session
from spell_jax.sampler.shard import DecodeSequence, Lane, Shard, ShardShape


@dataclasses.dataclass
class SampleSpeed(SamplerBenchmark):
    """Speed of G answers to each of Q prompts, sampled in several ways by as many slots.

    "shared" is one request for G answers to each prompt, as training and evaluation sample. With
    --about=K, each K of the prompts begin with the same documents. "repeated" is Q G requests for
    one answer, with different prompts of the same length. "alone" (--alone=1) is a plain loop: one
    prompt and one answer at a time, in a single slot.
    "transformers" (--transformers=1, the test extra) is its `generate` with the same weights in the
    same process. Prefill is timed with answers of one token and decoding is the rest of the time.
    "..._ratio" and "..._decode_ratio" are the tokens/s of "shared" over another way's tokens/s.
    "repeated_work_ratio" is what the ratio would be if prefill took time in proportion to its
    operations, and decoding to the bytes that it reads (weights, and keys of prompts and answers).
    "..._kv_bytes" is the size of a pool that holds all pages of prompts and answers; layers with a
    window give pages back before the end.
    """

    questions: Annotated[int, "prompts Q, a multiple of K"] = 1
    about: Annotated[int, "prompts K about the same documents"] = 1
    question: Annotated[int, "last tokens of a prompt, in which the K prompts differ"] = 1
    prompt: Annotated[int, "prompt tokens P"] = 1024
    response: Annotated[int, "tokens of an answer S"] = 128
    repeats: Annotated[int, "timed calls, the fastest counts"] = 2
    alone: Annotated[int, "1: also one answer at a time"] = 0
    transformers: Annotated[int, "1: also by transformers' generate"] = 0

    def run(self) -> dict[str, Any]:
        params = random_params(self.model, self.dtype)
        total = self.questions * self.group
        tokens = np.random.default_rng(0).integers(self.vocab, size=(total, self.prompt))
        prompts = tokens.tolist()
        shared = share_documents(tokens[: self.questions], self.about, self.question).tolist()
        # Kind -> answers to a request, slots, and the prompts of each session.
        kinds = {"shared": (self.group, total, [shared]), "repeated": (1, total, [prompts])}
        if self.alone:
            kinds["alone"] = (1, 1, [[prompt] for prompt in shared for _ in range(self.group)])
        itemsize = params["final_norm"]["scale"].dtype.itemsize
        token_bytes = 2 * self.layers * self.model.kv_heads * self.model.head_size * itemsize
        line = {}

        def pages_of(tokens: int) -> int:
            return -(-tokens // self.page_size)

        # Each way has a pool of exactly the pages that it needs, so "..._kv_bytes" is its need.
        for kind, (group, slots, sessions) in kinds.items():
            sizes = {"samples_per_prompt_batch": group, "decode_tokens": self.response}
            pages = len(sessions[0]) * (pages_of(self.prompt) + group * pages_of(self.response))
            if kind == "shared":  # whole pages of documents are there once
                documents = (self.prompt - self.question) // self.page_size
                pages -= (self.questions - self.questions // self.about) * documents
            sampler = self.make_sampler(self.prompt, self.response, slots, pages, **sizes)
            line |= self._measure(kind, _requests(sampler, params, sessions, group))
            line[f"{kind}_kv_bytes"] = pages * self.page_size * token_bytes
        if self.transformers:
            line |= self._measure("transformers", self._generate(params, shared))
        # The ratio if seconds shrank as operations (prefill) and bytes (decoding) shrink.
        counts = self.program_counts(self.prompt)
        operations, read = self._work(counts, self.questions // self.about)
        repeated_operations, repeated_read = self._work(counts, 0)
        prefill_s = line["repeated_prefill_s"]
        decode_s = line["repeated_s"] - prefill_s
        prefill, decode = repeated_operations / operations, repeated_read / read
        line |= {
            "repeated_prefill_work_ratio": prefill,
            "repeated_decode_work_ratio": decode,
            "repeated_work_ratio": line["repeated_s"] / (prefill_s / prefill + decode_s / decode),
        }
        for baseline in ("repeated", "alone", "transformers"):
            for name in ("", "_decode"):
                if (rate := line.get(f"{baseline}{name}_tokens_per_s")) is not None:
                    line[f"{baseline}{name}_ratio"] = line[f"shared{name}_tokens_per_s"] / rate
        return line

    def _work(self, counts: work.ProgramCounts, trees: int) -> tuple[float, float]:
        """Count prefill operations and decode bytes, for `trees` trees or for repeated prompts."""
        answers, last = self.questions * self.group, self.question if trees else self.prompt
        prompt_count = self.questions if trees else answers
        first = self.prompt - last
        mean_pairs = self.model.mean_pairs
        pairs = trees * mean_pairs(0, first) + prompt_count * mean_pairs(first, last)
        prefill = counts.prefill(trees * first + prompt_count * last, pairs, 0)
        # A pass reads the keys of each prompt once for all its answers, and half an answer's.
        prompt_keys = prompt_count * mean_pairs(self.prompt - 1, 1)
        keys = (prompt_keys + answers * self.response / 2) * (self.response - 1)
        passes = counts.decode_pass(answers).times(self.response - 1)
        read = passes.memory + counts.decode_keys(0, keys).memory
        return prefill.products + prefill.attention, read

    def _measure(self, kind: str, ask: Callable[[int, int], int]) -> dict[str, float]:
        """Time ask(answer tokens, prompt tokens) -> number of sampled tokens."""
        answers = self.questions * self.group
        assert ask(1, 1) == answers  # compiles, because no shape depends on the lengths
        read = best_seconds(lambda: ask(1, self.prompt), self.repeats)
        seconds = best_seconds(lambda: ask(self.response, self.prompt), self.repeats)
        return {
            f"{kind}_s": seconds,
            f"{kind}_prefill_s": read,
            f"{kind}_samples_per_s": answers / seconds,
            f"{kind}_tokens_per_s": answers * self.response / seconds,
            f"{kind}_decode_tokens_per_s": answers * (self.response - 1) / (seconds - read),
        }

    def _generate(self, params: Any, prompts: Prompts) -> Callable[[int, int], int]:
        import torch
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            # Through a Hugging Face folder, so that both sides have the same weights.
            weights.save(f"{folder}/policy", self.model, params)
            dtype = getattr(torch, self.dtype)
            model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/policy", dtype=dtype)

        def ask(tokens: int, length: int) -> int:
            ids = torch.tensor(prompts)[:, :length]
            sequences = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_return_sequences=self.group,
                # Equal limits: no side may end an answer early.
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                eos_token_id=None,
                do_sample=True,
                **SAMPLING,
            )
            return sequences[:, length:].numel()

        return ask


def _requests(
    sampler: Sampler, params: Any, sessions: Sequence[Prompts], group: int
) -> Callable[[int, int], int]:
    """Return a function (answer length, prompt length): sample `group` answers to all prompts."""

    def ask(tokens: int, length: int) -> int:
        answers = []
        for prompts in sessions:
            cut = [prompt[:length] for prompt in prompts]
            answers += sample_answers(sampler.start_session(params), cut, group, tokens)
        return sum(len(sample.tokens) for samples in answers for sample in samples)

    return ask


@dataclasses.dataclass
class SlotBenchmark(SamplerBenchmark):
    """Base of the benchmarks that sample more answers than the sampler has slots."""

    cache: Annotated[int, "pool's tokens on each part of the mesh; 0: no slot waits"] = 0
    seed: Annotated[int, "seed of prompts and lengths"] = 0
    slots: Annotated[int, "answers sampled at once, over all devices"] = 64
    decode: Annotated[int, "most tokens that a slot samples in one call"] = 64

    def make_slots(self, prompt: int, response: int, group: int) -> Sampler:
        """Make a sampler with the options' sizes; set `slots` to the sampler's number of slots."""
        sizes = {"samples_per_prompt_batch": group, "decode_tokens": self.decode}
        pages = self.cache // self.page_size
        sampler = self.make_sampler(prompt, response, self.slots, pages, **sizes)
        self.slots = sampler.shape.slots * sampler.shards
        return sampler


def _compile(session: Session, sizes: Iterable[tuple[int, int]]) -> None:
    """Compile prefill, decode and key programs for requests of the sizes (group, prompts)."""
    # The key program depends on the number of prompts, prefill and decode only on the group.
    for group, prompts in sizes:
        request_keys(jax.random.key(0), prompts)
        sample_answers(session, [[0]], group, 1)


# ----------------------------------------------------------------------------------------- Refill


class _ForcedShard(Shard):
    """Shard that makes answers end at lengths [tickets, G] on the device.

    The scheduler still plans for the cap, as it does when a stop token may end an answer.
    """

    def __init__(self, shape: ShardShape, lengths: np.ndarray):
        super().__init__(shape)
        self._lengths = lengths

    def allocate_pages(self, lane: Lane, steps: int) -> dict[DecodeSequence, int]:
        # The cap decides about pages; the forced length ends the answer on the device, unforeseen.
        limits = super().allocate_pages(lane, steps)
        return {s: min(limit, _length(self._lengths, s)) for s, limit in limits.items()}


class _ForcedSession(Session):
    """Session with a forced length of every answer, [tickets, G]."""

    def __init__(self, sampler: Sampler, params: Any, lengths: np.ndarray):
        super().__init__(sampler, params)
        self._lengths = lengths
        shards = self._scheduler.shards
        shards[:] = [_ForcedShard(sampler.shape, lengths) for _ in shards]

    def _push(self, sequence: DecodeSequence, tokens: SlotTokens, slot: int) -> bool:
        ended = super()._push(sequence, tokens, slot)
        return ended or sequence.count == _length(self._lengths, sequence)


def _length(lengths: np.ndarray, sequence: DecodeSequence) -> int:
    return int(lengths[sequence.admitted.ticket, sequence.number])


@dataclasses.dataclass
class Refill(SlotBenchmark):
    """Speed of the same answers with refilled slots ("refill") and in fixed batches ("fixed").

    Every answer ends at a length of its own, on the device and unknown to the scheduler, as a stop
    token would. Either all requests are submitted at once, or in waves that fill the slots. A wave
    starts when the last answer of the wave before has ended.

    "..._tokens_per_s" is answer tokens over the whole time, prefill included. "..._steps" counts
    decode passes; a pass takes longer the more answers it samples. For refill only:
    "starved_slot_steps" is the share of slot steps that sampled nothing while requests were queued,
    and "padded_group_slots" the share of places without a sequence in the decoded group rows.

    Raises:
      ValueError: if there are fewer slots than answers in a group.
    """

    width: Annotated[int, "model width D, small: CPUs sample 200,000 tokens in minutes"] = 64
    vocab: Annotated[int, "vocabulary V"] = 896
    slots: Annotated[int, "answers sampled at once, over all devices"] = 32
    requests: Annotated[int, "prompts; the paper's step has 128"] = 32
    prompt: Annotated[int, "prompt tokens P, few: prefill is not what is compared"] = 128
    mean: Annotated[int, "mean of the geometric lengths of answers, in tokens"] = 400
    cap: Annotated[int, "cap of an answer, which plans reckon with"] = 4096

    def run(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        lengths = rng.geometric(1 / self.mean, size=(self.requests, self.group))
        lengths = np.minimum(lengths, self.cap)
        prompts = rng.integers(self.vocab, size=(self.requests, self.prompt)).tolist()
        sampler = self.make_slots(self.prompt, self.cap, self.group)
        if self.slots < self.group:
            raise ValueError(f"slots = {self.slots}: must be at least group = {self.group}")
        params = random_params(self.model, self.dtype)
        wave = self.slots // self.group
        waves = [slice(i, i + wave) for i in range(0, self.requests, wave)]
        # The same sampler and lengths for both; only the time of submission differs.
        kinds = {"refill": [slice(None)], "fixed": waves}
        counts = {len(prompts[part]) for parts in kinds.values() for part in parts}
        _compile(sampler.start_session(params), [(self.group, count) for count in counts])
        line: dict[str, Any] = {"tokens": int(lengths.sum())}
        for kind, parts in kinds.items():
            session = _ForcedSession(sampler, params, lengths)
            clock = time.perf_counter()
            answers_by_part = [
                sample_answers(session, prompts[part], self.group, self.cap) for part in parts
            ]
            seconds, c = time.perf_counter() - clock, session.counts
            sampled = [
                [len(s.tokens) for s in samples] for part in answers_by_part for samples in part
            ]
            assert sampled == lengths.tolist()
            line |= {f"{kind}_s": seconds, f"{kind}_tokens_per_s": c.tokens / seconds}
            line[f"{kind}_steps"] = c.decode_steps
            if kind == "refill":
                line["starved_slot_steps"] = c.starved_slot_steps / c.slot_steps
                line["padded_group_slots"] = c.padded_group_slots / c.group_slot_steps
        return line | {
            "ratio": line["refill_tokens_per_s"] / line["fixed_tokens_per_s"],
            "step_ratio": line["fixed_steps"] / line["refill_steps"],
        }


# ------------------------------------------------------------------------------------------ Spell


@dataclasses.dataclass
class SpellBenchmark(SlotBenchmark):
    """Seconds of one SPELL step by phase; all `questions` are accepted and trained on.

    "begin_s" is the time to cast the weights and allocate the pool. "..._s" is the time of a phase,
    "..._s_per_question" is that time divided by `questions`, and "..._prompts_per_s" counts
    finished requests. "..._reused_tokens" counts prompt tokens that were found in the KV cache and
    not prefilled again. "extrapolated_s" = begin_s + extrapolated_questions times the sum of the
    seconds per question. It is an open extrapolation to a step in which nothing is refused, at this
    run's lengths and on this machine. A decode pass costs about as much for few slots as for all.
    The extrapolation is therefore too high if `questions` leave slots empty; the questioner has
    only one answer per question. With --about=K, a questioner prompt has K answers, the K questions
    about its documents. The update has all responder and questioner rows and the paper's
    share of verifier rows, at least one group.

    Verifier prompts start with the same template, and the prompts of a question also share it.
    With --apart=1, a phase "apart", which is no part of the step, has the same prompts with other
    tokens at the start, so that no page is shared.
    """

    questions: Annotated[int, "questions, all of them accepted; the paper's step has 128"] = 2
    prompt: Annotated[int, "tokens of a responder's prompt; 16,384 at the paper's scale"] = 2048
    shown: Annotated[int, "tokens of a questioner's prompt, which has part of the documents"] = 1024
    about: Annotated[int, "questions about the same documents"] = 1
    response: Annotated[int, "tokens of an answer S; about 400 at the paper's scale"] = 64
    votes: Annotated[int, "verdicts on an answer G_v"] = 8
    template: Annotated[int, "tokens that all verifier prompts begin with"] = 192
    question: Annotated[int, "tokens of a question"] = 64
    answer: Annotated[int, "tokens of the one answer that ends a verifier prompt"] = 64
    verdict: Annotated[int, "tokens of a verdict; about 60 at the paper's scale"] = 16
    slots: Annotated[int, "answers sampled at once, over all devices"] = 16
    budget: Annotated[int, "tokens of a micro-batch"] = 8192
    remat: Annotated[str, "what the backward pass recomputes"] = "none"
    apart: Annotated[int, "1: also verifier prompts without a common prefix"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        verifier = self.template + self.question + self.answer
        self.longest_prompt = max(self.prompt, self.shown, verifier)
        # Phase -> answers to a prompt, tokens of an answer.
        self.phases = {
            "questioner": (self.about, self.response),
            "grounding": (1, self.response),
            "responder": (self.group, self.response),
            "verifier": (self.votes, self.verdict),
        }
        if self.apart:
            self.phases["apart"] = self.phases["verifier"]

    def run(self) -> dict[str, Any]:
        longest_answer = max(self.response, self.verdict)
        sampler = self.make_slots(self.longest_prompt, longest_answer, self.group)
        learner = self._learner()
        state = learner.init(jax.random.key(0))
        rng = np.random.default_rng(self.seed)
        prompts = self.prompts(rng)
        sizes = [(group, len(prompts[phase])) for phase, (group, _) in self.phases.items()]
        _compile(sampler.start_session(learner.cast(state.params)), sizes)
        # A tiny group compiles the update's programs: the learner has one bucket.
        state, _ = learner.update(
            state, [packing.TrainGroup([0], [Sample(np.zeros(1, np.int32))], [1.0], "answers")]
        )
        jax.block_until_ready(state)

        clock = time.perf_counter()
        # One session for all phases, as in a run: later phases find documents in its pages.
        session = sampler.start_session(learner.cast(state.params))
        jax.block_until_ready(session._state)
        line: dict[str, Any] = {"begin_s": time.perf_counter() - clock}
        sampled: dict[str, list[list[Sample]]] = {}
        for seed, (phase, (group, tokens)) in enumerate(self.phases.items(), 1):
            before, clock = session.reused_tokens, time.perf_counter()
            sampled[phase] = sample_answers(session, prompts[phase], group, tokens, seed)
            line[f"{phase}_s"] = time.perf_counter() - clock
            line[f"{phase}_prompts_per_s"] = len(prompts[phase]) / line[f"{phase}_s"]
            line[f"{phase}_prompt_tokens"] = sum(map(len, prompts[phase]))
            line[f"{phase}_reused_tokens"] = session.reused_tokens - before
            line[f"{phase}_answer_tokens"] = len(prompts[phase]) * group * tokens
        del session  # its pages and weights, before the update needs the memory
        groups = self.train_groups(rng, prompts, sampled)
        clock = time.perf_counter()
        state, numbers = learner.update(state, groups)
        jax.block_until_ready(state)
        line["update_s"] = time.perf_counter() - clock
        assert not numbers["refused_answers"]
        line["update_tokens"] = sum(group.tokens for group in groups)
        line |= {name: numbers[name] for name in ("micro_batches", "fill", "sampler_difference")}
        seconds = {phase: line[f"{phase}_s"] for phase in (*self.phases, "update")}
        seconds.pop("apart", None)
        step, extrapolated_questions = sum(seconds.values()), SpellConfig().questions
        line |= {f"{phase}_s_per_question": s / self.questions for phase, s in seconds.items()}
        return line | {
            "step_s": line["begin_s"] + step,
            "extrapolated_questions": extrapolated_questions,
            "extrapolated_s": line["begin_s"] + extrapolated_questions / self.questions * step,
        }

    def _learner(self) -> Learner:
        """Make a learner with rows for the responder's groups about the same documents.

        A micro-batch has at most `questions` rows.
        """
        answers = max(self.group * self.response, self.votes * self.verdict)
        tree = self.longest_prompt - self.question + self.about * (self.question + answers)
        length = -(-tree // 128) * 128
        policy = dataclasses.replace(self.model, remat=self.remat)
        budget = min(self.budget, self.questions * length)
        return make_learner(policy, packing.Bucket(length, length), budget, self.dtype)

    def prompts(self, rng: np.random.Generator) -> dict[str, Prompts]:
        """Make random prompts for each phase.

        A responder's question comes after its documents, so that questions about the same documents
        share that prefix. They were sampled from one questioner prompt, which shares no prefix with
        them.
        """

        def text(tokens: int) -> list[int]:
            return rng.integers(self.vocab, size=tokens).tolist()

        count = self.questions
        sets = -(-count // self.about)
        shown = [text(self.shown) for _ in range(sets)]
        documents = [text(self.prompt - self.question) for _ in range(sets)]
        questions = [text(self.question) for _ in range(count)]
        template, verifier = text(self.template), []
        for _ in range(count):
            prefix = template + text(self.question)
            verifier += [prefix + text(self.answer) for _ in range(self.group)]
        return {
            "questioner": shown,
            "grounding": questions,
            "responder": [documents[i // self.about] + questions[i] for i in range(count)],
            "verifier": verifier,
            "apart": [[*divmod(i, self.vocab), *p[2:]] for i, p in enumerate(verifier)],
        }

    def train_groups(
        self,
        rng: np.random.Generator,
        prompts: dict[str, Prompts],
        sampled: dict[str, list[list[Sample]]],
    ) -> list[packing.TrainGroup]:
        """Make the training groups of the step, with random rewards."""
        # A step trains on all responder and questioner rows, and an eighth as many verifier rows.
        verdicts = self.questions * self.group * SpellConfig().verifier.share
        counts = {"responder": self.questions, "questioner": len(prompts["questioner"])}
        counts["verifier"] = max(1, int(verdicts / self.votes))
        return [
            random_group(rng, prompt, samples, role)
            for role, count in counts.items()
            for prompt, samples in list(zip(prompts[role], sampled[role], strict=True))[:count]
        ]
