"""The pictures of the pages, from the runs that `make demo` and the recipes leave: `python
scripts/report_pictures.py`.

Needs Chromium. A second DPO run, with another loss, is trained first where it is not there: a
minute on a CPU.
"""

import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import demo_dpo
import demo_grpo
import demo_real
from browser import CHROMIUM, Scheme, Tab, browser
from demo_shell import OUTPUT, REPOSITORY, torchrun

from open_instruct.report.page import report_page

PICTURES = Path("docs") / "pictures"
OTHER = OUTPUT / "simpo"
# Those of docs/recipes.md, where they are there.
REAL_RUNS = {
    "real": demo_real.GRPO,
    "brevity": Path("runs/dpo_smollm2_cpu"),
    "json": Path("runs/sft_smollm2_lora_cpu"),
}
MOST_BYTES = 150_000
OPEN_A_ROLLOUT = """
    document.getElementById("rollout-order").value = "worst";
    document.getElementById("rollout-order").dispatchEvent(new Event("input"));
    setTimeout(() => document.querySelector("#rollout-table tr[tabindex]").click(), 200);
"""


def main() -> int:
    os.chdir(REPOSITORY)
    runs = [demo_dpo.RUN, demo_grpo.GRPO]
    if missing := [str(run) for run in runs if not (run / "hf_model").exists()]:
        print(f"there is no run in {' and '.join(missing)}: make demo leaves them", file=sys.stderr)
        return 1
    if not CHROMIUM:
        print(
            "there is no chromium here; apt-get install chromium, or brew install chromium",
            file=sys.stderr,
        )
        return 1
    if not (OTHER / "hf_model").exists():
        flags = [str(OTHER) if flag == str(demo_dpo.RUN) else flag for flag in demo_dpo.dpo_flags()]
        torchrun(demo_dpo.NUM_RANKS, "open_instruct/dpo.py", *flags, "--loss_type", "simpo")
    PICTURES.mkdir(exist_ok=True)
    with browser() as tab:
        picture(tab, "dpo", [demo_dpo.RUN], width=1200, height=1500)
        picture(tab, "grpo_phone", [demo_grpo.GRPO], width=400, height=1150, scheme="dark")
        for name, run in REAL_RUNS.items():
            if (run / "hf_model").exists():
                picture(tab, name, [run], width=1200, height=900)
        picture(tab, "compared", [demo_dpo.RUN, OTHER], width=1200, height=1500)
        picture(
            tab,
            "rollout",
            [demo_grpo.GRPO],
            width=800,
            height=760,
            scheme="dark",
            script=OPEN_A_ROLLOUT,
        )
    return 0


def picture(
    tab: Tab,
    name: str,
    runs: list[Path],
    *,
    width: int,
    height: int,
    scheme: Scheme = "light",
    script: str = "",
) -> None:
    """Write the top of the page of `runs`, once `script` has run in it, as `name`."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(report_page(runs, max_rollouts=2_000), encoding="utf-8")
        tab.open(page, width=width, height=height, scheme=scheme)
        if script:
            tab.said(script)
            tab.settle()
        content = tab.picture()
    assert not tab.errors and len(content) <= MOST_BYTES, (name, tab.errors, len(content))
    (PICTURES / f"{name}.webp").write_bytes(content)
    print(f"{PICTURES / name}.webp ({len(content) / 1e3:.0f} kB)")


if __name__ == "__main__":
    sys.exit(main())
