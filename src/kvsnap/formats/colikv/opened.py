"""An open `.coli_kv` file: its header, whose it is, and its records. `ColiFile` adds the writing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvsnap.errors import CompatibilityError, ConflictError, ContextError, InputError, KvsnapError, MissingError
from kvsnap.files import Appender, write_whole
from kvsnap.formats.colikv.geometry import Geometry
from kvsnap.formats.colikv.header import HEADER_SIZE, Header, new_header, parse_header
from kvsnap.formats.colikv.originals import MODES, original_outcome
from kvsnap.formats.colikv.reading import requantised, snapshot_of, with_index_layers
from kvsnap.formats.colikv.records import Rows, columns_of, read_columns, read_tokens
from kvsnap.formats.colikv.rows import Encoding
from kvsnap.layout import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColiRows", "OpenColiFile"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ColiRows:
    """Records as arrays: `tokens` `[n]` int32; per layer `latent` `[n, kv_lora]` and `rope` `[n, qk_rope]`, float32.

    `index` has one `[n, index width]` array per layer that owns index rows, in the order of the layers.
    """

    tokens: npt.NDArray[np.int32]
    latent: tuple[Rows, ...]
    rope: tuple[Rows, ...]
    index: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    geometry: Geometry | None
    mode: str
    encoding: Encoding | None
    context: int | None
    draft_reserve: int
    index_layers: tuple[int, ...] | None
    dialect: str | None

    def limit(self) -> int | None:
        """Records that are too many for the context, as colibri counts."""
        return None if self.context is None else self.context - 8 - self.draft_reserve


class OpenColiFile:
    """One `.coli_kv` file, open and locked. A context manager. Not for several threads at once.

    `n_records` are the records that count: whole, counted by the header and, in an original's mode, loaded by it.
    `outcome` is in such a mode what that engine makes of the file, else `ok`.
    """

    def __init__(self, file: Appender, options: _Options) -> None:
        self._file = file
        self._options = options
        self._header: Header | None = None
        self._trusted = False
        self.outcome = "ok"
        self.n_records = 0
        self._adopt()

    # -- opening ---------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: StrPath,
        geometry: Geometry | None = None,
        *,
        create: bool = False,
        mode: str = "safe",
        encoding: Encoding | None = None,
        context: int | None = None,
        draft_reserve: int = 0,
        index_layers: Sequence[int] | None = None,
        dialect: str | None = None,
    ) -> Self:
        """Open the file of a conversation for reading and writing, and lock it.

        `geometry` is what the model is: the file must agree, and without it nothing can be appended. With `create` a
        missing or empty file is made, with a valid header and no records. `encoding` is how rows are to be stored: the
        default of a new file is float32, of an existing one its own; a float32 file opened with another encoding is
        rewritten in it, whole, by the next append. `context` and `draft_reserve` (tokens) set the limit that `load`
        refuses. `mode`: in `safe` a file that is not of this model, or cannot be read, is an error; in
        `original-v1` (the first published reader: version 1 only) and `original-latest` (versions 2 and 3 too, when
        opened with their `encoding`) nothing of it is loaded, `outcome` says why, and an append is refused or starts
        over, as the table in docs/formats/colikv.md section 5 says. Both need `geometry`.

        Raise `MissingError`, `BusyError`, `CompatibilityError` naming each number that differs, `FormatError`,
        `DamagedError` (cut off inside the header), `UnsupportedError` (DeepSeek V4), `InputError` (a symbolic link).
        """
        if mode not in MODES:
            raise InputError("no such mode", expected=", ".join(MODES), found=mode)
        if dialect not in {None, "fp8", "watermark"}:
            raise InputError("no such dialect", expected="fp8 or watermark", found=dialect)
        if mode != "safe" and geometry is None:
            raise InputError("an original engine always knows its model: give geometry")
        owners = None if index_layers is None else tuple(index_layers)
        if owners is not None and geometry is not None:
            geometry = replace(geometry, index_layers=owners)
        options = _Options(geometry, mode, encoding, context, draft_reserve, owners, dialect)
        text = os.fspath(path)
        try:
            file = Appender.open(text)
            if create and file.size() == 0:
                file.close()
                cls._create(text, options, new=False)
                file = Appender.open(text)
        except MissingError:
            if not create:
                raise
            cls._create(text, options, new=True)
            file = Appender.open(text)
        with contextlib.ExitStack() as undo:
            undo.callback(file.close)
            made = cls(file, options)
            undo.pop_all()
        return made

    @staticmethod
    def _create(path: str, options: _Options, *, new: bool) -> None:
        if options.geometry is None:
            raise InputError("a new file needs the geometry of the model", path=path)
        header = new_header(options.geometry, options.encoding or Encoding("float32"))
        # Whole and then renamed: a header that is cut off can't come to be.
        write_whole(path, header.pack(), new=new)

    def _adopt(self) -> None:
        """Read the header of the file as it is now."""
        o, file = self._options, self._file
        size = file.size()
        self._seen = (file.read_at(0, min(size, HEADER_SIZE)), size)
        self._header, self._trusted = None, False
        if o.mode == "safe":
            header = with_index_layers(self._parse(), o.index_layers, file.path)
            if o.geometry is not None:
                header.require(o.geometry, file.path)
                header = replace(header, geometry=o.geometry)
            self._header, self.n_records = header, header.n_usable
            return
        assert o.geometry is not None  # noqa: S101 # `open` checked it
        with contextlib.suppress(KvsnapError):
            self._header = self._parse()
        self.outcome = original_outcome(o.mode, self._seen[0], size, o.geometry, o.encoding, o.limit())
        self.n_records = 0
        if self.outcome == "ok" and self._header is not None:
            self._header = replace(self._header, geometry=o.geometry)
            self.n_records = self._header.n_usable

    def _parse(self) -> Header:
        return parse_header(*self._seen, path=self._file.path, dialect=self._options.dialect)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def header(self) -> Header:
        """The header as it is in the file. Raise `CompatibilityError` where an original's mode could not read it."""
        if self._header is None:
            raise CompatibilityError(f"the header cannot be read: {self.outcome}", path=self.path)
        return self._header

    @property
    def geometry(self) -> Geometry:
        """The geometry of the model where one was given, else that of the file."""
        return self._options.geometry or self.header.geometry

    @property
    def draft_empty(self) -> bool:
        """True when the model has a draft (MTP) layer and rows are loaded: that layer must be marked empty."""
        return self.geometry.has_draft and self.n_records > 0

    # -- reading ---------------------------------------------------------------------------------------------

    def load(self) -> Snapshot:
        """Read all records that count, into memory. `Snapshot.source["notes"]` warns of what is odd.

        Raise `ContextError` when there are as many records as context - 8 - draft_reserve, or more.
        """
        limit = self._options.limit()
        if limit is not None and self.n_records >= limit:
            o = self._options
            raise ContextError(
                f"{self.n_records} records are too many: a context of {o.context} with a draft reserve of "
                f"{o.draft_reserve} takes fewer than {limit}", path=self.path, expected=f"below {limit}",
                found=self.n_records,
            )  # fmt: skip
        if self._header is None or self.outcome != "ok":
            return Snapshot(source={"format": "colikv", "outcome": self.outcome, "notes": [f"ignored: {self.outcome}"]})
        has_draft = self.geometry.has_draft
        loaded = snapshot_of(self._file, self._header, n_records=self.n_records, eager=True, has_draft=has_draft)
        wanted = self._options.encoding
        if self._options.mode != "safe" and wanted is not None and wanted != self._header.encoding:
            return requantised(loaded, wanted)  # what the engine holds; the file is left alone until the next append
        return loaded

    def rows(self) -> ColiRows:
        """Read all records that count as plain arrays, without the checks of `load`."""
        if self._header is None:
            return ColiRows(np.zeros(0, np.int32), (), (), ())
        n, columns = self.n_records, columns_of(self._header)
        arrays = [np.empty((n, column.width), np.float32) for column in columns]
        read_columns(self._file, self._header, n, list(zip(columns, arrays, strict=True)))
        by_role: dict[str, list[Rows]] = {"latent": [], "rope": [], "index": []}
        for column, array in zip(columns, arrays, strict=True):
            by_role[column.role].append(array)
        tokens = read_tokens(self._file, self._header, n)
        return ColiRows(tokens, tuple(by_role["latent"]), tuple(by_role["rope"]), tuple(by_role["index"]))

    # -- state -----------------------------------------------------------------------------------------------

    def _check_unchanged(self) -> None:
        """The published engine takes no lock, so the file may have been written to since it was opened."""
        size = self._file.size()
        now = (self._file.read_at(0, min(size, HEADER_SIZE)), size)
        if now != self._seen or not self._file.is_named:
            raise ConflictError("another program changed the file since it was opened; reopen it", path=self.path)

    def _undo(self, size: int) -> None:
        """Give back the room of records that were not written whole; nothing counts them."""
        with contextlib.suppress(KvsnapError):  # the error that brought us here matters more
            self._file.truncate(min(size, self._file.size()))
        self._note_state()

    def _note_state(self) -> None:
        with contextlib.suppress(KvsnapError):  # a poisoned file is not written to again
            size = self._file.size()
            self._seen = (self._file.read_at(0, min(size, HEADER_SIZE)), size)
            if self._header is not None:
                self._header = replace(self._header, size=size)

    def close(self) -> None:
        """Close the file and give up its lock. Closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
