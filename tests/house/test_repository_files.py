"""Files that a host of repositories reads: what they run exists, and what they say of the package
is true.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


def read_yaml(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


def test_workflow_runs_targets_of_the_makefile_on_every_python_of_the_package() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = [command.split()[1] for command in commands if command.startswith("make ")]
    assert {"install", "check"} <= set(made) <= TARGETS
    others = [command for command in commands if not command.startswith("make ")]
    assert others and all((REPOSITORY / command).is_file() for command in others)
    versions = re.findall(r"Python :: (\S+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["check"]["strategy"]["matrix"]["python"] == versions


def test_hooks_and_the_container_of_an_editor_use_the_environment_of_make_install() -> None:
    (local,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in local["hooks"])
    container = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"].split()[1] in TARGETS
    named = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert named == ".venv/bin/python"


def test_citation_has_the_name_and_licence_of_the_package() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["title"].replace("_", "-") == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert citation["message"] and citation["authors"]


def test_page_on_security_that_is_named_exists() -> None:
    for page in re.findall(r"\]\((\S+?)\)", (REPOSITORY / "SECURITY.md").read_text()):
        assert (REPOSITORY / page).is_file()
