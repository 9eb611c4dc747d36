"""Questions that are chains, "A of B of C": the single hops that lead to the answer."""

from collections.abc import Sequence

from spell_jax.selfplay.memory import Entry

_LINK = " of "


def split_hops(question: str, known_entries: Sequence[Entry]) -> tuple[str, list[str]]:
    """Return (the first hop, as a question; the links to apply to its answer, one after another).

    The first hop of "A of B of C" is "B of C", and the link A remains. If "B of C" is a known
    question with the answer D, the first hop is "A of D", and no link remains. Of several known
    questions the longest counts. A question without a link is its own first hop.
    """
    # The longest known question leaves the fewest hops, and each hop can go wrong.
    for entry in sorted(known_entries, key=lambda entry: -len(entry.question)):
        is_chain = _LINK in entry.question
        if is_chain and question.endswith(_LINK + entry.question):
            outer = question.removesuffix(_LINK + entry.question)
            question = join_hop(outer, entry.answer)
            break
    *links, start = question.split(_LINK)
    if not links:
        return question, []
    return join_hop(links[-1], start), links[-2::-1]


def join_hop(link: str, start: str) -> str:
    """Return the question of a single hop."""
    return f"{link}{_LINK}{start}"
