"""Questions that are chains, "A of B of C": the single hops that lead to the answer."""

from collections.abc import Sequence

from spell_jax.selfplay.memory import Entry

_LINK = " of "


def split_hops(question: str, known: Sequence[Entry]) -> tuple[str, list[str]]:
    """Return (the first hop, as a question; the links to apply to its answer, one after another).

    The first hop of "A of B of C" is "B of C", and the link A remains. If "B of C" is a known
    question with the answer D, the first hop is "A of D", and no link remains. Of several known
    questions the longest one counts. A question without a link is its own first hop.
    """
    *links, start = question.split(_LINK)
    if not links:
        return question, []
    answers = {entry.question: entry.answer for entry in known}
    for place in range(1, len(links)):
        inner = _LINK.join([*links[place:], start])
        if inner in answers:
            return join_hop(links[place - 1], answers[inner]), links[: place - 1][::-1]
    return join_hop(links[-1], start), links[:-1][::-1]


def join_hop(link: str, start: str) -> str:
    """Return the question of a single hop."""
    return f"{link}{_LINK}{start}"
