"""`docs/metrics.md` on stdout: the table of metrics that pages, consoles and tests read, for
people.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.core.metrics import metric_table

HEAD = """\
# Metrics

What a row of `metrics.jsonl` has, by group, in the order in which [a report](report.md) draws it.

Written by `python scripts/metrics_page.py > docs/metrics.md` from `open_instruct/core/metrics.json`; a test holds them
equal.

A `*` stands for any words. Held-out rows have the same names behind `eval/`, in `eval.jsonl`. Means are over the
global batch, whatever the ranks. How each objective comes by its rewards and losses is in [losses.md](losses.md),
[kto.md](kto.md#metrics), [reward_model.md](reward_model.md#metrics), [prm.md](prm.md#metrics) and
[distill.md](distill.md#metrics). A number of
your own may have any name: it is drawn in a last group. **Bold** names are in the line that a run prints of a step. A
report smooths no curve that is `exact`, and draws one `by loss` for runs of the same loss alone. `better` says which
values show a better policy, for [`--keep_best`](training.md#the-best-checkpoint); where it is empty, neither do.
"""


def markdown() -> str:
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for group, entries in groupby(metric_table(), key=lambda entry: entry.group):
        yield f"## {group}\n\n| metric | unit | meaning | better | curve |\n|---|---|---|---|---|"
        for entry in entries:
            name = f"**`{entry.name}`**" if entry.words else f"`{entry.name}`"
            marks = {"exact": entry.exact, "by loss": entry.of_its_loss, "none": not entry.drawn}
            curve = ", ".join(mark for mark in marks if marks[mark])
            yield f"| {name} | {entry.unit} | {entry.meaning} | {entry.better or ''} | {curve} |"
        yield ""


if __name__ == "__main__":
    print(markdown(), end="")
