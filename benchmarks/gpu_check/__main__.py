"""What of this package works on this machine's GPU, and how fast, in ten minutes.

    python benchmarks/gpu_check --out gpu_check_output     # one GPU; also: make gpu-check
    python benchmarks/gpu_check --node                     # a node of 8 GPUs; also: make gpu-check-node
    python benchmarks/gpu_check [--node] --rehearse        # every check's code on the CPU: says nothing of a GPU

Writes gpu_check.json, gpu_check.html (one page, nothing is fetched) and gpu_check.log. The exit
code is 0 where every check that ran has passed, 1 where one failed, 2 where there are too few GPUs
or a package is missing: docs/gpu.md.
"""

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Not our own folder: a file of ours would shadow a library of the same name.
sys.path[0:1] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from gpu_check.listed import SUITES, Suite
from gpu_check.outcomes import FAILED, PASSED, Outcome
from gpu_check.runner import check_command, check_environment, run_all

LIMIT_S = 600.0
TIMES_SLOWER = 6.0
"""A rehearsal may take so many times longer: a few cores do what a GPU and many cores would."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and write the report; returns the exit code."""
    args = parsed(argv)
    suite = SUITES[args.suite]
    if (
        problem := missing_package(suite) or (None if args.rehearse else missing_gpus(suite))
    ) is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    from gpu_check.page import html_page  # only once jinja2 is known to be there

    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "gpu_check.log"
    log.write_text("", encoding="utf-8")
    report = {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "is_rehearsal": args.rehearse,
        "num_gpus": suite.num_gpus,
        "num_checks": len(suite.checks),
    }

    def show(outcomes: list[Outcome]) -> None:
        last = outcomes[-1]
        if not args.only or last.name in args.only:
            print(
                f"{last.name:16s} {last.state:8s} {last.seconds:6.1f} s  "
                f"{'; '.join(last.why) or last.headline}",
                flush=True,
            )
        record = report | {"checks": [outcome.as_json() for outcome in outcomes]}
        (args.out / "gpu_check.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        (args.out / "gpu_check.html").write_text(html_page(record), encoding="utf-8")

    slower = TIMES_SLOWER if args.rehearse else 1.0
    outcomes = run_all(
        [replace(check, limit_s=slower * check.limit_s) for check in suite.checks],
        only=args.only,
        limit_s=slower * args.limit_s,
        command=check_command(args.rehearse),
        environment=check_environment(args.rehearse),
        log=log,
        show=show,
    )
    states = [outcome.state for outcome in outcomes]
    said = "a rehearsal on the CPU, which proves nothing about a GPU: " if args.rehearse else ""
    print(
        f"{said}{states.count(PASSED)} passed, {states.count(FAILED)} failed: "
        f"{args.out / 'gpu_check.html'}"
    )
    return 1 if FAILED in states else 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = {name: [check.name for check in suite.checks] for name, suite in SUITES.items()}
    suites = parser.add_mutually_exclusive_group()
    suites.add_argument(
        "--one", dest="suite", action="store_const", const="one", help="one GPU: the default"
    )
    suites.add_argument(
        "--node", dest="suite", action="store_const", const="node", help="a node of eight GPUs"
    )
    parser.set_defaults(suite="one")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check_output"), help="folder of the report"
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at a tiny size")
    listed = "; ".join(f"--{name}: {', '.join(names)}" for name, names in named.items())
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help=listed)
    parser.add_argument(
        "--limit_s", type=float, default=LIMIT_S, help="for all checks together (%(default)g)"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(named[args.suite]):
        parser.error(f"--only: no check {', '.join(sorted(unknown))} of --{args.suite}; {listed}")
    return args


def missing_package(suite: Suite) -> str | None:
    """What to say of the first of the needed packages that cannot be imported;

    None where all can.
    """
    for name in suite.needed:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            needed_by = "" if error.name == name else f", which {name} needs,"
            return (
                f"the package {error.name}{needed_by} is missing from {sys.executable}; see "
                "docs/gpu.md"
            )
    return None


def missing_gpus(suite: Suite) -> str | None:
    """What to say where there are fewer than the checks take."""
    if (found := num_gpus()) >= suite.num_gpus:
        return None
    seen = "no CUDA device" if found == 0 else f"{found} CUDA device{'s' if found > 1 else ''}"
    others = (
        ""
        if suite is SUITES["one"]
        else f" and --node takes {suite.num_gpus}: --one checks one of them, and"
    )
    return f"PyTorch sees {seen} here;{others} --rehearse runs the checks' code on the CPU"


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
