"""The made-up backend, as if its package were installed."""

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def environment_with_plain(folder: Path) -> dict[str, str]:
    """For a program that is to find it: what an installer writes beside a package is in
    `folder`.
    """
    written = folder / "plain_backend-1.0.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-backend\nVersion: 1.0\n")
    (written / "entry_points.txt").write_text(
        "[open_instruct.backends]\nplain = plain_backend:PLAIN\n"
    )
    found = map(str, (folder, HERE, REPOSITORY))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"}
