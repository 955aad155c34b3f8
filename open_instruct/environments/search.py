"""A tool that searches texts on this machine by their words (BM25)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file
from open_instruct.data.files.opening import open_rows
from open_instruct.environments.environment import ToolServer, text_tool
from open_instruct.environments.foreign_calls import call_foreign

FLAG = "--search_corpus"


class Search(ToolServer):
    """A tool over a corpus, whose index is built once, when the run begins.

    Args:
        corpus: a file of rows with `text` and perhaps `title` and `id`, or a folder of text files.
        num_results: passages of an answer, at most.
        max_length: characters of an answer, shared by its passages.
    """

    def __init__(
        self, corpus: str | None = None, num_results: int = 5, max_length: int = 4000
    ) -> None:
        self._corpus = corpus
        self._num_results = num_results
        self._max_length = max_length
        self.schemas = [
            text_tool("search", "Searches texts, and gives the best passages", "query", "The words")
        ]

    def begin_run(self) -> None:
        """Read the corpus and build its index.

        Raises:
            InputError: there is no such corpus, it cannot be read, or it has no words.
        """
        corpus = self._corpus
        if corpus is None:
            raise InputError(
                "the tool search has nothing to search: name a file of rows, or a folder, by "
                f"{FLAG}",
                kind="missing_flag",
            )
        import bm25s  # only now: numba, where it is installed, is slow to import

        read = _read_folder if Path(corpus).is_dir() else _read_rows
        self._passages = list(read(corpus))
        words = bm25s.tokenize(self._passages, show_progress=False)
        if not words.vocab:
            raise InputError(
                f"{FLAG} {corpus}: has no words: give files of text, or rows with `text`",
                kind="bad_value",
            )
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    async def call(self, name: str, /, **arguments: Any) -> str:
        return str(await call_foreign(self._search, **arguments))

    def _search(self, query: str) -> str:
        import bm25s

        words = bm25s.tokenize([query], show_progress=False)
        k = min(self._num_results, len(self._passages))
        (numbers,), (scores,) = self._index.retrieve(words, k=k, show_progress=False)
        passages = [
            self._passages[number]
            for number, score in zip(numbers, scores, strict=True)
            if score > 0
        ]
        if not passages:
            return "Nothing was found."
        length = self._max_length // len(passages)
        return "\n\n".join(_cut_text(passage, length) for passage in passages)


def _cut_text(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length]}…"


def _read_rows(corpus: str) -> Iterator[str]:
    source = open_rows(corpus, flag=FLAG)
    for row in source.rows(range(len(source))):
        if row.problem is not None:
            raise InputError(f"{FLAG} {row}: {row.problem}", kind="bad_row")
        text = row.value.get("text")
        if not isinstance(text, str):
            raise InputError(
                f"{FLAG} {row}: has no `text`: rename the column that has it", kind="bad_row"
            )
        headings = [row.value.get(key) for key in ("id", "title")]
        heading = " ".join(str(each) for each in headings if each is not None)
        yield f"{heading}\n{text}".strip()


def _read_folder(corpus: str) -> Iterator[str]:
    folder = Path(corpus)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            text = read_user_file(str(file), where=f"{FLAG} {file}")
            yield f"{file.relative_to(folder)}\n{text}"
