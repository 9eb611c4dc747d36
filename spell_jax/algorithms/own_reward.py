"""Rewards by a function of the user's, which config.algorithm.reward names as MODULE:FUNCTION.

    def reward(answers: Sequence[RewardInput]) -> Sequence[float]

1. A call gets all answers of a round, the G answers to a question together, and returns one finite
   number for each answer, in order. Only differences inside a group count: a group's advantages are
   its rewards minus their mean, divided by their deviation (algorithm.divide_by_deviation).
2. `async def` is called alike. Every call has an event loop of its own, so open clients inside.
3. Process 0 alone calls the function, and all processes get its rewards. A resumed run calls it
   again for the step that it repeats: for equal bits, equal answers must have equal rewards.
4. An error of the function, another count of numbers, or a number that is not finite ends the run
   with the question. No answer gets a reward that the function did not return.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from typing import Any

from spell_jax.runtime import hooks
from spell_jax.runtime.finite import is_finite
from spell_jax.runtime.hosts import distributed

FIELD = "algorithm.reward"
# A group's deviation squares rewards: squares of rewards in these bounds are finite in float32.
WIDEST = (-1e18, 1e18)
_SHOWN = 200  # characters of a question or an answer in a message


@dataclasses.dataclass(frozen=True)
class RewardInput:
    """One answer, and all that its reward may depend on.

    Attributes:
      question: text of the question.
      task: task of the question, one of TASKS.
      documents: texts of the documents that the answer was written from.
      reference: reference answer.
      references: all right answers of a given question; of other questions only `reference`.
      text: text of the whole reply, with its thought.
      prediction: answer that the reply states, as algorithm.extract reads it; None without one.
      rule_score: score of the prediction by algorithm.rule, in [0, 1].
      votes: votes of the verifier on the prediction, 1 (yes), 0 (no) or -1 (malformed); ()
        without a verifier or a prediction.
      truncated: whether the token cap cut the reply off. Its prediction is then None, and its
        rule_score 0, unless algorithm.truncated = "score".
      tokens: number of tokens of the reply, with its stop token.
      prompt_tokens: number of tokens of the prompt.
    """

    question: str
    task: str
    documents: tuple[str, ...]
    reference: str
    references: tuple[str, ...]
    text: str
    prediction: str | None
    rule_score: float
    votes: tuple[int, ...]
    truncated: bool
    tokens: int
    prompt_tokens: int


# Answers -> their rewards, in order.
RewardFunction = Callable[[Sequence[RewardInput]], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class OwnReward:
    """The user's reward function, with checks of what it returns.

    Attributes:
      name: value of the config's field, MODULE:FUNCTION.
      function: the function, a RewardFunction or its `async def`.
      bounds: least and largest reward.
    """

    name: str
    function: Callable[[Sequence[RewardInput]], Any]
    bounds: tuple[float, float] = WIDEST

    @classmethod
    def load(cls, name: str, bounds: tuple[float, float]) -> OwnReward:
        """Import the function MODULE:FUNCTION; ValueError if it is not there."""
        return cls(name, hooks.find(FIELD, name), bounds)

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        """Return the reward of each answer, the same on all processes.

        RuntimeError, from the function's error, names an answer that the function was reading.
        ValueError if the function does not return one number in `bounds` for each answer.
        """
        if not answers:
            return []
        answers = tuple(answers)  # a function that sorts or empties a list would move rewards
        # One process calls: the rewards of an endpoint might differ between two calls.
        return distributed.broadcast(lambda: self._check(answers, self._call(answers)))

    def _call(self, answers: Sequence[RewardInput]) -> Any:
        try:
            with hooks.no_exit():
                rewards = self.function(answers)
                return _wait(rewards) if inspect.isawaitable(rewards) else rewards
        except Exception as error:
            answer = _read_last(error)
            place = f"reading {_describe(answer)}" if answer else self._describe_all(answers)
            text = f"{self}: {type(error).__name__}: {error}, {place}"
            raise RuntimeError(text) from error

    def _check(self, answers: Sequence[RewardInput], rewards: Any) -> list[float]:
        """Return the rewards as Python's numbers; ValueError as in `__call__`."""
        rewards = _to_python(rewards)
        if not isinstance(rewards, list | tuple):
            returned = f"returned {rewards!r:.{_SHOWN}}"
            count = f"must return a list of {len(answers)} numbers"
            raise ValueError(f"{self}: {returned}, {self._describe_all(answers)}; {count}")
        if len(rewards) != len(answers):
            raise ValueError(
                f"{self}: returned {len(rewards)} rewards, {self._describe_all(answers)}; "
                "must return one for each answer"
            )
        low, high = self.bounds
        numbers = [_to_python(reward) for reward in rewards]
        for number, answer in zip(numbers, answers, strict=True):
            if is_finite(number) and low <= number <= high:
                continue
            raise ValueError(
                f"{self}: returned {number!r:.{_SHOWN}} for {_describe(answer)}; must be a "
                f"finite number from {low:g} to {high:g}"
            )
        return [float(number) for number in numbers]

    def __str__(self) -> str:
        return f"{FIELD} = {self.name!r}"

    @staticmethod
    def _describe_all(answers: Sequence[RewardInput]) -> str:
        return f"for {len(answers)} answers, the first to question {_shorten(answers[0].question)}"


def _describe(answer: RewardInput) -> str:
    return f"the answer {_shorten(answer.text)} to question {_shorten(answer.question)}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _wait(awaitable: Awaitable[Any]) -> Any:
    """Run an awaitable to its end and return its result."""

    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    # The thread of a notebook's cells has a loop that runs already; no second loop may run there.
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _read_last(error: BaseException) -> RewardInput | None:
    """Return the answer in a variable of the innermost frame that has one; None without one."""
    # The function gets many answers at once, and its own traceback shows lines without values.
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        for value in frame.f_locals.values():
            if isinstance(value, RewardInput):
                return value
    return None


def _to_python(value: Any) -> Any:
    """Convert an array of NumPy, JAX or torch to Python's numbers; return other values as is."""
    to_python = getattr(value, "tolist", None)
    return to_python() if to_python is not None else value
