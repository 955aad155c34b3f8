"""How far the building of a data set is."""

from collections.abc import Callable

ROWS_PER_CHUNK = 512

ReportProgress = Callable[[int, int], None]
"""Called with the number of rows that are done, and of all."""


class Progress:
    """How many rows are done of all; `report` is not called if nobody would wait for them."""

    def __init__(self, num_rows: int, report: ReportProgress | None) -> None:
        self.num_rows = num_rows
        self._num_done = 0
        self._report = report if num_rows > ROWS_PER_CHUNK else None

    def add(self, num_rows: int) -> None:
        self._num_done += num_rows
        if self._report is not None:
            self._report(self._num_done, self.num_rows)
