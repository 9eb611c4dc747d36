"""Tests of the loss weights of answers, by hand for each aggregation."""

import numpy as np
import pytest

from spell_jax.learner.aggregation import weigh
from tests import tiny

GROUPS = [
    tiny.group([1], [[1] * 2, [1] * 4], [1.0, 1.0], "responder"),
    tiny.group([1], [[1] * 3], [1.0], "responder"),
    tiny.group([1], [[1] * 1, [1] * 6], [1.0, 1.0], "verifier"),
]


@pytest.mark.parametrize(
    ("aggregation", "expected_weights"),
    [
        ("token_mean", [[1 / 16, 1 / 16], [1 / 16], [1 / 16, 1 / 16]]),
        ("group_mean", [[1 / 6 / 3, 1 / 6 / 3], [1 / 3 / 3], [1 / 7 / 3, 1 / 7 / 3]]),
        ("role_mean", [[1 / 9, 1 / 9], [1 / 9], [1 / 7, 1 / 7]]),
        ("role_group_mean", [[1 / 6 / 2, 1 / 6 / 2], [1 / 3 / 2], [1 / 7, 1 / 7]]),
        (
            "sequence_mean",
            [[1 / 2 / 2 / 3, 1 / 4 / 2 / 3], [1 / 3 / 3], [1 / 2 / 3, 1 / 6 / 2 / 3]],
        ),
    ],
)
def test_token_weights_of_each_aggregation(aggregation: str, expected_weights: list) -> None:
    weights = weigh(GROUPS, aggregation)
    shares = []
    for group, answer_weights, expected in zip(GROUPS, weights, expected_weights, strict=True):
        np.testing.assert_allclose(answer_weights, expected, rtol=1e-12)
        pairs = zip(answer_weights, tiny.answers(group), strict=True)
        shares.append(sum(weight * len(answer) for weight, answer in pairs))
    assert sum(shares) == pytest.approx(2 if aggregation.startswith("role") else 1)


def test_sequence_sum_gives_all_tokens_the_same_weight() -> None:
    """Divide the sum over an answer's tokens by a constant, and average over 5 answers."""
    weights = weigh(GROUPS, "sequence_sum", 10)
    assert list(map(len, weights)) == [2, 1, 2]
    np.testing.assert_allclose(np.concatenate(weights), 1 / 10 / 5, rtol=1e-12)
    with pytest.raises(ValueError, match=r"loss\.sequence_tokens = 0: must be at least 1"):
        weigh(GROUPS, "sequence_sum")
    with pytest.raises(ValueError, match=r"loss\.aggregation = 'mean': must be one of"):
        weigh(GROUPS, "mean")
