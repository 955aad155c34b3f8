"""The engine behind `open-instruct serve RUN --record`."""

from functools import partial
from pathlib import Path

from open_instruct.commands.serving.served_sessions import choose_engine_settings
from open_instruct.commands.talking.models import TalkingModel
from tests.unit.token_data import byte_tokenizer, chat_format


def test_engine_has_the_dtype_of_its_device_where_no_flag_names_one(tmp_path: Path) -> None:
    chat = chat_format(byte_tokenizer(), "simple_chat")
    model = TalkingModel(name="a run", folder=tmp_path)
    choose = partial(choose_engine_settings, model, chat, max_seq_length=4096)
    on_cpu = choose(param_dtype=None, on_cuda=False)
    on_gpu = choose(param_dtype=None, on_cuda=True)
    assert (on_cpu.dtype, on_gpu.dtype) == ("float32", "bfloat16")
    assert on_gpu.batching.schedules_ahead
    assert not on_cpu.batching.schedules_ahead
    assert choose(param_dtype="float32", on_cuda=True).dtype == "float32"
