"""Dockerfile, compose.yaml and scripts/kubernetes_torchrun.yaml: what they name exists and goes
together.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.commands.run_flags import parse_run
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.layout import find_layout

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLER = (REPOSITORY / "scripts" / "install.sh").read_text()


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(
        (REPOSITORY / "scripts" / "kubernetes_torchrun.yaml").read_text()
    )
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def test_every_pod_gets_what_the_launcher_reads_and_finds_the_first_one() -> None:
    service, job = kubernetes()
    name, spec = job["metadata"]["name"], job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {one["name"]: one for one in container["env"]}
    launcher = (REPOSITORY / container["command"][0]).read_text()
    (needed,) = re.findall(r"for name in ([A-Z_ ]+); do", launcher)
    assert set(needed.split()) <= set(environment)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NUM_NODES"]["value"])
    assert (
        environment["MASTER_ADDR"]["value"] == f"{name}-0.{spec['template']['spec']['subdomain']}"
    )
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_job_runs_a_config_of_ours_with_flags_that_we_have(monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = kubernetes()
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    program, *words = container["command"][1:]
    monkeypatch.chdir(REPOSITORY)
    objective = load_objective(Path(program).stem)
    config = parse_run(objective.config_class, words)
    assert objective.validate(config) == []
    assert config.run.output_dir.startswith("/shared/")
    assert container["resources"]["limits"] == container["resources"]["requests"]
    gpus_per_node = [int(container["resources"]["limits"]["nvidia.com/gpu"])] * spec["completions"]
    assert find_layout(config.parallel, gpus_per_node, config.backend).world_size == sum(
        gpus_per_node
    )


def test_image_is_made_by_the_installer_and_in_either_build() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    (tag,) = re.findall(r"^FROM python:(3\.\d+)", text, flags=re.MULTILINE)
    assert f"{tag} " in INSTALLER[: INSTALLER.index("set -euo")]
    assert re.search(
        r"^COPY \. (\S+)\nRUN OPEN_INSTRUCT_TORCH=\$TORCH \1/scripts/install\.sh",
        text,
        re.MULTILINE,
    )
    assert "PATH=/opt/open_instruct/.venv/bin" in text
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    builds = {"cuda", *re.findall(r"TORCH: (\w+)", (REPOSITORY / "compose.yaml").read_text())}
    assert set(services) == {"gpu", "cpu"}
    assert all(
        re.search(rf"^\s+cpu \| cuda\b|\b{build}\b", INSTALLER, re.MULTILINE) for build in builds
    )


def test_image_has_no_files_made_in_the_checkout() -> None:
    left_out = set((REPOSITORY / ".dockerignore").read_text().split())
    made = {line.strip("/") for line in (REPOSITORY / ".gitignore").read_text().split()} - {
        "*.egg-info",
        "__pycache__",
    }
    assert made | {".git"} <= left_out
