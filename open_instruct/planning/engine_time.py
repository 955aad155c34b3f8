"""The least time in which engines generate the completions of a step, and the memory they need.

A step of an engine makes a token for each of its sequences. It reads all weights, and the keys and
values of all sequences, at a share of the bandwidth of the GPU's memory, or multiplies at a share
of its peak, whichever takes longer (Pope et al. 2022, arXiv:2211.05102, section 2), and on top is
what every step takes. Completions are taken to be of full length in the mean, the longest half as
long again; an engine that has finished one begins another where there is one (`turn_trace.py`).
"""

from dataclasses import dataclass
from math import ceil

from open_instruct.config.grpo import GRPOConfig
from open_instruct.models.hf.names import is_expert_stack
from open_instruct.planning.memory.scratch import CONTEXT_BYTES
from open_instruct.planning.step_time import GIGA, TERA
from open_instruct.planning.subject.devices import Device
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.read_shape import BYTES_OF_DTYPE
from open_instruct.planning.subject.workload import ENGINE_SEQS, ENGINE_TOKENS
from open_instruct.planning.turn_trace import TurnTrace, trace_turns

# Assumptions, not formulas: what vLLM reaches of a GPU's bandwidth, the seconds of a step that are
# neither reading nor arithmetic (scheduling, sampling), and those of an exchange of a tensor group,
# of which each layer has two.
BANDWIDTH_SHARE = 0.6
STEP_OVERHEAD_S = 0.004
EXCHANGE_S = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What all engines together generate in a step, and with what.

    `tokens_per_second` is a measured rate of one GPU, which replaces the formula; None: there is
    none.
    """

    shape: ModelShape
    device: Device
    mfu: float
    num_completions: int
    num_prompts: int
    prompt_tokens: int
    response_tokens: int
    item_bytes: int  # of a weight, and of a key
    memory_share: float  # of a GPU that an engine may take
    max_num_seqs: int
    tokens_per_second: float | None = None

    @classmethod
    def of(
        cls,
        config: GRPOConfig,
        shape: ModelShape,
        device: Device,
        *,
        mfu: float,
        tokens_per_second: float | None,
    ) -> "EngineWork":
        """The work of a run with these flags."""
        return cls(
            shape=shape,
            device=device,
            mfu=mfu,
            num_completions=config.num_completions_per_step,
            num_prompts=config.rollout.num_unique_prompts_rollout,
            prompt_tokens=config.data.max_prompt_token_length,
            response_tokens=config.data.response_length,
            item_bytes=BYTES_OF_DTYPE[config.engine_dtype],
            memory_share=config.fleet.vllm_gpu_memory_utilization,
            max_num_seqs=config.fleet.vllm_max_num_seqs or ENGINE_SEQS,
            tokens_per_second=tokens_per_second,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, in all GPUs of an engine together."""
        return self.shape.num_params * self.item_bytes

    def count_key_bytes(self, num_tokens: int) -> int:
        """Bytes of the keys and values of a sequence; a window keeps its own tokens alone."""
        num_positions = sum(min(num_tokens, window or num_tokens) for window in self.shape.windows)
        return 2 * self.shape.kv_width * num_positions * self.item_bytes

    @property
    def step_bytes(self) -> int:
        """What a step of an engine takes beside weights and cache: activations and logits."""
        width = max(self.shape.active_features(layer) for layer in self.shape.layers)
        activation_bytes = ENGINE_TOKENS * (3 * width + 4 * self.shape.d_model) * self.item_bytes
        return activation_bytes + 2 * self.max_num_seqs * self.shape.vocab_size * 4

    def find_cache_bytes(self, degree: int, *, beside_bytes: int = 0) -> int:
        """Bytes that are left for keys and values on a GPU of an engine of `degree` GPUs.

        Below 0 where not even the weights fit.

        Args:
            beside_bytes: what another process has on the GPU meanwhile.
        """
        memory_bytes = int(self.memory_share * self.device.memory_bytes)
        needed_bytes = self.weight_bytes // degree + self.step_bytes // degree + CONTEXT_BYTES
        return memory_bytes - beside_bytes - needed_bytes

    def count_seqs(self, degree: int, cache_bytes: int) -> int:
        """Sequences of full length that an engine's cache has room for at once."""
        longest_bytes = self.count_key_bytes(self.prompt_tokens + self.response_tokens)
        if not longest_bytes:
            return self.max_num_seqs
        return min(self.max_num_seqs, max(0, cache_bytes) * degree // longest_bytes)

    def trace_engine(self, num_engines: int, *, num_seqs: int, prompts_ahead: int = 0) -> TurnTrace:
        """How completions fill each of so many engines; see `count_seconds` for the arguments."""
        num_ahead = prompts_ahead * self.num_completions // max(1, self.num_prompts)
        return trace_turns(
            ceil(self.num_completions / num_engines), ceil(num_ahead / num_engines), num_seqs
        )

    def count_seconds(
        self, num_engines: int, degree: int, *, num_seqs: int, prompts_ahead: int = 0
    ) -> float:
        """Seconds in which so many engines generate all completions of a step.

        Args:
            num_engines: engines, among which completions are divided.
            degree: GPUs of an engine.
            num_seqs: sequences that an engine has at once.
            prompts_ahead: prompts of later steps that it may begin before the step is whole.
        """
        trace = self.trace_engine(num_engines, num_seqs=num_seqs, prompts_ahead=prompts_ahead)
        decode_s = 0.0
        for width, length in trace.durations.items():
            decode_s += length * self.response_tokens * self._step_seconds(width, degree)
        # Of completions that were paused prompts are computed again, and what was generated.
        num_tokens = trace.num_paused * self.prompt_tokens
        num_tokens += trace.paused_length * self.response_tokens
        if self.tokens_per_second is None:
            num_tokens += ceil(self.num_prompts / num_engines) * self.prompt_tokens
        prefill_s = 2 * self._active_params * num_tokens / (degree * self._flops_per_second)
        if self.tokens_per_second is None:
            return decode_s + prefill_s
        # The rate is that of engines that never wait.
        num_each = ceil(self.num_completions / num_engines)
        width = min(num_each, num_seqs)
        steady_s = num_each / width * self.response_tokens * self._step_seconds(width, degree)
        num_tokens_all = self.num_completions * self.response_tokens
        measured_s = num_tokens_all / (self.tokens_per_second * num_engines * degree)
        return measured_s * (decode_s + prefill_s) / steady_s

    def _step_seconds(self, num_seqs: int, degree: int) -> float:
        middle_tokens = self.prompt_tokens + self.response_tokens // 2
        read_bytes = self.weight_bytes + num_seqs * self.count_key_bytes(middle_tokens)
        bytes_per_second = self.device.memory_gb_s * GIGA * BANDWIDTH_SHARE
        compute_s = 2 * self._active_params * num_seqs / self._flops_per_second
        step_s = max(read_bytes / bytes_per_second, compute_s) / degree + STEP_OVERHEAD_S
        if degree > 1:
            step_s += 2 * self.shape.num_layers * EXCHANGE_S
        return step_s

    @property
    def _flops_per_second(self) -> float:
        return self.device.peak_tflops_bf16 * TERA * self.mfu

    @property
    def _active_params(self) -> int:
        num_values = 0
        for parameter in self.shape.parameters:
            if len(parameter.shape) == 2 or is_expert_stack(parameter.name):
                num_values += self.shape.active_params(parameter)
        return num_values
