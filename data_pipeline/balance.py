"""Row balances: an engine that loses rows in silence becomes an error that names the stage.

A stage states equations between sums of terms, such as "in:documents = out:documents + removed: *":

- in:ARGUMENT   rows of the table that the stage reads as this argument
- out:TABLE     rows of a table that the stage wrote
- other names   events of this name, or, with a final "*", of all names with this beginning

Rows are counted in the footers of the Parquet files, and events by the engine itself, so rows that
are lost between two points of a stage break an equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data_pipeline.records import Count

IN, OUT = "in:", "out:"
# The equations of a stage that keeps or removes every document. The second and the last compare
# tables with events that other steps counted, so a row lost in either breaks one.
KEPT_OR_REMOVED = (
    "in:documents = documents read",
    "documents read = out:documents + out:removed",
    "documents kept = out:documents",
    "documents removed: * = out:removed",
)


class LostRowsError(RuntimeError):
    """Rows of a stage were lost or doubled."""


def check(
    stage: str, equations: Sequence[str], rows: Callable[[str], int], counts: Sequence[Count]
) -> None:
    """Raise LostRowsError if numbers of rows before and after a stage do not agree.

    Args:
      stage: name of the stage, for the message.
      equations: sums that must agree, see the module's docstring.
      rows: function that counts the rows of a term that begins with IN or OUT.
      counts: counts that the stage wrote, for all other terms.
    """

    def value(term: str) -> int:
        if term.startswith((IN, OUT)):
            return rows(term)
        start = term.removesuffix("*")
        return sum(
            count["number"]
            for count in counts
            if count["what"] == term or (start != term and count["what"].startswith(start))
        )

    for equation in equations:
        sides = [
            {term: value(term) for term in side.split(" + ")} for side in equation.split(" = ")
        ]
        left, right = (sum(side.values()) for side in sides)
        if left != right:
            sums = " but ".join(
                " + ".join(f"{number} ({term})" for term, number in side.items()) for side in sides
            )
            raise LostRowsError(
                f"stage {stage}: {equation!r} does not hold: {sums}. The runner lost or doubled "
                "rows; the stage is not marked as done. Build again, or with another --runner."
            )
