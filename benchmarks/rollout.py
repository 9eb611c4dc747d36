"""Benchmarks of rollout speed: continuous batching, prefix sharing, and a whole SPELL step.

1. Weights and tokens are random. Answer lengths are forced: no token ends an answer.
2. `refill` ends every answer at a length of its own, on the device and unknown to the scheduler, as
   a stop token would. Either all requests are submitted at once, or in waves that fill the slots,
   each after the one before has ended.
3. `verify` samples verdicts on many answers, once with prompts that share a prefix and once with
   the same prompts made to differ at the start.
4. `spell` runs the phases of a step one after another in one session and updates on the answers. It
   extrapolates the seconds per question of each phase to the paper's number of questions.
5. Times are from one run after one that compiles; those of `verify` are the best of `repeats`.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.sample import HOW, devices, make_sampler, random_params
from spell_jax.algorithms.base import Reply
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.learner import advantages, loss, packing
from spell_jax.learner.learner import Learner
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options, Sample, SampleRequest
from spell_jax.sampler.scheduler import DecodeSequence, Lane, Shape, Shard
from spell_jax.sampler.session import Session

Prompts = list[list[int]]


def _pages(options: argparse.Namespace, prompt: int, response: int) -> int:
    """Pages of the pool: as --cache says, or enough that no slot ever lacks one."""
    if options.cache:
        return options.cache // options.page_size
    return options.slots * sum(-(-tokens // options.page_size) for tokens in (prompt, response))


def _sizes(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the output line for the options and the policy's architecture."""
    line = {name: value for name, value in vars(options).items() if name != "name"}
    shape = {"layers": policy.layers, "width": policy.width, "vocab": policy.vocab_size}
    return {"bench": options.name, **line, **shape}


def _warm_up(session: Session, asked: Sequence[tuple[int, int]]) -> None:
    """Compile prefill, decode and key programs for requests of these (group, prompts) sizes."""
    for group, prompts in asked:
        request_keys(jax.random.key(0), prompts)
        session.sample([[0]], group, jax.random.key(0), Options(**HOW, max_tokens=1))


# ----------------------------------------------------------------------------------------- Refill


class _ForcedShard(Shard):
    """Shard that makes answers end at forced lengths on the device.

    The scheduler still plans for the cap, as it does when a stop token may end an answer.
    """

    def __init__(self, shape: Shape, lengths: dict[tuple[int, int], int]):
        super().__init__(shape)
        self._lengths = lengths

    def allocate_pages(self, lane: Lane, steps: int) -> dict[DecodeSequence, int]:
        limits = super().allocate_pages(lane, steps)
        return {s: min(limit, self._lengths[_name(s)]) for s, limit in limits.items()}


class ForcedSession(Session):
    """Session with a forced length for each answer of each request."""

    def __init__(self, sampler: Sampler, params: Any):
        super().__init__(sampler, params)
        self._lengths: dict[tuple[int, int], int] = {}
        shape, lengths = sampler.shape, self._lengths
        shards: list[Shard] = [_ForcedShard(shape, lengths) for _ in self._scheduler.shards]
        self._scheduler.shards = shards

    def ask(self, request: SampleRequest, lengths: Sequence[int]) -> int:
        """Queue a request.

        Args:
          request: request for G answers.
          lengths: length in tokens of each of the G answers.

        Returns:
          The request's ticket.
        """
        ticket = self.submit(request)
        self._lengths |= {(ticket, i): int(length) for i, length in enumerate(lengths)}
        return ticket

    def _push(self, sequence: DecodeSequence, sampled: Any, slot: int) -> bool:
        ended = super()._push(sequence, sampled, slot)
        return ended or sequence.count == self._lengths[_name(sequence)]


def _name(sequence: DecodeSequence) -> tuple[int, int]:
    return sequence.prefilled.ticket, sequence.number


def bench_refill(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Sample the same answers with refilled slots ("refill") and in fixed batches ("fixed").

    "..._tokens_per_s" is answer tokens over the whole time, prefill included. "..._steps" counts
    decode passes; a pass takes longer the more answers it samples. "ideal_ratio" follows from the
    lengths alone: the steps of fixed batches (sum of their longest answers) over the fewest steps
    with all slots busy. "..._filled" is the share of slot steps that sampled a token. It includes
    the end of the run, when there are fewer sequences than slots. Two shares are for refill only:
    "idle" of slot steps that sampled nothing while requests were queued, and "padded_group_slots"
    of places without a sequence in the decoded group rows.

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "refill".

    Returns:
      The measurements, JSON-able.

    Raises:
      ValueError: if there are fewer slots than answers in a group.
    """
    policy = dataclasses.replace(policy, max_positions=options.prompt + options.cap)
    rng = np.random.default_rng(options.seed)
    lengths = rng.geometric(1 / options.mean, size=(options.requests, options.group))
    lengths = np.minimum(lengths, options.cap)
    prompts = rng.integers(policy.vocab_size, size=(options.requests, options.prompt)).tolist()
    mesh = meshes.make_mesh()
    sampler = make_sampler(
        policy,
        mesh,
        options,
        _pages(options, options.prompt, options.cap),
        max_tokens=options.cap,
        max_verdict_tokens=1,
        max_prompt=options.prompt,
        slots=options.slots,
        samples_per_prompt_batch=options.group,
        decode_tokens=options.decode,
    )
    slots = sampler.shape.slots * sampler.shards
    if slots < options.group:
        raise ValueError(f"slots = {slots}: must be at least group = {options.group}")
    params = random_params(policy, mesh, options.dtype)
    _warm_up(sampler.start_session(params), [(options.group, len(prompts))])
    wave = slots // options.group
    waves = [range(i, min(i + wave, len(prompts))) for i in range(0, len(prompts), wave)]
    line = _sizes(policy, options) | {"slots": slots, "tokens": int(lengths.sum())}
    for kind, parts in {"refill": [range(len(prompts))], "fixed": waves}.items():
        seconds, session = _answer_in_parts(sampler, params, prompts, lengths, parts, options.cap)
        c = session.counts
        line |= {f"{kind}_s": seconds, f"{kind}_tokens_per_s": c.tokens / seconds}
        line |= {f"{kind}_steps": c.decode_steps, f"{kind}_filled": c.tokens / c.slot_steps}
        if kind == "refill":
            line |= {
                "idle": c.starved_slot_steps / c.slot_steps,
                "padded_group_slots": c.padded_group_slots / c.group_slot_steps,
            }
    longest = sum(int(lengths[part].max()) for part in map(list, waves))
    line["ratio"] = line["refill_tokens_per_s"] / line["fixed_tokens_per_s"]
    line["step_ratio"] = line["fixed_steps"] / line["refill_steps"]
    line["ideal_ratio"] = longest / -(-int(lengths.sum()) // slots)
    return line | devices()


def _answer_in_parts(
    sampler: Sampler, params, prompts: Prompts, lengths, parts: Sequence[range], cap: int
) -> tuple[float, ForcedSession]:
    """Sample all answers, one part of the prompts after another.

    Returns:
      The seconds, and the session with its counts.
    """
    keys = request_keys(jax.random.key(1), len(prompts))
    session, found = ForcedSession(sampler, params), {}
    clock = time.perf_counter()
    for part in parts:
        for i in part:
            how = Options(**HOW, max_tokens=cap)
            session.ask(SampleRequest(prompts[i], len(lengths[i]), keys[i], how), lengths[i])
        found |= dict(session.results())
    seconds = time.perf_counter() - clock
    sampled = [[len(sample.tokens) for sample in found[i]] for i in range(len(prompts))]
    assert sampled == lengths.tolist()
    return seconds, session


# ----------------------------------------------------------------------------------------- Verify


def verifier_prompts(
    rng: np.random.Generator, vocab: int, options: argparse.Namespace, questions: int
) -> Prompts:
    """Make a random verifier prompt for each of `options.group` answers to each question.

    A prompt is the common template, then the question, then the answer's own tokens.
    """

    def draw(count: int) -> list[int]:
        return rng.integers(vocab, size=count).tolist()

    template, prompts = draw(options.template), []
    for _ in range(questions):
        begin = template + draw(options.question)
        prompts += [begin + draw(options.answer) for _ in range(options.group)]
    return prompts


def bench_verify(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Sample `votes` verdicts on each of G answers to each question.

    "shared" prompts start with the same template, and those of a question also share the question.
    "apart" prompts differ in their first two tokens, so that no page is shared. "..._prompts_per_s"
    counts finished requests, each with all its votes. "..._reused_tokens" counts prompt tokens that
    were found in the KV cache and not prefilled again.

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "verify".

    Returns:
      The measurements, JSON-able.
    """
    longest = options.template + options.question + options.answer
    policy = dataclasses.replace(policy, max_positions=longest + options.verdict)
    mesh = meshes.make_mesh()
    sampler = make_sampler(
        policy,
        mesh,
        options,
        _pages(options, longest, options.verdict),
        max_tokens=options.verdict,
        max_verdict_tokens=options.verdict,
        max_prompt=longest,
        slots=options.slots,
        samples_per_prompt_batch=options.votes,
        decode_tokens=options.decode,
    )
    params = random_params(policy, mesh, options.dtype)
    rng = np.random.default_rng(options.seed)
    shared = verifier_prompts(rng, policy.vocab_size, options, options.questions)
    apart = [[*divmod(i, policy.vocab_size), *prompt[2:]] for i, prompt in enumerate(shared)]
    _warm_up(sampler.start_session(params), [(options.votes, len(shared))])
    line = _sizes(policy, options) | {"slots": sampler.shape.slots * sampler.shards}
    line |= {"prompts": len(shared), "prompt_tokens": len(shared) * longest}
    how = Options(**HOW, max_tokens=options.verdict)
    for kind, prompts in {"shared": shared, "apart": apart}.items():
        seconds, reused = [], 0
        for _ in range(options.repeats):
            session = sampler.start_session(params)
            clock = time.perf_counter()
            _, reused = _ask(session, prompts, options.votes, jax.random.key(1), how)
            seconds.append(time.perf_counter() - clock)
        line |= {f"{kind}_s": min(seconds), f"{kind}_prompts_per_s": len(prompts) / min(seconds)}
        line[f"{kind}_reused_tokens"] = reused
    line["ratio"] = line["shared_prompts_per_s"] / line["apart_prompts_per_s"]
    return line | devices()


def _ask(
    session: Session, prompts: Prompts, group: int, key: jax.Array, how: Options
) -> tuple[list[list[Sample]], int]:
    """Sample answers of the forced length; also return the number of reused prompt tokens."""
    before = session.reused_tokens
    answers = [some for some in session.sample(prompts, group, key, how) if some is not None]
    assert len(answers) == len(prompts)
    assert all(len(s.tokens) == how.max_tokens for some in answers for s in some)
    return answers, session.reused_tokens - before


# ------------------------------------------------------------------------------------------ Spell

# Phase -> names of the options with the answers per prompt (None: one) and the answer's tokens.
_PHASES = {
    "questioner": (None, "response"),
    "grounding": (None, "response"),
    "responder": ("group", "response"),
    "verifier": ("votes", "verdict"),
}


def bench_spell(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Time one SPELL step phase by phase; all `questions` are accepted and trained on.

    "begin_s" is the time to cast the weights and allocate the pool. "..._s" is the time of a phase,
    and "..._s_per_question" is that time divided by `questions`. "extrapolated_s" = begin_s +
    extrapolated_questions times the sum of the latter. It is an open extrapolation to a step in
    which nothing is refused, at this run's lengths and on this machine. A decode pass costs about
    as much for few slots as for all. The extrapolation is therefore too high if `questions` leave
    slots empty; the questioner has only one answer per question. The update has all responder and
    questioner rows and the paper's share of verifier rows, at least one group.

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "spell".

    Returns:
      The measurements, JSON-able.
    """
    mesh = meshes.make_mesh()
    policy = dataclasses.replace(policy, remat=options.remat)
    sampler, learner = _spell_sampler(policy, options, mesh), _spell_learner(policy, options, mesh)
    state = learner.init(jax.random.key(0))
    params = learner.cast(state.params)
    rng = np.random.default_rng(options.seed)
    prompts = _spell_prompts(rng, policy.vocab_size, options)
    groups = {phase: _group(options, phase) for phase in _PHASES}
    _warm_up(
        sampler.start_session(params), [(groups[phase], len(prompts[phase])) for phase in _PHASES]
    )
    del params
    state, _ = learner.update(state, [packing.TrainGroup([0], [[0]], [1.0])])
    jax.block_until_ready(state)

    clock = time.perf_counter()
    session = sampler.start_session(learner.cast(state.params))
    jax.block_until_ready(session._state)
    line = _sizes(policy, options) | {"slots": sampler.shape.slots * sampler.shards}
    line |= {"begin_s": time.perf_counter() - clock}
    said = {}
    for number, (phase, group) in enumerate(groups.items()):
        how = Options(**HOW, max_tokens=getattr(options, _PHASES[phase][1]))
        key = jax.random.key(number + 1)
        clock = time.perf_counter()
        said[phase], reused = _ask(session, prompts[phase], group, key, how)
        line[f"{phase}_s"] = time.perf_counter() - clock
        line[f"{phase}_prompt_tokens"] = sum(map(len, prompts[phase]))
        line[f"{phase}_reused_tokens"] = reused
        line[f"{phase}_answer_tokens"] = len(prompts[phase]) * group * how.max_tokens
    del session
    rows = _spell_groups(rng, prompts, said, options)
    clock = time.perf_counter()
    state, numbers = learner.update(state, rows)
    jax.block_until_ready(state)
    line["update_s"] = time.perf_counter() - clock
    assert not numbers["refused_answers"]
    line |= {"update_tokens": sum(group.tokens for group in rows)}
    line |= {name: numbers[name] for name in ("micro_batches", "fill", "sampler_difference")}
    return line | _extrapolate(line, options.questions) | devices()


def _group(options: argparse.Namespace, phase: str) -> int:
    sequences, _ = _PHASES[phase]
    return getattr(options, sequences) if sequences else 1


def _extrapolate(line: dict[str, Any], questions: int) -> dict[str, Any]:
    """Seconds of the step, of each phase per question, and extrapolated to the paper's step."""
    phases, wanted = (*_PHASES, "update"), SpellConfig().questions
    each = {f"{phase}_s_per_question": line[f"{phase}_s"] / questions for phase in phases}
    return each | {
        "step_s": line["begin_s"] + sum(line[f"{phase}_s"] for phase in phases),
        "extrapolated_questions": wanted,
        "extrapolated_s": line["begin_s"] + wanted * sum(each.values()),
    }


def _longest_prompt(options: argparse.Namespace) -> int:
    verifier = options.template + options.question + options.answer
    return max(options.prompt, options.shown, verifier)


def _spell_sampler(policy: PolicyConfig, options: argparse.Namespace, mesh) -> Sampler:
    longest = _longest_prompt(options)
    return make_sampler(
        policy,
        mesh,
        options,
        _pages(options, longest, max(options.response, options.verdict)),
        max_tokens=options.response,
        max_verdict_tokens=options.verdict,
        max_prompt=longest,
        slots=options.slots,
        samples_per_prompt_batch=options.group,
        decode_tokens=options.decode,
    )


def _spell_learner(policy: PolicyConfig, options: argparse.Namespace, mesh) -> Learner:
    """Learner whose rows hold one responder group; a micro-batch has at most `questions` rows."""
    answers = max(options.group * options.response, options.votes * options.verdict)
    length = -(-(_longest_prompt(options) + answers) // 128) * 128
    bucket = packing.Bucket(length, length)
    budget = max(length, min(options.budget, options.questions * length))
    layout = packing.PackingConfig((bucket,), budget)
    return Learner(
        policy,
        OptimizerConfig(),
        loss.LossConfig(),
        layout,
        mesh,
        temperature=HOW["temperature"],
        compute_dtype=options.dtype,
    )


def _spell_prompts(
    rng: np.random.Generator, vocab: int, options: argparse.Namespace
) -> dict[str, Prompts]:
    """Make random prompts for each phase.

    A responder's question comes after its documents, so that questions about the same documents
    share that prefix. Questioner prompts share no prefix with them.
    """

    def draw(count: int) -> list[int]:
        return rng.integers(vocab, size=count).tolist()

    count = options.questions
    sets = -(-count // options.about)
    shown = [draw(options.shown) for _ in range(count)]
    documents = [draw(options.prompt - options.question) for _ in range(sets)]
    questions = [draw(options.question) for _ in range(count)]
    return {
        "questioner": shown,
        "grounding": questions,
        "responder": [documents[i // options.about] + questions[i] for i in range(count)],
        "verifier": verifier_prompts(rng, vocab, options, count),
    }


def _spell_groups(
    rng: np.random.Generator,
    prompts: dict[str, Prompts],
    said: dict[str, list[list[Sample]]],
    options: argparse.Namespace,
) -> list[packing.TrainGroup]:
    """Training groups of the step, with random rewards."""
    verdicts = options.questions * options.group * SpellConfig().verifier_share
    counts = {
        "responder": options.questions,
        "questioner": options.questions,
        "verifier": max(1, int(verdicts / options.votes)),
    }
    return [
        Reply(prompt, samples, ()).group(
            advantages.group_advantages(rng.random(len(samples))), role
        )
        for role, count in counts.items()
        for prompt, samples in list(zip(prompts[role], said[role], strict=True))[:count]
    ]
