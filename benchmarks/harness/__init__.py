"""What the programs here share.

Importing it puts this checkout first on the path, whatever else is installed.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"

if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))
