"""Data sets by name, and folders that the datasets library wrote, read by that library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from open_instruct.data.files.names import near_files
from open_instruct.data.files.rows import BadRow, RawRow
from open_instruct.errors import InputError

_ROWS_AT_ONCE = 1024


class NamedRows:
    """One split of what the datasets library finds under a name, or under a folder (`save_to_disk` or plain files).

    A name may say which configuration: `openai/gsm8k:main`.
    """

    def __init__(self, name: str, split: str, *, flag: str) -> None:
        import datasets

        self.name = f"{name}[{split}]"
        path = Path(name).expanduser()
        try:
            if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
                dataset = datasets.load_from_disk(str(path))
                if isinstance(dataset, datasets.DatasetDict):
                    if split not in dataset:
                        raise InputError(
                            f"{flag}_splits: {name} has no split {split!r}; it has {', '.join(sorted(dataset))}."
                        )
                    dataset = dataset[split]
            else:
                repository, _, configuration = (str(path), "", "") if path.is_dir() else name.partition(":")
                dataset = datasets.load_dataset(repository, configuration or None, split=split)
        except InputError:
            raise
        except Exception as error:  # the library raises many kinds of errors: its own and those of downloads
            where = "the folder" if path.is_dir() else "there is no such file, and as a data set's name"
            near = near_files(path) if path.parent.is_dir() and not path.is_dir() else ""
            raise InputError(
                f"{flag}: {name}: {where} cannot be loaded (split {split!r}): {type(error).__name__}: {error}{near}"
            ) from error
        self._dataset = dataset.with_format(None)
        self.fingerprint = str(dataset._fingerprint)

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        for first in range(0, len(indices), _ROWS_AT_ONCE):
            wanted = [int(index) for index in indices[first : first + _ROWS_AT_ONCE]]
            for index, value in zip(wanted, self._dataset.select(wanted), strict=True):
                yield RawRow(file=self.name, line=index + 1, value=value)
