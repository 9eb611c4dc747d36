"""SPELL: one policy questions, answers and judges itself (the paper on one page).

1. propose: the questioner reads m documents (and its earlier questions about the cluster) and
   writes a question with a reference answer.
2. filter: a question that is answered right without documents is ungrounded.
3. reference (option): a frozen reader, a copy of the first policy, reads the same m documents. Its
   answer replaces the reference if its samples agree.
4. answer: the responder reads all n documents and answers G times.
5. verify: the verifier compares each answer with the reference, G_v times; the majority decides.
6. reward: max(rule, majority) for the responder, agreement with the majority for the verifier, a
   Gaussian of the share of solved answers around one half for the questioner.
7. groups: groups that are trained on, with their advantages: one GRPO update for all roles.

Parts 1 to 5 are coroutines that run concurrently for all questions of a round. An external judge
scores the answers of parts 2 and 4; with one, part 4 begins when part 3 has ended for all. Rounds
of parts 1 to 6 are repeated until enough questions have answers of mixed reward. Numbers in
parentheses are equations of the paper; "spec" is docs/algorithm.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.episode import ask_judge, judge_answers
from spell_jax.algorithms.spell import episode as spell_episode
from spell_jax.algorithms.spell import frozen_reader, progress
from spell_jax.algorithms.spell.config import PROGRESS, SpellConfig
from spell_jax.algorithms.spell.episode import Advantages, SpellEpisode, documents_of
from spell_jax.algorithms.spell.record import add_metrics, annotate, make_record
from spell_jax.data.clusters import CLOZE, LETTERS, Cluster
from spell_jax.learner.advantages import questioner_advantages
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, AskModels, Reply
from spell_jax.runtime import fault_injection
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import cloze, evidence, parsing, rewards, rules, selection
from spell_jax.selfplay.given_questions import scores_itself
from spell_jax.selfplay.memory import Entry, QuestionMemory
from spell_jax.selfplay.probes import ProbeSet


class Spell:
    """The algorithm; see base.Algorithm."""

    trained = ()
    # Temperature of parts 1 to 3; None: sampler.temperature, at which the questioner is trained.
    writing_temperature: float | None = None

    def __init__(self, config: SpellConfig, context: AlgorithmContext):
        self.config = config
        self.prompts = context.prompts
        self.stream = context.deal(context.clusters())
        self.memory = QuestionMemory(config.memory)
        self.probes = ProbeSet(config.probes)
        self.model_names = config.frozen_copies
        self._count = context.count_tokens
        self._cap = context.prompt_cap
        self._judge = context.judge
        self._teacher_prompt = context.teacher_prompt

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[SpellEpisode]:
        """Run rounds of self-play, up to the cap, until enough questions have mixed rewards."""
        rng = np.random.default_rng([*key])
        if self.config.mapping == PROGRESS:
            progress.measure_probes(self.config, self.probes, ask, self.prompts, self.stream)
        batches = (self._roll_out(ask, self.start_episodes(rng)) for _ in itertools.count())
        episodes = self.fill(batches, rng)
        # Memory is read as of the start of a step and written at its end (spec 12).
        self.remember(episodes)
        if self.config.mapping == PROGRESS:
            progress.push_probes(self.config, self.probes, episodes, rng)
        return episodes

    def _roll_out(self, ask: AskModels, episodes: Sequence[SpellEpisode]) -> list[SpellEpisode]:
        # Judge and duplicate search need all proposals of a round. Without both, each question runs
        # through all parts by itself, and no slot waits for the slowest proposal.
        if self._judge is None and self.config.questions_per_cluster == 1:
            return ask.run_all(self.rollout_one, episodes)
        return ask.run_all(self.solve, self.write_all(ask, episodes))

    def fill(
        self, batches: Iterable[list[SpellEpisode]], rng: np.random.Generator
    ) -> list[SpellEpisode]:
        """Reward one answered batch per round until enough questions have mixed rewards.

        At most max_generations batches are taken from `batches`, each only when its round begins.
        """
        episodes: list[SpellEpisode] = []
        # Too few questions: the step goes on with the questions it has. The paper's Algorithm 1
        # (line 6) repeats rounds without end; its code ends the run.
        for batch in itertools.islice(batches, self.config.max_generations):
            answered = ask_judge(self._judge, self.config.rule, batch)
            episodes += [self.reward(e, rng) for e in answered]
            if sum(e.mixed for e in episodes) >= self.config.questions:
                break
        return episodes

    async def rollout_one(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 1 to 5 of one episode."""
        proposed = await self.propose(ask, episode)
        return await self.solve(ask, await self.check(ask, proposed))

    def write_all(self, ask: AskModels, episodes: Sequence[SpellEpisode]) -> list[SpellEpisode]:
        """Run parts 1 to 3 of all episodes; drop duplicates and judge answers without documents."""
        proposed = self.drop_duplicates(ask.run_all(self.propose, episodes))
        written = ask.run_all(self.check, proposed)
        if self._judge is None:
            return written
        places = [n for n, e in enumerate(written) if e.status == "accepted"]
        blind = [(e, e.blind_stated, e.blind_scores) for e in (written[n] for n in places)]
        judged = judge_answers(self._judge, self.config.rule, blind)
        for n, (scores, _) in zip(places, judged, strict=True):
            written[n] = self._reject_known(replace(written[n], blind_scores=scores))
        return written

    async def check(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 2 and 3: settle the reference and apply all filters, or record why not.

        With a judge, answers without documents are not compared yet (`write_all`).
        """
        fault_injection.point("proposed")
        return await self.read_reference(ask, await self.filter(ask, episode))

    async def solve(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 4 and 5."""
        episode = await self.answer(ask, episode)
        fault_injection.point("answered")
        episode = await self.verify(ask, episode)
        fault_injection.point("verified")
        return episode

    # 1. The questioner writes a question.

    def start_episodes(self, rng: np.random.Generator) -> list[SpellEpisode]:
        """Start K episodes of each cluster, which sample from the same questioner prompt.

        With answer_first each episode has its own document and answer.
        """
        count = self.config.questions_per_cluster
        dealt = self.stream.next(self.config.generation_batch // count)
        starts = count if self.config.answer_first else 1
        pairs = [pair for pair in dealt for _ in range(starts)]
        started = [self._start_episode(task, cluster, rng) for task, cluster in pairs]
        return [episode for episode in started for _ in range(count // starts)]

    def _start_episode(self, task: str, cluster: Cluster, rng: np.random.Generator) -> SpellEpisode:
        """Start an episode; over the prompt cap, drop new documents, then the oldest history."""
        history = self.memory.get(task, cluster.id)
        seen_documents = documents_of(history)
        unseen = [i for i in range(len(cluster.documents)) if i not in seen_documents]
        m = int(rng.choice(self.config.documents))
        room = len(cluster.documents) - self.config.unread_documents
        if room < 1:
            return SpellEpisode(
                task, cluster, (), (), status="too_small", reason="too_few_documents"
            )
        # A first question leaves `unread_documents` unread: the paper demands m < n (spec 2.1).
        new_count = min(m, room, len(unseen))
        new = [int(i) for i in rng.permutation(unseen)[:new_count]]
        # The prompt states the right option's letter, sampled uniformly (spec 2.2).
        letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
        cues = self.config.cues
        cue, span = cues[rng.integers(len(cues))] if cues else "", ""
        if self.config.answer_first and new:
            spans = cloze.answer_spans(cluster.documents[new[0]])
            spans = [text for text in spans if scores_itself(text, task)]
            if not spans:
                return SpellEpisode(task, cluster, (), (), status="too_small", reason="no_span")
            span = spans[rng.integers(len(spans))]
            cue = self.prompts.answer_first(span)
        leaks = self.config.gate_leak > 0 and rng.random() < self.config.gate_leak
        dropped = 0
        # New documents go first, then the oldest question (spec 2.2).
        while True:
            shown = tuple(sorted(documents_of(history) | set(new)))
            documents = [cluster.documents[i] for i in shown]
            text = self.prompts.questioner(task, documents, history, letter, cue)
            smallest = not history and len(new) <= 1
            if smallest or self._count(text) <= self._cap:
                return SpellEpisode(
                    task, cluster, shown, history, dropped, m > room, letter, cue, text, span, leaks
                )
            dropped += 1
            if new and (history or len(new) > 1):
                new.pop()
            else:
                history = history[1:]
                if not history:  # the questioner needs at least one document
                    new = [int(rng.integers(len(cluster.documents)))]

    async def propose(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for a question and its reference, and parse the reply."""
        c = self.config
        if not episode.questioner_prompt:
            return episode
        (reply,) = replies = await ask(
            "questioner",
            [episode.questioner_prompt],
            temperature=self.writing_temperature,
            **c.question_options,
        )
        if reply is None:
            return episode.without_reply("questioner", replies)
        (text,) = reply.texts
        parsed, hidden = c.parse_question(text, episode.task, self._count), ""
        # truncated = "zero": a proposal that the token cap cut off counts for nothing, even if its
        # text parses.
        if parsed.status == "accepted" and not reply.scored_texts[0]:
            parsed = parsing.Parsed("bad_format", reason="truncated")
        if episode.task == CLOZE:
            documents = episode.cluster.documents
            shown = [documents[i] for i in episode.shown]
            parsed, hidden = cloze.make_gap(parsed, shown, documents)
        # With answer_first a rule has chosen the answer. A questioner that states another answer
        # evades the rule.
        is_asked = not episode.span or rules.same_answer(parsed.answer, episode.span, episode.task)
        if parsed.status == "accepted" and not is_asked:
            parsed = parsing.Parsed("bad_format", reason="another_answer")
        is_bad = parsed.status == "bad_format"
        # Over-long and non-numeric references are declined. The paper's text punishes all errors
        # of format (7), its code does not punish these.
        declined = parsed.status == "declined" and parsed.reason != parsing.NOTHING_TO_ASK
        is_punished = (is_bad and c.format_penalty) or (declined and c.decline_penalty)
        return replace(
            episode,
            proposal=reply,
            status=parsed.status,
            reason=parsed.reason,
            question=parsed.question,
            hidden=hidden,
            reference=parsed.answer,
            own_reference=parsed.answer,
            reward=rewards.BAD_FORMAT if is_punished else None,
        )

    def drop_duplicates(self, episodes: Sequence[SpellEpisode]) -> list[SpellEpisode]:
        """End each episode that repeats an earlier question of the same task and cluster."""
        accepted = [n for n, e in enumerate(episodes) if e.status == "accepted"]
        pairs = [(f"{e.task}/{e.cluster.id}", e.question) for e in (episodes[n] for n in accepted)]
        twins = {accepted[i] for i in selection.duplicates(pairs)}
        return [replace(e, status="duplicate") if n in twins else e for n, e in enumerate(episodes)]

    # 2. Questions that need no documents are ungrounded.

    async def filter(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Reject an accepted question that is answered right without documents, by the rule."""
        e, samples = episode, self.config.grounding_samples
        if e.status != "accepted" or not samples:
            return e
        # Instead of documents the prompt has the word `Empty` (spec 2.5).
        prompt = self.prompts.responder(e.task, (), e.question)
        (reply,) = await ask("responder", [prompt], samples, temperature=self.writing_temperature)
        # Without a reply the question passes: no answer shows that it needs no documents.
        texts = () if reply is None else reply.scored_texts
        blind = self.config.read_answers(texts, e.task)
        scores = self.config.score_answers(blind, e.reference, e.task)
        stated = self.config.state_answers(texts, e.task)
        e = replace(e, blind=blind, blind_stated=stated, blind_scores=scores)
        return self._reject_known(e) if self._judge is None else e

    def _reject_known(self, e: SpellEpisode) -> SpellEpisode:
        is_known = sum(e.blind_scores) >= self.config.grounding_threshold
        return spell_episode.reject(e, "known_without_documents") if is_known else e

    # 3. (Option) A frozen copy of the first policy states the reference.

    async def read_reference(self, ask: Ask, e: SpellEpisode) -> SpellEpisode:
        """Replace the reference by the frozen reader's answer, or reject the question."""
        if e.status != "accepted" or not self.config.has_reader:
            return e
        temperature = self.writing_temperature
        e = await frozen_reader.read_reference(self.config, self.prompts, ask, e, temperature)
        # The reader's answer is a new reference, to which the answers without documents are
        # compared again.
        return self._reject_known(e) if e.status == "accepted" and self._judge is None else e

    # 4. The responder answers from all documents.

    async def answer(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for G answers to an accepted question; a prompt over the cap ends the episode."""
        e = episode
        if e.status != "accepted":
            return e
        c = self.config
        # All n documents in corpus order. A prompt over the cap is refused, and nothing is cut
        # (spec 4).
        text = self.prompts.responder(e.task, c.as_read(e.documents), e.question)
        (reply,) = replies = await ask("responder", [text], c.group_size)
        if reply is None:
            return e.without_reply("responder", replies)
        predictions = c.read_answers(reply.scored_texts, e.task)
        rule = c.score_answers(predictions, e.reference, e.task)
        named = [evidence.named_document(text) in e.shown for text in reply.scored_texts]
        if c.document_share:
            e = replace(e, named=tuple(named))
        stated = c.state_answers(reply.scored_texts, e.task)
        return replace(e, response=reply, predictions=predictions, stated=stated, rule=rule)

    # 5. The verifier compares answers with the reference.

    async def verify(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for G_v votes on each answer that states a prediction (4)."""
        e = episode
        judged: list[Reply | None] = [None] * len(e.predictions)
        votes: list[tuple[int, ...]] = [()] * len(e.predictions)
        unjudged = 0
        if self.config.has_verifier:
            # A response that states no answer keeps the rule's score and costs no votes (spec 6).
            numbered = [(i, p) for i, p in enumerate(e.predictions) if p is not None]
            # The extracted answer, as in the public code, instead of the response of Algorithm 1
            # (line 17): prompts stay short. Only external judges read the words of a number.
            texts = [self.prompts.verifier(e.question, p, e.reference) for _, p in numbered]
            votes_per_answer, options = self.config.verifier_group_size, self.config.verdict_options
            replies = await ask("verifier", texts, votes_per_answer, **options)
            for (i, _), reply in zip(numbered, replies, strict=True):
                judged[i] = reply
                votes[i] = tuple(map(parsing.parse_verdict, reply.scored_texts if reply else ()))
            unjudged = replies.count(None)
        return replace(e, judged=tuple(judged), votes=tuple(votes), unjudged=unjudged)

    # 6. Rewards.

    def reward(self, episode: SpellEpisode, rng: np.random.Generator) -> SpellEpisode:
        """Compute the rewards of the answers (6), and from their mean the questioner's (7)."""
        if episode.response is None:
            return episode
        scores = tuple(
            self._responder_reward(rule, rewards.majority(votes), rng)
            for rule, votes in zip(episode.rule, episode.votes, strict=True)
        )
        if share := self.config.document_share:
            pairs = zip(scores, episode.named, strict=True)
            scores = tuple((1 - share) * score + share * named for score, named in pairs)
        # One answer that truncated = "drop" leaves does not tell how hard its question is.
        c, e = self.config, replace(episode, scores=scores, reward=0.0 if scores[1:] else None)
        # The questioner earns 0 where all answers are right or all are wrong (spec 2.6).
        if not e.mixed:
            return e
        if c.mapping == PROGRESS:
            return replace(e, reward=self.probes.progress(e.task, e.question))
        return replace(e, reward=rewards.questioner_reward(e.mean_score, c.mapping, c.mu, c.sigma))

    def _responder_reward(self, rule: float, vote: int, rng: np.random.Generator) -> float:
        how = self.config.responder_reward
        # A control: rewards without information must destroy the policy.
        if how == "random":
            return float(rng.integers(2))
        # A void verdict, of mostly malformed votes, leaves the rule's score (spec 12).
        if vote == -1 or how == "rule":
            return rule
        combined = {
            "max": rewards.combine(rule, vote),
            "verifier": float(vote),
            "mean": (rule + vote) / 2,
            "min": min(rule, float(vote)),
        }
        return combined[how]

    def _verifier_rewards(self, votes: Sequence[int]) -> list[float]:
        # A malformed vote earns -1, as in the public code (spec 6): the penalty preserves the
        # format.
        return rewards.verifier_rewards(votes, -1.0 if self.config.malformed_penalty else 0.0)

    def remember(self, episodes: Sequence[SpellEpisode]) -> None:
        """Write a step's solvable questions to the memory."""
        for e in episodes:
            if e.response is None:
                continue
            # Algorithm 1 (line 19) stores questions with r_que > 0, the public code also questions
            # that every answer solves.
            measure = e.mean_score if self.config.memory_solved else (e.reward or 0.0)
            if measure > 0:
                read = e.new if self.config.memory_documents == "new" else e.shown
                self.memory.push(e.task, e.cluster.id, Entry(read, e.question, e.reference))

    # 7. Groups that are trained on.

    def groups(
        self, episodes: Sequence[SpellEpisode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Return the training groups of all three roles with their advantages (8, 9)."""
        answered = [n for n, e in enumerate(episodes) if e.response is not None]
        scores = [episodes[n].scores for n in answered]
        # The first usable groups in request order (spec 7.2): the order in which answers end
        # depends on timing, and the choice must not.
        batch, surplus = selection.split_groups(scores, self.config.questions)
        good = [answered[i] for i in (batch + surplus if self.config.keep_surplus else batch)]
        advantages: Advantages = {
            (n, "responder", 0): self.config.to_advantages(episodes[n].scores) for n in good
        }
        # Generators of their own: a switch of one role does not change the samples of another.
        if self.config.train_questioner:
            rng = np.random.default_rng([*key, 1])
            advantages |= self._questioner_advantages(episodes, good, rng)
        if self.config.train_verifier:
            rng = np.random.default_rng([*key, 2])
            advantages |= self._verifier_advantages(episodes, len(good), rng)
        groups = [
            self.responder_group(episodes[n], values)
            if role == "responder"
            else episodes[n].reply(role, i).group(values, role)
            for (n, role, i), values in advantages.items()
        ]
        return groups, annotate(episodes, advantages, self.config)

    def responder_group(self, episode: SpellEpisode, advantages: Sequence[float]) -> TrainGroup:
        """Return the group of a question's answers; a teacher reads the questioner's documents."""
        e = episode
        group = e.reply("responder", 0).group(advantages, "responder")
        if self._teacher_prompt is None:
            return group
        shown = [self.config.as_read(e.documents)[i] for i in e.shown]
        prompt = self._teacher_prompt(self.prompts.responder(e.task, shown, e.question))
        return replace(group, reference_prompt=prompt)

    def _questioner_advantages(
        self, episodes: Sequence[SpellEpisode], good: Sequence[int], rng: np.random.Generator
    ) -> Advantages:
        """Normalize rewards of the kept and of sampled bad questions (reward 0 or below) (9)."""
        bad = [
            n
            for n, e in enumerate(episodes)
            # A declined or overlong question has no reward and is no negative (spec 7.4).
            if e.reward is not None and e.reward <= 0 and not e.mixed
        ]
        tasks = [e.task for e in episodes]
        negatives = selection.questioner_negatives(
            [tasks[n] for n in good],
            [tasks[n] for n in bad],
            self.config.negatives,
            rng,
            by_task=self.config.negatives_by_task,
        )
        rows = [*good, *(bad[i] for i in negatives)]
        names = {
            "task": [tasks[n] for n in rows],
            "cluster": [f"{tasks[n]}/{episodes[n].cluster.id}" for n in rows],
        }
        values = [episodes[n].reward or 0.0 for n in rows]
        advantages = np.mean(
            [
                questioner_advantages(values, names.get(kind), ddof=self.config.ddof)
                for kind in self.config.questioner_normalization.split("+")
            ],
            axis=0,
        )
        return {
            (n, "questioner", 0): [advantage]
            for n, advantage in zip(rows, advantages.tolist(), strict=True)
            # RLVR's questions have no proposal, hence no row.
            if episodes[n].proposal is not None
        }

    def _verifier_advantages(
        self, episodes: Sequence[SpellEpisode], good: int, rng: np.random.Generator
    ) -> Advantages:
        """Sample judged answers with differing votes from all questions; return advantages (8)."""
        c = self.config
        # Answers of all rounds are candidates, also to questions that the update leaves out.
        eligible = [
            (n, i, e.votes[i])
            for n, e in enumerate(episodes)
            for i, reply in enumerate(e.judged)
            if reply is not None and spell_episode.is_eligible_verdict(e, i, c)
        ]
        positions = selection.verifier_groups(
            [rewards.majority(votes) for _, _, votes in eligible],
            good * c.group_size,
            c.verifier_group_size,
            c.verifier_share,
            rng,
            balance=c.balance_verdicts,
        )
        return {
            (n, "verifier", i): c.to_advantages(self._verifier_rewards(votes))
            for n, i, votes in (eligible[at] for at in positions)
        }

    def metrics(self, episodes: Sequence[SpellEpisode]) -> Metrics:
        """Compute shares and means over all episodes and per task (spec section 10)."""
        metrics = Metrics()
        for e in episodes:
            e.count_unparsed(metrics)
            for reply in e.replies:
                self.config.count_forms(metrics, reply.scored_texts, e.task)
            for suffix in ("", f"/{e.task}"):
                add_metrics(metrics, e, suffix)
                for votes in e.votes:
                    for reward in self._verifier_rewards(votes):
                        metrics.add(f"verifier_reward{suffix}", reward)
        tasks = sorted({e.task for e in episodes})
        for e in (e for e in episodes if e.mixed):
            # Figure 8(a): the tasks of solvable questions, r_que > 0 in Algorithm 1.
            for task in tasks:
                metrics.add(f"solvable_share/{task}", e.task == task)
        for reason, count in Counter(e.reason for e in episodes if e.reason).items():
            metrics.add_sum(f"reason/{reason}", count, len(episodes))
        metrics.add("memory_entries", len(self.memory))
        metrics.add("stream_repeats", self.stream.repeats)
        return metrics

    def record(self, episode: SpellEpisode, annotation: Annotation) -> dict[str, Any]:
        return make_record(episode, annotation, self.prompts)

    def cluster(self, episode: SpellEpisode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        # The public code saves no memory: its resumed run starts with an empty one.
        parts = {"stream": self.stream, "memory": self.memory, "probes": self.probes}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.memory.load_state_dict(state["memory"])
        self.probes.load_state_dict(state["probes"])
