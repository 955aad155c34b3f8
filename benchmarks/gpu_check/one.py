"""Run one check in this process: python -m gpu_check.one MODULE --result FILE --work FOLDER
[--rehearse].
"""

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from gpu_check.findings import Findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    findings = Findings(args.result)
    try:
        importlib.import_module(args.module).check(findings, args.work, args.rehearse)
    except Exception as error:
        traceback.print_exc()
        findings.failures.append(f"{type(error).__name__}: {error}")
    findings.save()
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
