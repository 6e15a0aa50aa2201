"""The longest common subsequence, and one particular way back through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def lengths(x: Sequence[str], y: Sequence[str]) -> list[list[int]]:
    """[len(x) + 1][len(y) + 1]: how much the first i of x and the first j of y share."""
    table = [[0] * (len(y) + 1)]
    for a in x:
        above, row = table[-1], [0]
        for j, b in enumerate(y):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        table.append(row)
    return table


def way_back(x: Sequence[str], y: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
    """From both ends: a shared word moves both; else x, but only if that strictly keeps more; else y.

    Yields every step as (place in x, place in y, whether the two words are shared).
    """
    table = lengths(x, y)
    i, j = len(x), len(y)
    while i and j:
        shared = x[i - 1] == y[j - 1]
        yield i - 1, j - 1, shared
        back_in_x = shared or table[i - 1][j] > table[i][j - 1]
        back_in_y = shared or not back_in_x
        i, j = i - back_in_x, j - back_in_y
