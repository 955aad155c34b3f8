"""The sharding decision, its errors and warnings, its picture, and `open-instruct layout`."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from itertools import chain, product
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from open_instruct import cli
from open_instruct.commands.layout import main
from open_instruct.commands.run_flags import find_backend
from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.sharding_sections import ParallelSection, RanksSection
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import join_choices, spell_count
from open_instruct.parallel.layout import (
    check_experts,
    check_feed_forward,
    divisors,
    find_layout,
    resolve_layout,
)
from open_instruct.parallel.node_sizes import node_sizes_from_environment
from open_instruct.parallel.picture import draw_layout
from open_instruct.parallel.wording import group_name, nodes_text, ranks_text
from tests.refusals import refused

DOCS_PAGE = Path(__file__).parents[3] / "docs" / "sharding.md"

node_lists = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.tuples(st.integers(1, 16), st.sampled_from([1, 2, 4, 6, 8, 16])).map(
        lambda pair: [pair[1]] * pair[0]
    ),
)


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    """Any layout that can be asked for: degrees drawn among those that divide."""
    nodes = draw(node_lists)
    tensor = draw(st.sampled_from(divisors(sum(nodes))))
    context = draw(st.sampled_from(divisors(sum(nodes) // tensor)))
    shard = draw(st.none() | st.sampled_from(divisors(sum(nodes) // tensor // context)))
    return resolve_layout(
        nodes,
        fsdp_shard_degree=shard,
        tensor_parallel_degree=tensor,
        context_parallel_degree=context,
    )


def degrees(layout: ShardLayout) -> tuple[int, int]:
    return layout.num_replicas, layout.shard_degree


# ---- the decision ----


@pytest.mark.parametrize(
    ("nodes", "flags", "replicas_and_shards"),
    [
        ([1], {}, (1, 1)),
        ([8], {}, (1, 8)),
        ([8, 8], {}, (2, 8)),
        ([8] * 128, {}, (128, 8)),
        ([8, 8], {"tensor_parallel_degree": 2}, (2, 4)),
        ([8, 8], {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, (2, 2)),
        ([8, 8], {"tensor_parallel_degree": 8}, (2, 1)),
        ([4, 4], {"tensor_parallel_degree": 8}, (1, 1)),
        ([2, 4], {}, (3, 2)),
        ([4, 8, 8], {}, (5, 4)),
        ([4, 8], {"tensor_parallel_degree": 2}, (3, 2)),
        ([3, 4], {}, (7, 1)),
        ([6, 6], {"tensor_parallel_degree": 4}, (3, 1)),
        ([8, 8], {"fsdp_shard_degree": 4}, (4, 4)),
        ([8, 8], {"fsdp_num_replicas": 4}, (4, 4)),
        ([8, 8], {"fsdp_shard_degree": 16}, (1, 16)),
        ([8, 8], {"fsdp_shard_degree": 2, "fsdp_num_replicas": 8}, (8, 2)),
        ([8, 8], {"fsdp_num_replicas": 4, "tensor_parallel_degree": 2}, (4, 2)),
        ([2, 4], {"fsdp_num_replicas": 2}, (2, 3)),
    ],
)
def test_degrees(
    nodes: list[int], flags: dict[str, Any], replicas_and_shards: tuple[int, int]
) -> None:
    assert degrees(resolve_layout(nodes, **flags)) == replicas_and_shards


def test_groups_of_equal_and_of_unequal_nodes() -> None:
    layout = resolve_layout([8, 8])
    assert layout.shard_groups == (tuple(range(8)), tuple(range(8, 16)))
    assert layout.replica_groups == tuple((rank, rank + 8) for rank in range(8))
    layout = resolve_layout([2, 4])
    assert layout.shard_groups == ((0, 1), (2, 3), (4, 5))
    assert layout.replica_groups == ((0, 2, 4), (1, 3, 5))


def test_groups_with_tensor_and_context_degree() -> None:
    layout = resolve_layout([8, 8], tensor_parallel_degree=2, context_parallel_degree=2)
    assert layout.tensor_groups[:2] == ((0, 1), (2, 3))
    assert layout.context_groups[:2] == ((0, 2), (1, 3))
    # FSDP shards over the context ranks as well.
    assert layout.shard_groups == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.replica_groups[0] == (0, 8)


def test_groups_of_experts() -> None:
    assert resolve_layout([2, 2], expert_parallel_degree=2).expert_groups == ((0, 1), (2, 3))
    assert resolve_layout([2, 2]).expert_groups == ((0,), (1,), (2,), (3,))
    picture = draw_layout(resolve_layout([8, 8], expert_parallel_degree=8)).plain
    assert "expert groups   exchange tokens at the experts            within a node" in picture


@pytest.mark.parametrize(
    ("degree", "num_experts", "message"),
    [
        (2, 8, None),
        (1, 0, None),
        (2, 0, "--expert_parallel_degree 2: a model has no experts to split; leave it out"),
        (
            4,
            6,
            "4 does not divide the 6 experts of a layer of a model; leave it out, or give "
            "--fsdp_shard_degree the",
        ),
    ],
)
def test_experts_are_split_evenly(degree: int, num_experts: int, message: str | None) -> None:
    layout = resolve_layout([4], fsdp_shard_degree=degree, expert_parallel_degree=degree)
    with nullcontext() if message is None else pytest.raises(InputError, match=message):
        check_experts(layout, num_experts=num_experts, model="a model")


def test_feed_forward_layers_are_split_evenly() -> None:
    layout = resolve_layout([3], tensor_parallel_degree=3)
    check_feed_forward(layout, sizes={1536}, model="a model")
    with pytest.raises(InputError, match=r"3 does not divide the 100 .* of a model; use 1 or 2"):
        check_feed_forward(layout, sizes={100}, model="a model")


@given(layouts())
def test_degrees_multiply_to_the_world_and_groups_partition_it(layout: ShardLayout) -> None:
    assert (
        layout.num_replicas * layout.shard_degree * layout.model_parallel_degree
        == layout.world_size
    )
    everyone = list(range(layout.world_size))
    sizes = {
        layout.shard_groups: layout.shard_group_size,
        layout.replica_groups: layout.num_replicas,
        layout.context_groups: layout.context_parallel_degree,
        layout.tensor_groups: layout.tensor_parallel_degree,
    }
    for groups, size in sizes.items():
        assert sorted(chain.from_iterable(groups)) == everyone
        assert {len(group) for group in groups} == {size}
        assert all(list(group) == sorted(group) for group in groups)
    for shard_group, replica_group in product(layout.shard_groups[:4], layout.replica_groups[:4]):
        assert len(set(shard_group) & set(replica_group)) <= 1


@given(layouts())
def test_straddling_is_what_node_of_says(layout: ShardLayout) -> None:
    nodes_of_groups = [{layout.find_node(rank) for rank in group} for group in layout.shard_groups]
    assert layout.straddles_nodes == any(len(nodes) > 1 for nodes in nodes_of_groups)
    for node, ranks in enumerate(layout.nodes):
        assert len(ranks) == layout.gpus_per_node[node]
        assert {layout.find_node(rank) for rank in ranks} == {node}


@given(node_lists, st.data())
def test_auto_never_straddles_and_no_larger_degree_could(
    nodes: list[int], data: st.DataObject
) -> None:
    tensor = data.draw(st.sampled_from(divisors(sum(nodes))))
    auto = resolve_layout(nodes, tensor_parallel_degree=tensor)
    assert not auto.straddles_nodes
    for degree in divisors(auto.data_parallel_world_size):
        if degree > auto.shard_degree:
            assert resolve_layout(
                nodes, fsdp_shard_degree=degree, tensor_parallel_degree=tensor
            ).straddles_nodes


@given(layouts())
def test_shard_degree_and_replicas_infer_each_other(layout: ShardLayout) -> None:
    model_parallel: dict[str, Any] = {
        "tensor_parallel_degree": layout.tensor_parallel_degree,
        "context_parallel_degree": layout.context_parallel_degree,
    }
    shards, replicas = (
        {"fsdp_shard_degree": layout.shard_degree},
        {"fsdp_num_replicas": layout.num_replicas},
    )
    for given_flags in (shards, replicas, shards | replicas):
        assert degrees(
            resolve_layout(layout.gpus_per_node, **given_flags, **model_parallel)
        ) == degrees(layout)


def test_single_device() -> None:
    layout = resolve_layout([1], single_device=True)
    assert layout.single_device and degrees(layout) == (1, 1)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("nodes", "flags", "message"),
    [
        ([8], {"fsdp_shard_degree": 3}, ("layout", "fsdp_shard_degree", "3", "8", "1, 2, 4 or 8")),
        ([8], {"fsdp_num_replicas": 5}, ("layout", "fsdp_num_replicas", "5", "8", "1, 2, 4 or 8")),
        (
            [8, 8],
            {"fsdp_shard_degree": 16, "tensor_parallel_degree": 2},
            ("layout", "fsdp_shard_degree", "8", "16", "1, 2, 4 or 8"),
        ),
        (
            [8],
            {"fsdp_shard_degree": 4, "fsdp_num_replicas": 4},
            ("layout", "fsdp_shard_degree", "16", "1 x 8, 2 x 4, 4 x 2 or 8 x 1"),
        ),
        (
            [8, 8],
            {"tensor_parallel_degree": 3},
            ("layout", "tensor_parallel_degree", "1, 2, 4 or 8 (within", "or 16 (across"),
        ),
        (
            [8],
            {"context_parallel_degree": 3},
            ("layout", "context_parallel_degree", "3", "8", "1, 2"),
        ),
        (
            [8, 8],
            {"tensor_parallel_degree": 4, "context_parallel_degree": 8},
            ("layout", "tensor_parallel_degree", "32", "16", "1, 2, 4, 8 or 16"),
        ),
        (
            [8, 8],
            {"expert_parallel_degree": 4},
            ("layout", "expert_parallel_degree", "4", "1 or 8", "--fsdp_shard_degree 4"),
        ),
        (
            [4],
            {"expert_parallel_degree": 2, "fsdp_shard_degree": 1},
            ("layout", "expert_parallel_degree", "1", "--fsdp_shard_degree 2"),
        ),
        (
            [8],
            {"expert_parallel_degree": 4, "tensor_parallel_degree": 2},
            ("layout", "expert_parallel_degree", "tensor"),
        ),
        (
            [8],
            {"expert_parallel_degree": 4, "context_parallel_degree": 2},
            ("layout", "expert_parallel_degree", "context"),
        ),
        ([], {}, ("layout", "gpus_per_node")),
        ([8, 8], {"single_device": True}, ("layout", "single_gpu_mode", "16")),
    ],
)
def test_refused_with_what_would_work(
    nodes: list[Any], flags: dict[str, Any], message: tuple[Any, ...]
) -> None:
    with refused(*message) as caught:
        resolve_layout(nodes, **flags)
    assert isinstance(caught.value, ValueError)


@given(node_lists, st.integers(1, 64))
def test_every_value_an_error_offers_works(nodes: list[int], degree: int) -> None:
    try:
        resolve_layout(nodes, fsdp_shard_degree=degree)
    except InputError as error:
        offered = re.findall(r"\d+", str(error).split("; use ")[1])
        assert offered
        for value in offered:
            assert resolve_layout(nodes, fsdp_shard_degree=int(value)).shard_degree == int(value)
    else:
        assert sum(nodes) % degree == 0


# ---- what is allowed with a warning ----


@given(layouts())
def test_warning_exactly_where_shard_groups_straddle(layout: ShardLayout) -> None:
    shard_warnings = [
        warning for warning in layout.warnings if warning.startswith("Shard groups straddle")
    ]
    context_warnings = [
        warning for warning in layout.warnings if warning.startswith("Context groups straddle")
    ]
    assert len(shard_warnings) == int(layout.straddles_nodes and layout.shard_degree > 1)
    assert layout.straddles_nodes <= bool(shard_warnings or context_warnings)


@given(node_lists, st.data())
def test_following_a_straddle_warning_ends_the_straddling(
    nodes: list[int], data: st.DataObject
) -> None:
    tensor = data.draw(st.sampled_from(divisors(sum(nodes))))
    shard = data.draw(st.sampled_from(divisors(sum(nodes) // tensor)))
    layout = resolve_layout(nodes, fsdp_shard_degree=shard, tensor_parallel_degree=tensor)
    if not layout.straddles_nodes:
        return
    (warning,) = (warning for warning in layout.warnings if warning.startswith("Shard groups"))
    remedy = re.search(r"within a node with --(\w+_degree) ([\d, or]+)", warning)
    if remedy is None:
        assert "no change of one degree" in warning and gcd(*nodes) == 1
        return
    for degree in re.findall(r"\d+", remedy[2]):
        flags = {"tensor_parallel_degree": tensor, remedy[1]: int(degree)}
        followed = resolve_layout(nodes, **flags)
        assert not followed.straddles_nodes and followed.shard_degree > 1


STRADDLES = "groups straddle nodes"
UNSHARDED = "The model is not sharded"


@pytest.mark.parametrize(
    ("nodes", "flags", "parts"),
    [
        # It stays short for many nodes.
        (
            [8] * 128,
            {"fsdp_shard_degree": 128},
            ["A: ranks 0-127 (nodes 0 to 15)", "and 5 more groups"],
        ),
        (
            [4, 4],
            {"context_parallel_degree": 8},
            [f"Context {STRADDLES}", "--context_parallel_degree 1, 2 or 4"],
        ),
        ([1] * 4, {}, [UNSHARDED, "4 copies", "--fsdp_shard_degree 2 or 4 (groups across nodes)"]),
        (
            [3, 4],
            {},
            ["nodes of 3 and 4 GPUs hold 7 copies", "--fsdp_shard_degree 7 (groups across nodes)"],
        ),
        (
            [8],
            {"fsdp_num_replicas": 8},
            [UNSHARDED, "--fsdp_shard_degree 2, 4 or 8 in place of --fsdp_num_replicas"],
        ),
    ],
)
def test_costly_layout_is_warned_of(
    nodes: list[int], flags: dict[str, Any], parts: list[str]
) -> None:
    (warning,) = resolve_layout(nodes, **flags).warnings
    assert all(part in warning for part in parts) and len(warning) < 500


def test_tensor_groups_across_nodes_and_a_model_that_nothing_shards() -> None:
    tensor_warning, unsharded_warning = resolve_layout(
        [4, 4, 4, 4], tensor_parallel_degree=8
    ).warnings
    assert "ranks 0-7 (nodes 0 to 1)" in tensor_warning
    assert "--tensor_parallel_degree 1, 2 or 4" in tensor_warning
    assert UNSHARDED in unsharded_warning


@pytest.mark.parametrize(
    ("nodes", "flags"),
    [
        ([1], {}),  # one GPU has nobody to share with
        ([8], {"fsdp_shard_degree": 1}),  # asked for by name
        ([8], {"tensor_parallel_degree": 8}),  # one copy, split by the tensor degree
        ([8, 8], {"context_parallel_degree": 8}),  # FSDP shards over context ranks
    ],
)
def test_no_warning_where_nothing_is_lost(nodes: list[int], flags: dict[str, Any]) -> None:
    assert resolve_layout(nodes, **flags).warnings == ()


# ---- nodes from the environment ----


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, (1,)),
        ({"NUM_NODES": "4"}, (1,)),  # a cluster's own variable, but no launcher
        ({"WORLD_SIZE": "1"}, (1,)),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, (8,)),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, (8, 8)),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, (8, 8)),
        (
            {
                "WORLD_SIZE": "16",
                "LOCAL_WORLD_SIZE": "8",
                "NUM_NODES": "2",
                "GROUP_WORLD_SIZE": "2",
            },
            (8, 8),
        ),
        ({"WORLD_SIZE": "16", "NUM_NODES": "4"}, (4, 4, 4, 4)),
        ({"WORLD_SIZE": " 4 ", "LOCAL_WORLD_SIZE": "4", "NUM_NODES": ""}, (4,)),
    ],
)
def test_nodes_from_environment(environ: dict[str, str], nodes: tuple[int, ...]) -> None:
    assert node_sizes_from_environment(environ) == nodes


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "eight"}, ("bad_value", None, "WORLD_SIZE", "'eight'")),
        (
            {"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "1"},
            ("bad_value", None, "WORLD_SIZE", "'0'", "1"),
        ),
        ({"WORLD_SIZE": "9" * 5000}, ("bad_value", None, "whole number")),
        ({"LOCAL_WORLD_SIZE": "8"}, ("machine", None, "LOCAL_WORLD_SIZE", "8")),
        ({"WORLD_SIZE": "8"}, ("machine", None, "WORLD_SIZE", "8", "LOCAL_WORLD_SIZE")),
    ],
)
def test_environment_that_lacks_a_number(environ: dict[str, str], message: tuple[Any, ...]) -> None:
    with refused(*message):
        node_sizes_from_environment(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "8", "NUM_NODES": "3"},
        # Of this launcher's own: the ranks tell where they are.
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"},
    ],
)
def test_unequal_nodes_are_left_to_the_ranks(environ: dict[str, str]) -> None:
    assert node_sizes_from_environment(environ) is None


# ---- the picture ----


@given(layouts())
def test_picture_fits_in_eighty_columns_of_ascii(layout: ShardLayout) -> None:
    picture = draw_layout(layout).plain
    assert picture.isascii()
    assert max(len(line) for line in picture.splitlines()) <= 80
    assert len(picture.splitlines()) < 60


@pytest.mark.parametrize("num_nodes", [1, 8, 9])
def test_picture_of_many_nodes_keeps_the_first_and_the_last(num_nodes: int) -> None:
    lines = draw_layout(resolve_layout([8] * num_nodes)).plain.splitlines()
    assert any(line.startswith("node 0 ") for line in lines)
    letter = group_name(num_nodes - 1)
    assert any(
        line.startswith(f"node {num_nodes - 1} ") and line.endswith(f" {letter}" * 8)
        for line in lines
    )
    assert (f"... nodes 4 to {num_nodes - 2}" in lines) == (num_nodes > 8)


def test_picture_leaves_out_what_does_not_fit_in_a_line() -> None:
    lines = draw_layout(resolve_layout([200])).plain.splitlines()
    (node,) = (line for line in lines if line.startswith("node 0 "))
    assert node.startswith("node 0  ranks 0-199 ") and node.endswith("A A ...")
    assert "1 group of 200 GPUs: A 0-199" in lines[-1]


def test_groups_of_one_exchange_nothing() -> None:
    assert draw_layout(resolve_layout([1])).plain.endswith("no groups: nothing is exchanged")
    assert "replica groups" not in draw_layout(resolve_layout([8])).plain


def test_picture_has_colours_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    picture = draw_layout(resolve_layout([8, 8], tensor_parallel_degree=2))
    Console(force_terminal=True, color_system="standard").print(
        picture, soft_wrap=True, highlight=False
    )
    on_terminal = capsys.readouterr().out
    assert "\x1b[" in on_terminal
    assert re.sub(r"\x1b\[[\d;]*m", "", on_terminal).rstrip("\n") == picture.plain


def test_words() -> None:
    assert [group_name(index) for index in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]
    assert (join_choices([1]), join_choices([1, 2, 4])) == ("1", "1, 2 or 4")
    shown = [ranks_text(ranks) for ranks in ([3], [0, 1], [0, 8], range(8), range(0, 32, 2))]
    assert shown == ["3", "0-1", "0 8", "0-7", "0 2 ... 30"]
    assert nodes_text([8]) == "1 node of 8 GPUs"
    assert nodes_text([2, 4]) == "nodes of 2 and 4 GPUs"
    assert nodes_text([2, 4, 2, 4, 2]) == "5 nodes of 2 to 4 GPUs"


# ---- the command ----


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of nodes that are written as NODESxGPUS."""
    assert main(["--gpus_per_node", "2x8", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus_per_node"] == [8, 8, 4]
    assert main(["--gpus_per_node", "2", "4", "--fsdp_shard_degree", "3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["shard_degree"], record["num_replicas"], record["tensor_parallel_degree"]) == (
        3,
        2,
        1,
    )
    assert record["shard_groups"] == [[0, 1, 2], [3, 4, 5]]
    assert record["replica_groups"] == [[0, 3], [1, 4], [2, 5]]
    assert record["straddles_nodes"] is True and len(record["warnings"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "missing: --gpus_per_node"),
        ("--gpus_per_node", "--gpus_per_node is empty"),
        (
            "--gpus_per_node 8 --fsdp_shard_degree 3",
            "--fsdp_shard_degree 3 does not divide 8 learner GPUs; use 1, 2",
        ),
        (
            "--gpus_per_node 8 --fsdp_shard_degre 4",
            "--fsdp_shard_degre is not a flag; did you mean --fsdp_shard_deg",
        ),
        ("--gpus_per_node 8 --fsdp_shard_degree 0", "--fsdp_shard_degree 0: must be at least 1"),
        ("--gpus_per_node 8,8", "--gpus_per_node '8,8' is not a whole number"),
        ("--gpus_per_node 0x8", "--gpus_per_node '0' is not a whole number"),
        ("--gpus_per_node 99999999x8", "more than the 10000 GPUs"),
        ("--gpus_per_node 8 8 --single_gpu_mode", "--single_gpu_mode trains on one GPU, not on 16"),
    ],
)
def test_command_refuses_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["layout", *shlex.split(words)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("open-instruct layout: ") and message in streams.err


def test_command_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in (
        "gpus_per_node",
        "fsdp_shard_degree",
        "fsdp_num_replicas",
        "tensor_parallel_degree",
        "json",
    ):
        assert f"--{flag}" in text
    assert "4x8 stands for four nodes of 8" in text


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys; from open_instruct.commands.layout import main; "
        "main(['--gpus_per_node', '8']); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, cwd=DOCS_PAGE.parents[1]
        ).returncode
        == 0
    )


# ---- the page in docs/ ----


# (arguments, output) of every `$ open-instruct layout …`.
DOCUMENTED = re.findall(
    r"```console\n\$ open-instruct layout (.*?)\n(.*?)```", DOCS_PAGE.read_text(), re.DOTALL
)


@pytest.mark.parametrize(("arguments", "output"), DOCUMENTED)
def test_page_shows_what_the_command_prints(
    arguments: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(DOCUMENTED) >= 5
    monkeypatch.setenv("NO_COLOR", "1")
    cli.main(["layout", *shlex.split(arguments)])
    streams = capsys.readouterr()
    assert streams.out + streams.err == output


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "pair", "0 pairs"),
        (2, "reply", "2 replies"),
        (1234, "row", "1,234 rows"),
    ],
)
def test_count_and_its_noun(count: int, noun: str, text: str) -> None:
    assert spell_count(count, noun) == text


BOTH = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}


@pytest.mark.parametrize(
    ("parallel", "part"),
    [
        (
            RanksSection(fsdp_shard_degree=8),
            "8: that takes 8 processes, and there is one; --num_processes 8 starts them",
        ),
        (
            RanksSection(**BOTH),
            "--tensor_parallel_degree 2 and --context_parallel_degree 2: that takes 4 processes",
        ),
        (
            RanksSection(expert_parallel_degree=2, fsdp_shard_degree=2, fsdp_num_replicas=2),
            "that takes 4 processes",
        ),
        (
            RanksSection(expert_parallel_degree=2),
            "--expert_parallel_degree 2: that takes 2 processes",
        ),
        (
            RanksSection(fsdp_num_replicas=2, backend="deepspeed", tensor_parallel_degree=2),
            "takes 4 processes",
        ),
        (
            LearnerParallelSection(fsdp_shard_degree=4),
            "and there is one; --num_learners_per_node 4 starts them",
        ),
    ],
)
def test_degrees_of_one_process_say_how_more_are_started(
    parallel: ParallelSection, part: str
) -> None:
    with pytest.raises(InputError) as caught:
        find_layout(parallel, [1], find_backend(parallel.backend))
    assert part in str(caught.value)
