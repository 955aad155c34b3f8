"""What one compiled block runs: its matrix products, and the bytes that the kernels between them
read and write.

PyTorch's compiler traces the block and divides it into a forward and a backward graph, as it does
on a GPU; no kernel is written. Operations between two products are taken to be fused as far as they
can be: what is read comes from memory once, what only the next of them needs never gets there.
Inductor may do less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

ATTENTION = ("_varlen_attn", "_varlen_attn_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One pass of one block. Of products in float8, at twice the speed, half the operations are
    counted.

    Example: Graph(product_flops=2**42, memory_bytes=2**30, num_kernels=21, kept_bytes=2**31), whose
    `kept_bytes` are what a forward pass keeps for the backward pass, its own input among it.
    """

    product_flops: int
    memory_bytes: int
    num_kernels: int
    kept_bytes: int = 0


def compiled_block(
    config: Any,
    lengths: Sequence[int],
    *,
    recomputed_modules: Sequence[str] = (),
    float8: str = "off",
) -> tuple[Graph, Graph]:
    """The forward and the backward pass of a block of `config` over documents of these lengths, in
    bfloat16.
    """
    from olmo_core.float8 import Float8Config
    from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode

    from open_instruct.models.attention import attention
    from open_instruct.models.attention.segments import Segments
    from open_instruct.models.build import build_model
    from open_instruct.training.model.float8 import Recipe

    graphs: list[Graph] = []

    def count(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph_of(module.graph, is_forward=not graphs))
        return module.forward

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    config.num_hidden_layers = 1
    model = build_model(config).to(torch.bfloat16)
    if float8 != "off":
        model.apply_fp8(Float8Config(ao=Recipe(name=float8)))
    if recomputed_modules:
        model.apply_activation_checkpointing(
            Mode.selected_modules, modules=list(recomputed_modules)
        )
    block, num_tokens = model.blocks["0"], sum(lengths)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(attention, "_varlen_can_run", lambda query: True),
    ):
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))
        segments = Segments.from_lengths(
            tuple(lengths), (0,) * len(lengths), device=torch.device("cpu")
        )
        for rope in model.ropes:
            rope.warmup_cache(segments.max_keys, torch.device("cpu"))
        x = torch.empty(1, num_tokens, model.d_model, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(block, backend=backend, fullgraph=True)(
            x, cu_doc_lens=segments
        ).sum().backward()
    torch.compiler.reset()
    forward, backward = graphs
    return forward, backward


def graph_of(graph: torch.fx.Graph, *, is_forward: bool) -> Graph:
    """The counts of a graph.

    Operations are taken in their order: each run of them between two products is fused.
    """
    source: dict[torch.fx.Node, torch.fx.Node] = {}  # what a view is a view of
    run_of: dict[torch.fx.Node, int] = {}
    products, kernels, run = 0, 0, 0
    readers: dict[torch.fx.Node, set[int]] = {}
    has_run = False
    for node in graph.nodes:
        source[node] = node
        if node.op != "call_function":
            run_of[node] = -1
            continue
        given = [source[each] for each in node.all_input_nodes]
        if is_view(node):
            source[node] = given[0]
            continue
        flops = flops_of(node)
        if flops is None:
            kernels += not has_run
            has_run = True
        else:
            products += flops
            kernels += 1
            run += 1
            has_run = False
        run_of[node] = run if flops is None else -2 - run
        for each in given:
            readers.setdefault(each, set()).add(run_of[node])
        run += flops is not None
    (output,) = (node for node in graph.nodes if node.op == "output")
    kept = {source[each] for each in output.all_input_nodes}
    for each in kept:
        readers.setdefault(each, set()).add(-1)
    memory = sum(size_of(node) * passes(run_of[node], readers.get(node, set())) for node in run_of)
    results = output.args[0]
    others = (
        {source[each] for each in results[1:] if isinstance(each, torch.fx.Node)}
        if is_forward
        else set()
    )
    weights = {
        node for node in others if node.op == "placeholder" and len(node.meta["val"].shape) == 2
    }
    return Graph(
        product_flops=products,
        memory_bytes=memory,
        num_kernels=kernels,
        kept_bytes=sum(size_of(node) for node in others - weights),
    )


def passes(made_in: int, read_in: set[int]) -> int:
    """How often a tensor passes between memory and the fused kernels: products' own passes are in
    their speed.
    """
    fused = {run for run in read_in if run >= 0}
    return len(fused - {made_in}) + (made_in >= 0 and bool(read_in - {made_in}))


def is_view(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # an item of a tuple
    return target.is_view or target._opname in ("_unsafe_view", "detach", "alias")


def flops_of(node: torch.fx.Node) -> int | None:
    """Operations of a product of matrices; 0 of attention, which is counted by its pairs;

    None of all else.
    """
    target: Any = node.target
    if target._opname in ATTENTION:
        return 0
    packet = target._overloadpacket
    if packet not in flop_registry:
        return None
    values = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in node.args]
    return int(flop_registry[packet](*values, out_val=node.meta["val"])) // (
        2 if target._opname == "_scaled_mm" else 1
    )


def size_of(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return sum(each.numel() * each.itemsize for each in values if isinstance(each, torch.Tensor))
