"""Forward and backward of distillation's head, plain and ours."""

from typing import Any

import torch
import torch.nn.functional as F

from open_instruct.losses.distillation import divergence
from open_instruct.models.heads.logprob_head import HeadSettings, LogprobHead, Measure
from open_instruct.objectives.objective import Teacher
from open_instruct.training.teacher import TeacherComparison

VOCAB_SIZE = 100_352


def step_of(way: str, num_tokens: int, width: int, dtype_name: str) -> Any:
    """A function that runs forward and backward of the heads once; what it starts from is there
    already.
    """
    dtype = getattr(torch, dtype_name)
    head = LogprobHead(d_model=width, vocab_size=VOCAB_SIZE, bias=False, dtype=dtype)
    hidden_BKD = torch.randn(1, num_tokens, width, dtype=dtype, requires_grad=True)
    labels_BK = torch.zeros(1, num_tokens, dtype=torch.long)
    teacher_BKD, teacher_VD = (
        torch.randn(1, num_tokens, width).to(dtype),
        torch.randn(VOCAB_SIZE, width).to(dtype),
    )

    def plain() -> None:
        logits_NV = head.w_out(hidden_BKD[0]).float()
        with torch.no_grad():
            teacher_NV = F.linear(teacher_BKD[0], teacher_VD).float().log_softmax(dim=-1)
        kl = F.kl_div(logits_NV.log_softmax(dim=-1), teacher_NV, reduction="sum", log_target=True)
        ce = F.cross_entropy(logits_NV, labels_BK[0], reduction="sum")
        (0.5 * (ce + kl) / num_tokens).backward()

    def ours() -> None:
        teacher = Teacher(model_name_or_path="", compare=lambda *both: divergence(*both, beta=0.0))
        pretrained: Any = None
        comparison = TeacherComparison(
            teacher=teacher, pretrained=pretrained, vocab_size=VOCAB_SIZE, head_VD=teacher_VD
        )
        compare = comparison.compare_logits
        settings = HeadSettings(measure=Measure(compare, (teacher_BKD,)))
        out = head(
            hidden_BKD,
            labels=labels_BK,
            loss_reduction="none",
            return_logits=False,
            settings=lambda: settings,
        )
        (0.5 * (out.loss.sum() + out.measured.sum()) / num_tokens).backward()

    return {"plain": plain, "ours": ours}[way]
