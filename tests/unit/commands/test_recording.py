"""The engine behind `open-instruct serve RUN --record`."""

from pathlib import Path

from open_instruct.commands.recording import RecordFlags, choose_engine_settings
from open_instruct.commands.talking.models import TalkingModel
from open_instruct.config.parser import parse
from tests.unit.token_data import byte_tokenizer, chat_format


def test_engine_has_the_dtype_of_its_device_where_no_flag_names_one(tmp_path: Path) -> None:
    chat = chat_format(byte_tokenizer(), "simple_chat")
    model = TalkingModel(name="a run", folder=tmp_path)
    flags = parse(RecordFlags, ["--record", "rows.jsonl"])
    on_cpu = choose_engine_settings(model, chat, flags, on_cuda=False)
    on_gpu = choose_engine_settings(model, chat, flags, on_cuda=True)
    assert (on_cpu.dtype, on_gpu.dtype) == ("float32", "bfloat16")
    assert on_gpu.batching.schedules_ahead
    assert not on_cpu.batching.schedules_ahead

    flags = parse(RecordFlags, ["--record", "rows.jsonl", "--param_dtype", "float32"])
    assert choose_engine_settings(model, chat, flags, on_cuda=True).dtype == "float32"
