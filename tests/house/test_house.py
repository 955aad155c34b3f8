"""The rules of the house that a program can check: floors, file sizes, flags that are read, docs
that are true.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.chat import ChatFlags
from open_instruct.commands.check import CheckFlags
from open_instruct.commands.export import ExportFlags
from open_instruct.commands.layout import LayoutFlags
from open_instruct.commands.merge import MergeFlags
from open_instruct.commands.plan import PlanFlags
from open_instruct.commands.preview import PreviewFlags
from open_instruct.commands.replay import ReplayFlags
from open_instruct.commands.report import ReportFlags
from open_instruct.commands.score import ScoreFlags
from open_instruct.commands.serving.recording import RecordFlags
from open_instruct.commands.serving.session_replay import SessionReplayFlags
from open_instruct.commands.talking.sessions import SessionsFlags
from open_instruct.commands.tiny_model import TinyModelFlags
from open_instruct.config.flags import OWN, list_flags
from open_instruct.config.suites.upstream_flags import upstream_table
from open_instruct.core.families import FAMILIES
from open_instruct.migrate.from_suite import READERS
from open_instruct.migrate.suites.tables import find_table, find_trainers

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import metrics_page  # noqa: E402
import upstream_page  # noqa: E402
from flags_page import commands_with_flags, markdown  # noqa: E402

PACKAGE = REPOSITORY / "open_instruct"
FILES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The files of the records that `--backend` names.
ENTRY_POINTS: dict[str, dict[str, str]] = PROJECT["entry-points"]
BACKENDS = [
    REPOSITORY / f"{where.partition(':')[0].replace('.', '/')}.py"
    for where in ENTRY_POINTS["open_instruct.backends"].values()
]
DOCS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# From the ground up; a room imports from itself and from floors below it. docs/architecture.md
# draws them.
FLOORS = [
    {"core", "__init__"},
    {"losses"},
    {"config"},
    {"parallel"},
    {"rewards"},
    {"data"},
    {"models"},
    {"batching"},
    {"objectives"},
    {"planning"},
    {"checkpoints"},
    {"run"},
    {"report"},
    {"training"},
    {"cluster"},
    {"weight_sync"},
    {"generation"},
    {"environments"},
    {"rl"},
    {"commands"},
    {"migrate"},
    {
        "distill",
        "dpo",
        "prm",
        "reward_model",
        "sft",
        "grpo_fast",
        "grpo_olmo_core_actor",
        "kto",
        "notebook",
        "olmo_core_train_modules",
        "train",
        "cli",
    },
]
FLEET_LIBRARIES = {"ray", "vllm"}
HEAVY_LIBRARIES = {"torch", "olmo_core", "transformers", "datasets", *FLEET_LIBRARIES}
WITHOUT_TORCH = [
    *(
        "cli.py",
        "commands/failures.py",
        "commands/process.py",
        "commands/layout.py",
        "commands/plan.py",
        "commands/report.py",
    ),
    *("run/first_look.py", "parallel/processes.py"),
    *(f"training/deepspeed/{name}.py" for name in ("settings", "record", "grpo_flags")),
    *(f"training/deepspeed/{name}.py" for name in ("planned", "planned_memory", "planned_traffic")),
    "training/olmo_core/record.py",
    *(
        f"parallel/{name}.py"
        for name in ("layout", "layout_warnings", "node_sizes", "wording", "picture")
    ),
    *(
        str(path.relative_to(PACKAGE))
        for room in ("core", "planning", "report")
        for path in (PACKAGE / room).rglob("*.py")
        if path.parent.name != "preview"
    ),
]
LIGHT_TO_IMPORT = [
    *(
        "dpo.py",
        "grpo_fast.py",
        "grpo_olmo_core_actor.py",
        "prm.py",
        "commands/replay.py",
        "reward_model.py",
        "sft.py",
    ),
    *(
        f"losses/{name}.py"
        for name in ("advantages", "registry", "logprobs", "policy", "policy_loss", "preference")
    ),
]

MAX_LINES_OF_A_FILE = 400
MAX_LINES_OF_A_FUNCTION = 60  # with its docstring
MAX_FILES_OF_A_FOLDER = 20

# Flags of other programs that our docs may name.
FOREIGN_FLAGS = {
    *(
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
    ),
    *("port", "max_model_len"),  # of vLLM's server
    *(
        "nodes",
        "signal",
        "index_url",
        "extra_index_url",
        "require_hashes",
        "no_deps",
        "no_index",
        "target",
    ),
    *("help", "version", "no_build_isolation", "from"),
    *(
        "model",
        "host",
        "url",
        "system_prompt",
        "model_args",
        "tasks",
        "apply_chat_template",
        "batch_size",
    ),
}
PLACEHOLDERS = {"flag"}


def room_of(path: Path) -> str:
    """`config` of open_instruct/config/parser.py, `cli` of open_instruct/cli.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    floors = [floor for floor, rooms in enumerate(FLOORS) if room in rooms]
    assert floors, f"{room} stands on no floor: add it to FLOORS"
    return floors[0]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


@cache
def imports_of(
    path: Path, *, inside_functions: bool = True, for_types: bool = False
) -> tuple[str, ...]:
    """Dotted names that a file imports; those for the type checker alone only if asked for."""
    return tuple(imports_under(tree_of(path), inside_functions, for_types))


def imports_under(node: ast.AST, inside_functions: bool, for_types: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: import by full name"
            for alias in child.names:
                yield f"{child.module}.{alias.name}"
        elif isinstance(child, ast.expr) or (is_type_checking(child) and not for_types):
            continue
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_under(child, inside_functions, for_types)


@cache
def modules_named(path: Path) -> tuple[str, ...]:
    """Dotted names of ours that a file loads without an import statement: those in strings of the
    form `package.module:NAME`, and the entry points of a group that it asks for by its name.
    """
    words = {
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    groups = words & ENTRY_POINTS.keys() if "entry_points(" in text_of(path) else set()
    places = [*words, *(place for group in groups for place in ENTRY_POINTS[group].values())]
    found = [re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*):\w+", place) for place in places]
    names = [match[1] for match in found if match is not None]
    full_names = [
        name if name.startswith("open_instruct.") else f"open_instruct.{name}" for name in names
    ]
    return tuple(sorted(name for name in full_names if file_of(name) is not None))


def everything_loaded(path: Path) -> tuple[str, ...]:
    """What a file imports, for types too, and what it loads by a string or an entry point."""
    return (*imports_of(path, for_types=True), *modules_named(path))


def libraries_of(path: Path, *, inside_functions: bool = True) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path, inside_functions=inside_functions)}


def ids(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def those(paths: Iterable[Path], break_a_rule: Callable[[Path], object]) -> list[str]:
    return [ids(path) for path in paths if break_a_rule(path)]


class TestFiles:
    """One test a rule: thousands, one a file, would keep their runner busy for much longer than the
    rules do.
    """

    def test_imports_come_from_this_floor_or_below(self) -> None:
        above = [f"{ids(path)}: {name}" for path in FILES for name in imports_from_above(path)]
        assert not above

    def test_ray_and_vllm_stay_in_the_fleet(self) -> None:
        fleet = ("cluster", "generation", "weight_sync", "rl", "grpo_olmo_core_actor")
        outside = [path for path in FILES if room_of(path) not in fleet]
        assert not those(outside, lambda path: libraries_of(path) & FLEET_LIBRARIES)

    def test_backends_do_not_know_each_other(self) -> None:
        folders = {path.parent for path in BACKENDS}
        assert len(folders) == 2
        for folder in folders:
            others = tuple(f"open_instruct.training.{other.name}." for other in folders - {folder})
            names = [name for path in folder.glob("*.py") for name in imports_of(path)]
            assert not [name for name in names if name.startswith(others)]

    def test_none_of_ours_is_imported_by_a_string(self) -> None:
        """But commands and objectives, from the tables that name them; and a user's own file."""
        may = {PACKAGE / name for name in ("cli.py", "objectives/registry.py", "core/user_code.py")}
        asking = [path for path in FILES if path not in may and "import_module(" in text_of(path)]
        assert [ids(path) for path in asking] == ["open_instruct/training/deepspeed/library.py"]
        assert 'import_module("deepspeed")' in text_of(asking[0])

    def test_deepspeed_stays_in_its_folder(self) -> None:
        """Where one file loads it, once it is known to be one that will do."""
        assert not those(FILES, lambda path: "deepspeed" in libraries_of(path))
        library = "open_instruct.training.deepspeed.library"
        outside = [path for path in FILES if path.parent.name != "deepspeed"]
        assert not those(
            outside, lambda path: any(name.startswith(library) for name in imports_of(path))
        )

    def test_no_file_is_long(self) -> None:
        assert not those(FILES, lambda path: len(text_of(path).splitlines()) > MAX_LINES_OF_A_FILE)

    def test_no_function_is_long(self) -> None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        long = [
            f"{ids(path)}:{node.lineno} {node.name}"
            for path in FILES
            for node in ast.walk(tree_of(path))
            if isinstance(node, functions)
            and (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES_OF_A_FUNCTION
        ]
        assert not long

    def test_no_drawer_for_everything(self) -> None:
        assert not those(
            FILES, lambda path: path.stem in ("utils", "util", "helpers", "misc", "common")
        )

    def test_config_has_a_type(self) -> None:
        def is_without(node: ast.AST) -> bool:
            is_config = isinstance(node, ast.arg) and node.arg == "config"
            return (
                is_config and node.annotation is not None and ast.unparse(node.annotation) == "Any"
            )

        assert not those(FILES, lambda path: any(map(is_without, ast.walk(tree_of(path)))))

    def test_every_module_says_what_it_is(self) -> None:
        assert not those(FILES, lambda path: not ast.get_docstring(tree_of(path)))

    def test_checkers_are_silenced_by_name_only(self) -> None:
        assert not those(
            FILES, lambda path: re.search(r"# type: ignore(?!\[)|# noqa(?!: )", text_of(path))
        )

    def test_rooms_without_torch_never_load_it(self) -> None:
        without = [*(PACKAGE / "config").glob("*.py"), *(PACKAGE / name for name in WITHOUT_TORCH)]
        assert not those(without, lambda path: libraries_of(path) & HEAVY_LIBRARIES)

    def test_importing_others_loads_no_torch(self) -> None:
        light = [PACKAGE / name for name in LIGHT_TO_IMPORT]
        assert not those(
            light, lambda path: libraries_of(path, inside_functions=False) & HEAVY_LIBRARIES
        )


def imports_from_above(path: Path) -> Iterator[str]:
    room = room_of(path)
    for name in everything_loaded(path):
        library, _, module = name.partition(".")
        if library != "open_instruct":
            continue
        other = module.partition(".")[0]
        if not (PACKAGE / other).is_dir() and not (PACKAGE / f"{other}.py").is_file():
            other = "__init__"  # a name of the package itself, such as __version__
        same_floor = floor_of(other) == floor_of(room) and floor_of(room) in (0, len(FLOORS) - 1)
        if not (other == room or same_floor or floor_of(other) < floor_of(room)):
            yield name


def files_by_room() -> dict[str, list[Path]]:
    """The files of every room. A backend of the learner is one; so are the `entries`."""
    rooms: dict[str, list[Path]] = {}
    for path in FILES:
        room = room_of(path)
        if room == "training" and path.parent.name != room:
            room = f"{room}/{path.parent.name}"
        if not (PACKAGE / room).is_dir():
            room = "entries"
        rooms.setdefault(room, []).append(path)
    return rooms


class TestRooms:
    def test_each_folder_has_few_files(self) -> None:
        for room, files in files_by_room().items():
            folders = Counter(path.parent for path in files if path.stem != "__init__")
            assert max(folders.values()) <= MAX_FILES_OF_A_FOLDER, room


@cache
def file_of(module: str) -> Path | None:
    """The file of the package that the dotted name `open_instruct.room.file.NAME` comes from."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return None
    for end in range(len(parts), 1, -1):
        path = PACKAGE.joinpath(*parts[1:end]).with_suffix(".py")
        if path.is_file():
            return path
    return None


def test_families_are_told_apart_in_one_file() -> None:
    for path in FILES:
        if path.name != "families.py":
            words = {
                node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)
            }
            assert not words & FAMILIES.keys(), ids(path)


def test_no_two_files_import_each_other() -> None:
    """Nor any circle of more: what can be reached from a file never leads back to it."""
    assert in_circles(imported_files()) == []


def test_no_two_folders_of_a_room_import_each_other() -> None:
    folders: dict[Path, set[Path]] = {
        path.parent: set() for path in FILES if path.parent != PACKAGE
    }
    for path, imported in imported_files().items():
        own = {other.parent for other in imported if room_of(other) == room_of(path)}
        folders.get(path.parent, set()).update(own - {path.parent})
    assert in_circles(folders) == []


def imported_files() -> dict[Path, set[Path]]:
    return {
        path: {other for name in everything_loaded(path) if (other := file_of(name))} - {path}
        for path in FILES
    }


def in_circles(reached: dict[Path, set[Path]]) -> list[str]:
    """Those that are reached from themselves."""
    for middle in reached:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return [ids(path) for path, others in reached.items() if path in others]


@cache
def files_behind(script: str) -> frozenset[Path]:
    """The script, and what it and the backends import of the package, now or once it runs."""
    found: set[Path] = set()
    left = [REPOSITORY / script, *BACKENDS]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        left += [file for name in imports_of(path) if (file := file_of(name))]
    return frozenset(found)


@cache
def attributes_read(node: ast.AST) -> frozenset[str]:
    return frozenset(
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load)
    )


def flags_of_losses(trees: Iterable[ast.Module]) -> set[str]:
    """The keyword-only arguments of functions: a loss is called with the flags of these names."""
    functions = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    return {argument.arg for function in functions for argument in function.args.kwonlyargs}


@cache
def mixer_lists_asked(tree: ast.Module) -> frozenset[tuple[str, str]]:
    """Mixer lists, each with its splits, that a call names: these are read together by
    `find_entries`.
    """
    words = {
        argument.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    return frozenset(
        (word, f"{word}_splits")
        for word in words
        if word.endswith(("mixer_list", "mixer_eval_list"))
    )


@cache
def properties_of_configs() -> tuple[tuple[str, frozenset[str]], ...]:
    """Properties of the config classes, each with what it reads:

    `num_steps` reads `total_episodes`.
    """
    return tuple(
        (node.name, attributes_read(node))
        for path in (PACKAGE / "config").glob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
    )


class TestFlags:
    @pytest.mark.parametrize("command", commands_with_flags(), ids=lambda command: command.script)
    def test_every_flag_is_read(self, command: Any) -> None:
        """By something that the command's script imports, outside config/."""
        files = [path for path in files_behind(command.script) if room_of(path) != "config"]
        read = frozenset().union(*(attributes_read(tree_of(path)) for path in files))
        read |= flags_of_losses([tree_of(path) for path in files if room_of(path) == "losses"])
        read |= {
            name for made, behind in properties_of_configs() if made in read for name in behind
        }
        read |= {
            name for path in files for listed in mixer_lists_asked(tree_of(path)) for name in listed
        }
        assert list_flags(command.config_class).keys() - read == set()

    @pytest.mark.parametrize("command", commands_with_flags(), ids=lambda command: command.script)
    def test_condition_of_a_flag_is_a_flag_beside_it(self, command: Any) -> None:
        flags = list_flags(command.config_class)
        for flag in flags.values():
            if flag.requires:
                assert flag.other in flags, flag.name
                values = {*flag.requires.split()[1:]}
                assert values <= {*flags[flag.other].choices, OWN, ">0"}, flag.name

    def test_page_of_upstreams_flags_is_up_to_date(self) -> None:
        page = (REPOSITORY / "docs" / "upstream.md").read_text(encoding="utf-8")
        assert set(upstream_page.default_differences()) == set(upstream_page.upstream_reasons())
        assert page == upstream_page.page(), (
            "run: python scripts/upstream_page.py > docs/upstream.md"
        )

    def test_page_of_flags_is_up_to_date(self) -> None:
        page = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
        assert page == markdown(commands_with_flags()), (
            "run: python scripts/flags_page.py > docs/flags.md"
        )

    def test_page_of_metrics_is_up_to_date(self) -> None:
        page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert page == metrics_page.markdown(), (
            "run: python scripts/metrics_page.py > docs/metrics.md"
        )


@cache
def known_flags() -> frozenset[str]:
    """Flags of our commands: the config's, and whatever a program of ours spells as a word of its
    own.
    """
    trained = [command.config_class for command in commands_with_flags()]
    others = (
        ExportFlags,
        LayoutFlags,
        MergeFlags,
        PlanFlags,
        PreviewFlags,
        ReplayFlags,
        ReportFlags,
        ScoreFlags,
        ChatFlags,
        CheckFlags,
        RecordFlags,
        SessionsFlags,
        SessionReplayFlags,
    )
    configs = (*trained, *others, TinyModelFlags)
    flags = [flag for config_class in configs for flag in list_flags(config_class).values()]
    known = {flag.name for flag in flags} | {
        f"no_{flag.name}" for flag in flags if flag.kind is bool
    }
    programs = [
        *FILES,
        *(REPOSITORY / "benchmarks").rglob("*.py"),
        *(REPOSITORY / "scripts").glob("*.py"),
    ]
    for path in programs:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"--([a-z][\w-]*)", node.value)
                if match:
                    known.add(match[1].replace("-", "_"))
    return frozenset(
        known | {name for name, entry in upstream_table().items() if entry.ours in known}
    )


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_docs_name_only_flags_that_exist(path: Path) -> None:
    known = known_flags() | FOREIGN_FLAGS | PLACEHOLDERS
    if path.name == "upstream.md":
        sections = ("every", *upstream_page.TRAINERS)  # the page says what becomes of their flags
        known |= {name for section in sections for name in upstream_table(section)}
    if path.name == "migrate.md":
        tables = [
            find_table(suite, trainer) for suite in READERS for trainer in find_trainers(suite)
        ]
        known |= {name.partition(".")[0] for table in tables for name in table.rules} | {
            "config",
            "module",
        }
    named = re.findall(r"(?<![\w!-])--([A-Za-z][\w-]*)", path.read_text(encoding="utf-8"))
    unknown = sorted({name for name in named if name.replace("-", "_") not in known})
    assert not unknown, f"{ids(path)} names flags that no command has: {unknown}"
