"""Answers from all documents, and what they earn: parts 4 to 6 of SPELL."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.episode import ask_judge
from spell_jax.algorithms.spell import own_rewards
from spell_jax.algorithms.spell.config import QuestionsConfig, VerifiedConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, AskModels
from spell_jax.runtime import fault_injection
from spell_jax.selfplay import evidence, parsing, rewards

AnsweredEpisode = TypeVar("AnsweredEpisode", bound=SpellEpisode)


class Answering(Generic[AnsweredEpisode]):
    """The responder's answers to questions, and their rewards by the rule or a judge.

    Attributes:
      group_size: G, answers to a question.
      most_rounds: most rounds of a step.
      enough_questions: number of questions with mixed rewards that ends a step's rounds.
    """

    def __init__(
        self,
        config: QuestionsConfig,
        context: AlgorithmContext,
        group_size: int = 1,
        most_rounds: int = 1,
        enough_questions: int = 0,
    ):
        self.config, self.group_size = config, group_size
        self.most_rounds, self.enough_questions = most_rounds, enough_questions
        self.prompts = context.prompts
        self._judge, self._own_reward = context.judge, context.reward
        self._teacher_prompt = context.teacher_prompt

    def reward_rounds(
        self, batches: Iterable[list[AnsweredEpisode]], rng: np.random.Generator
    ) -> list[AnsweredEpisode]:
        """Reward one answered batch per round until enough questions have mixed rewards.

        At most `most_rounds` batches are taken from `batches`, each only when its round begins.
        """
        episodes: list[AnsweredEpisode] = []
        # Too few questions: the step goes on with the questions it has. The paper's Algorithm 1
        # (line 6) repeats rounds without end; its code ends the run.
        for batch in itertools.islice(batches, self.most_rounds):
            answered = ask_judge(self._judge, self.config.rule, batch)
            if self._own_reward is None:
                episodes += [self.reward(e, rng) for e in answered]
            else:
                episodes += own_rewards.reward_all(self._own_reward, answered)
            if sum(e.mixed for e in episodes) >= self.enough_questions:
                break
        return episodes

    def answer_batches(
        self, ask: AskModels, batches: Iterable[list[AnsweredEpisode]], rng: np.random.Generator
    ) -> list[AnsweredEpisode]:
        """Answer and reward batches of accepted questions until enough have mixed rewards."""
        answered = (ask.run_all(self.answer_and_verify, batch) for batch in batches)
        return self.reward_rounds(answered, rng)

    async def answer_and_verify(self, ask: Ask, episode: AnsweredEpisode) -> AnsweredEpisode:
        """Run parts 4 and 5."""
        episode = await self.answer(ask, episode)
        fault_injection.point("answered")
        episode = await self.verify(ask, episode)
        fault_injection.point("verified")
        return episode

    # 4. The responder answers from all documents.

    async def answer(self, ask: Ask, episode: AnsweredEpisode) -> AnsweredEpisode:
        """Ask for G answers to an accepted question; a prompt over the cap ends the episode."""
        e = episode
        if e.status != "accepted":
            return e
        c = self.config
        # All n documents in corpus order. A prompt over the cap is refused, and nothing is cut
        # (spec 4).
        text = self.prompts.responder(e.task, c.as_read(e.documents), e.question)
        (reply,) = replies = await ask("responder", [text], self.group_size)
        if reply is None:
            return e.without_reply("responder", replies)
        predictions = c.read_answers(reply.scored_texts, e.task)
        rule = c.score_answers(predictions, e.reference, e.task)
        stated = c.state_answers(reply.scored_texts, e.task)
        return replace(e, response=reply, predictions=predictions, stated=stated, rule=rule)

    # 5. Without a verifier there are no votes.

    async def verify(self, ask: Ask, episode: AnsweredEpisode) -> AnsweredEpisode:
        count = len(episode.predictions)
        return replace(episode, judged=(None,) * count, votes=((),) * count)

    # 6. Rewards.

    def reward(self, e: AnsweredEpisode, rng: np.random.Generator) -> AnsweredEpisode:
        """Compute the rewards of a question's answers."""
        return e if e.response is None else replace(e, scores=e.rule)

    # 7. Groups.

    def responder_group(self, e: SpellEpisode, advantages: Sequence[float]) -> TrainGroup:
        """Return the group of a question's answers; a teacher reads the questioner's documents."""
        group = e.reply("responder", 0).group(advantages, "responder")
        if self._teacher_prompt is None:
            return group
        shown = [self.config.as_read(e.documents)[i] for i in e.shown]
        prompt = self._teacher_prompt(self.prompts.responder(e.task, shown, e.question))
        return replace(group, reference_prompt=prompt)


class VerifiedAnswering(Answering[SpellEpisode]):
    """Answers that a verifier votes on, until enough questions have mixed rewards."""

    def __init__(self, config: VerifiedConfig, context: AlgorithmContext):
        sizes = config.group_size, config.max_generations, config.questions
        super().__init__(config, context, *sizes)
        self.responder, self.verifier = config.responder, config.verifier

    async def answer(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for answers; note which of them name a document that the questioner read."""
        e = await super().answer(ask, episode)
        if not self.responder.names_documents or e.response is None:
            return e
        texts = e.response.scored_texts
        return replace(e, named=tuple(evidence.named_document(text) in e.shown for text in texts))

    # 5. The verifier compares answers with the reference.

    async def verify(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for G_v votes on each answer that states a prediction (4)."""
        e = await super().verify(ask, episode)
        if not self.responder.has_verifier:
            return e
        judged, votes = [*e.judged], [*e.votes]
        # A response that states no answer keeps the rule's score and costs no votes (spec 6).
        numbered = [(i, p) for i, p in enumerate(e.predictions) if p is not None]
        # The extracted answer, as in the public code, instead of the response of Algorithm 1
        # (line 17): prompts stay short. Only external judges read the words of a number.
        texts = [self.prompts.verifier(e.question, p, e.reference) for _, p in numbered]
        replies = await ask("verifier", texts, self.verifier.group_size, **self.verifier.options)
        for (i, _), reply in zip(numbered, replies, strict=True):
            judged[i] = reply
            votes[i] = tuple(map(parsing.parse_verdict, reply.scored_texts if reply else ()))
        return replace(e, judged=tuple(judged), votes=tuple(votes), unjudged=replies.count(None))

    # 6. Rewards.

    def reward(self, e: SpellEpisode, rng: np.random.Generator) -> SpellEpisode:
        """Compute the rewards of a question's answers (6)."""
        if e.response is None:
            return e
        scores = tuple(
            self._responder_reward(rule, rewards.majority(votes), rng)
            for rule, votes in zip(e.rule, e.votes, strict=True)
        )
        if share := self.responder.document_share:
            pairs = zip(scores, e.named, strict=True)
            scores = tuple((1 - share) * score + share * named for score, named in pairs)
        return replace(e, scores=scores)

    def _responder_reward(self, rule: float, vote: int, rng: np.random.Generator) -> float:
        how = self.responder.reward
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
