"""Writes other_suites.json beside it: losses and gradients by the programs of TRL and verl, on
random inputs.

    python tests/unit/losses/record_other_suites.py TRL VERL

TRL and VERL are checkouts of the two. Neither is imported, as each brings dozens of packages: the
statements that compute a loss are cut out of their files, and run on tensors of float64.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TABLE = Path(__file__).with_name("other_suites.json")
PREFERENCE = ("exo_pair", "discopop", "aot", "aot_unpaired")
BETA, SMOOTHING, TAU = 0.35, 0.125, 0.05
CLIP_LOWER, CLIP_HIGHER, COV_LOWER, COV_UPPER, KL_COV_COEF = 0.2, 0.28, 0.05, 1.5, 0.7
# Of clip_cov all candidates are drawn, as its draw is random; of kl_cov a tenth is penalised.
CLIP_COV_SHARE, KL_COV_SHARE = 1.0, 0.1


def run_statements(statements: Iterable[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    module = ast.Module(body=list(statements), type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), "<another suite>", "exec"), names)
    return names


def find_function(path: Path, name: str) -> ast.FunctionDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )


def assigned_name(statement: ast.stmt) -> str:
    is_plain = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    return statement.targets[0].id if is_plain else ""


def trl_preference_losses(
    trl: Path, name: str, policy_2P: torch.Tensor, reference_2P: torch.Tensor
) -> torch.Tensor:
    """The branch of `loss_type == name` in DPOTrainer._compute_loss."""
    function = find_function(trl / "trl" / "trainer" / "dpo_trainer.py", "_compute_loss")
    branch = next(
        node.body
        for node in ast.walk(function)
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"loss_type == '{name}'"
    )
    log_ratios_2P = policy_2P - reference_2P
    settings = SimpleNamespace(
        beta=BETA,
        label_smoothing=SMOOTHING,
        args=SimpleNamespace(discopop_tau=TAU, label_smoothing=SMOOTHING),
    )
    names = {
        "torch": DoubleTorch(),
        "F": torch.nn.functional,
        "self": settings,
        "device": "cpu",
        "chosen_logps": policy_2P[0],
        "rejected_logps": policy_2P[1],
        "ref_chosen_logps": reference_2P[0],
        "ref_rejected_logps": reference_2P[1],
        "chosen_logratios": log_ratios_2P[0],
        "rejected_logratios": log_ratios_2P[1],
        "chosen_scores": log_ratios_2P[0],
        "rejected_scores": log_ratios_2P[1],
        "delta_score": log_ratios_2P[0] - log_ratios_2P[1],
    }
    losses_P: torch.Tensor = run_statements(branch, names)["per_sequence_loss"]
    return losses_P


class DoubleTorch:
    """torch, whose `tensor` makes float64, so that TRL's constants have as many digits as the
    inputs.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, value: float, **_: Any) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64)


def trl_gmpo(trl: Path, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The statements of GMPOTrainer._compute_loss from the log-ratio to the loss of a sequence;
    their mean.
    """
    function = find_function(
        trl / "trl" / "experimental" / "gmpo" / "gmpo_trainer.py", "_compute_loss"
    )
    names = [assigned_name(statement) for statement in function.body]
    first, last = names.index("log_ratio"), names.index("per_sequence_loss")
    scope = {
        "torch": torch,
        "self": SimpleNamespace(epsilon_low=CLIP_LOWER, epsilon_high=CLIP_HIGHER),
        "per_token_logps": rows["logprobs"],
        "old_per_token_logps": rows["old_logprobs"],
        "advantages": rows["advantages"][:, 0],
        "mask": rows["mask"],
        "entropy_mask": None,
    }
    per_sequence: torch.Tensor = run_statements(function.body[first : last + 1], scope)[
        "per_sequence_loss"
    ]
    return per_sequence.mean()


def verl_policy_loss(verl: Path, function_name: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """`compute_policy_loss_...` of core_algos.py, with the functions that it calls."""
    algorithms, functional = (
        verl / "verl" / "trainer" / "ppo" / "core_algos.py",
        verl / "verl" / "utils",
    )
    helpers: dict[str, Any] = {"torch": torch}
    for name in ("masked_sum", "masked_mean"):
        run_statements([find_function(functional / "torch_functional.py", name)], helpers)
    scope = {
        "torch": torch,
        "Any": Any,
        "Optional": Any,
        "verl_F": SimpleNamespace(**helpers),
        "AlgoConfig": type("AlgoConfig", (), {}),
    }
    for name in ("agg_loss", function_name):
        function = find_function(algorithms, name)
        function.decorator_list = []
        for argument in function.args.args:
            argument.annotation = None
        function.returns = None
        run_statements([function], scope)
    policy_loss = SimpleNamespace(
        clip_cov_ratio=CLIP_COV_SHARE,
        clip_cov_lb=COV_LOWER,
        clip_cov_ub=COV_UPPER,
        kl_cov_ratio=KL_COV_SHARE,
        ppo_kl_coef=KL_COV_COEF,
    )
    config = SimpleNamespace(
        clip_ratio=CLIP_LOWER,
        clip_ratio_low=CLIP_LOWER,
        clip_ratio_high=CLIP_HIGHER,
        policy_loss=policy_loss,
        global_batch_info={},
    )
    compute: Callable[..., tuple[torch.Tensor, Any]] = scope[function_name]
    loss, _ = compute(
        rows["old_logprobs"], rows["logprobs"], rows["advantages"], rows["mask"], config=config
    )
    return loss


def random_pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference_2P = -40 * torch.rand(2, 9, generator=generator, dtype=torch.float64)
    policy_2P = reference_2P + 4 * torch.randn(2, 9, generator=generator, dtype=torch.float64)
    return policy_2P.requires_grad_(), reference_2P


def random_rows(seed: int) -> dict[str, torch.Tensor]:
    """Six completions of at most seven tokens, padded as those suites pad them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (6,), generator=generator)
    old = -3 * torch.rand(6, 7, generator=generator, dtype=torch.float64)
    new = old + 0.3 * torch.randn(6, 7, generator=generator, dtype=torch.float64)
    advantages = (
        torch.randn(6, 1, generator=generator, dtype=torch.float64).expand(6, 7).contiguous()
    )
    mask = (torch.arange(7) < lengths[:, None]).double()
    return {
        "logprobs": new.requires_grad_(),
        "old_logprobs": old,
        "advantages": advantages,
        "mask": mask,
    }


def record(trl: Path, verl: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for seed in range(3):
        policy_2P, reference_2P = random_pairs(seed)
        for name in PREFERENCE:
            loss = trl_preference_losses(trl, name, policy_2P, reference_2P).mean()
            (gradient_2P,) = torch.autograd.grad(loss, policy_2P)
            cases.append(
                case(name, "trl", loss, gradient_2P, policy=policy_2P, reference=reference_2P)
            )
        rows = random_rows(seed)
        losses = {
            ("gmpo", "trl"): lambda: trl_gmpo(trl, rows),  # noqa: B023
            ("gmpo", "verl"): lambda: verl_policy_loss(verl, "compute_policy_loss_geo_mean", rows),  # noqa: B023
            ("clip_cov", "verl"): lambda: verl_policy_loss(
                verl,
                "compute_policy_loss_clip_cov",
                rows,  # noqa: B023
            ),
            ("kl_cov", "verl"): lambda: verl_policy_loss(verl, "compute_policy_loss_kl_cov", rows),  # noqa: B023
        }
        for (name, suite), compute in losses.items():
            loss = compute()
            (gradient,) = torch.autograd.grad(loss, rows["logprobs"])
            cases.append(case(name, suite, loss, gradient, **rows))
    return cases


def case(
    name: str, suite: str, loss: torch.Tensor, gradient: torch.Tensor, **inputs: torch.Tensor
) -> dict[str, Any]:
    values = {key: tensor.tolist() for key, tensor in inputs.items()}
    return {
        "name": name,
        "suite": suite,
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "inputs": values,
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: record_other_suites.py TRL VERL (two checkouts)")
    lines = ",\n".join(json.dumps(each) for each in record(Path(sys.argv[1]), Path(sys.argv[2])))
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
