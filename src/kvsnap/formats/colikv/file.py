"""`ColiFile`: the five operations of colibri on a real `.coli_kv` file, in place.

Differences to the published engine, none of which its readers can see: a lock, every number checked before use, every
write checked, records synced before the count that publishes them, no append under another model's header.
docs/formats/colikv.md sections 4 and 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import CompatibilityError, ConflictError, InputError, UnsupportedError
from kvsnap.files import Appender, Writer, write_whole
from kvsnap.formats.colikv.header import COUNT_AT, HEADER_SIZE, MAX_RECORDS, new_header
from kvsnap.formats.colikv.opened import ColiRows, OpenColiFile
from kvsnap.formats.colikv.reading import foreign_rows
from kvsnap.formats.colikv.records import Rows, columns_of, pack_records, read_columns, read_tokens, step_of
from kvsnap.formats.colikv.rows import Encoding
from kvsnap.formats.colikv.writing import check_ids, content_of, float_rows, values_of
from kvsnap.layout import Snapshot

__all__ = ["ColiFile", "ColiRows"]


class ColiFile(OpenColiFile):
    """One `.coli_kv` file, open and locked; `open` makes one. A context manager. Not for several threads at once.

    The five operations of colibri: `open`, `append`, `load`, `truncate`, `reset`. `n_records` are the records that
    count.
    """

    def trust_rows(self) -> None:
        """Take the responsibility for rows that do not seem to fit the header, so that they can be appended to."""
        self._trusted = True

    def append(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        latent: Sequence[Any] | npt.NDArray[Any],
        rope: Sequence[Any] | npt.NDArray[Any] | None = None,
        index: Sequence[Any] | npt.NDArray[Any] | None = None,
    ) -> int:
        """Append one record per token and return the new number of records.

        `latent` and `rope` have one array `[n, width]` per layer, `index` one per layer that owns index rows (float32,
        float16 or bfloat16). Records are written in batches and synced, then the count is written and synced: killed at
        any point, the file holds the old records or all. Raise `InputError` (ids, shapes; no geometry),
        `CompatibilityError` (another model's header, or rows that do not fit it), `ConflictError` (the file was changed
        meanwhile), `StorageError` (the file is then as before), `PoisonedError`.
        """
        geometry = self._options.geometry
        if geometry is None:
            raise InputError("to append, the file must be opened with the geometry of the model", path=self.path)
        ids = check_ids(tokens, geometry.vocab)
        groups = (
            ("latent", latent, geometry.n_layers, geometry.kv_lora),
            ("rope", rope, geometry.n_layers if geometry.qk_rope else 0, geometry.qk_rope),
            ("index", index, geometry.index_rows, geometry.index_width),
        )
        rows: dict[str, list[Rows]] = {}
        for role, given, count, width in groups:
            found = 0 if given is None else len(given)
            if found != count and not (role == "rope" and geometry.qk_rope == 0):
                raise InputError(f"{role}: one array per layer", expected=f"{count} arrays", found=found)
            values = [] if given is None else given
            rows[role] = [float_rows(values[i], len(ids), width, f"{role} {i}") for i in range(count)]
        if not geometry.qk_rope:
            rows["rope"] = [np.zeros((len(ids), 0), np.float32)] * geometry.n_layers
        pairs = [row for pair in zip(rows["latent"], rows["rope"], strict=True) for row in pair]
        return self._append(ids, [*pairs, *rows["index"]])

    def append_snapshot(self, snapshot: Snapshot) -> int:
        """Append the records that a snapshot has behind those of the file; return the new number of records.

        The snapshot, whole or captured from some row on, must go on from the same tokens: raise `ConflictError` naming
        the first that differs (then `truncate` there), `UnsupportedError` naming a layer that has no place here,
        `CompatibilityError` naming each number that differs.
        """
        content = content_of(snapshot, self.geometry.vocab)
        self.header.require(content.geometry, self.path)
        mine = self.geometry.index_owners
        if mine is not None and content.geometry.index_owners != mine:
            raise CompatibilityError(
                "index rows belong to other layers", path=self.path, expected=mine, found=content.geometry.index_owners
            )
        n = self.n_records
        old = read_tokens(self._file, self.header, n)
        same = content.tokens[: min(n, len(content.tokens))] == old[: len(content.tokens)]
        common = int(np.argmin(same)) if not same.all() else len(same)
        if common < n:
            raise ConflictError(
                f"the snapshot has other tokens from position {common} on: truncate({common}) first, then append",
                path=self.path, expected=f"{n} tokens as in the file", found=f"{common} in common",
            )  # fmt: skip
        if snapshot.row_start > n:
            raise InputError("rows between the file and the snapshot are missing", expected=n, found=snapshot.row_start)
        new = len(content.tokens) - n
        return self._append(content.tokens[n:], values_of(content.tensors, columns_of(self.header), new))

    def _append(self, ids: npt.NDArray[np.int32], rows: Sequence[Rows]) -> int:
        self._check_unchanged()
        if self.n_records + len(ids) > MAX_RECORDS:
            raise InputError("more records than any context has", expected=MAX_RECORDS, found=self.n_records + len(ids))
        if not len(ids):
            return self.n_records
        self._prepare()
        header = self.header
        columns, step = columns_of(header), step_of(header)
        with contextlib.ExitStack() as undo:
            undo.callback(self._undo, self._file.size())
            for at in range(0, len(ids), step):
                stop = at + step
                raw = pack_records(columns, [r[at:stop] for r in rows], ids[at:stop])
                self._file.write_at([raw.data], header.offset(self.n_records + at))
            self._file.sync()  # the count must not reach the disk before the records it counts
            undo.pop_all()
        self._note_state()
        self._publish(self.n_records + len(ids))
        return self.n_records

    def truncate(self, n_records: int) -> None:
        """Keep the first `n_records` records: the count is rewritten and synced, the others stay behind it.

        Rows that do not fit the header are cut off as well. Raise `InputError` outside 0..n_records.
        """
        if not 0 <= n_records <= self.n_records:
            raise InputError("cannot truncate", path=self.path, expected=f"0 to {self.n_records}", found=n_records)
        self._check_unchanged()
        header = self.header
        if self.outcome == "other-model-or-version":
            raise CompatibilityError("the file is of another model", path=self.path)
        self._require_known()
        foreign = foreign_rows(self._file, header, read_tokens(self._file, header, header.n_usable))
        self._publish(n_records)
        if foreign is not None:
            self._file.truncate(min(self._file.size(), header.offset(n_records)))
            self._file.sync()
            self._note_state()
        self._trusted = True

    def reset(self) -> None:
        """Forget all records; as `truncate(0)`."""
        self.truncate(0)

    # -- inside ----------------------------------------------------------------------------------------------

    def _require_known(self) -> None:
        if self.header.dialect == "watermark":
            raise UnsupportedError("a COLIKV2 file with a turn count is read only", path=self.path)

    def _prepare(self) -> None:
        """Make the file ready for records behind `n_records`: its header, its encoding, no count beyond its records."""
        o = self._options
        if self.outcome not in {"ok", "nothing-to-load", "exceeds-context"}:
            self._start_over()
            return
        self._require_known()
        wanted = o.encoding or self.header.encoding
        if wanted != self.header.encoding:
            if self.header.encoding.name != "float32":
                raise CompatibilityError(
                    "the file has rows of another encoding", path=self.path, expected=wanted, found=self.header.encoding
                )
            self._rewrite(wanted)
        elif o.geometry is not None:
            new_header(o.geometry, wanted)  # refuses rows that would be stored as zeros
        if not self._trusted:
            foreign = foreign_rows(self._file, self.header, read_tokens(self._file, self.header, self.n_records))
            if foreign is not None:
                raise CompatibilityError(
                    f"the rows do not fit the header, nothing is appended to them: {foreign}. Use truncate() or "
                    "reset(), or trust_rows() if you know better", path=self.path,
                )  # fmt: skip
            self._trusted = True
        if self.header.count != self.n_records:
            self._publish(self.n_records)  # else it would cover the new records before they are whole

    def _start_over(self) -> None:
        """As the latest engine does under a header that is not its own; the first one would write under it."""
        o = self._options
        if o.mode != "original-latest" or o.geometry is None:
            raise CompatibilityError(
                "the file is of another model: the first engine would write its rows under that header; refused",
                path=self.path,
            )
        header = new_header(o.geometry, o.encoding or Encoding("float32"))
        self._replace(lambda writer: writer.write_at([header.pack()], 0))

    def _rewrite(self, encoding: Encoding) -> None:
        """Write the whole file anew in another encoding, and put it in place of the old one."""
        geometry = self._options.geometry or self.header.geometry
        old, n = self.header, self.n_records
        new = replace(new_header(geometry, encoding), count=n)
        columns = columns_of(old)
        step = min(step_of(old), step_of(new))

        def fill(writer: Writer) -> None:
            writer.write_at([new.pack()], 0)
            for at in range(0, n, step):
                count = min(step, n - at)
                shifted = _Shifted(self._file, old.offset(at) - HEADER_SIZE)
                arrays = [np.empty((count, column.width), np.float32) for column in columns]
                read_columns(shifted, old, count, list(zip(columns, arrays, strict=True)))
                ids = read_tokens(shifted, old, count)
                raw = pack_records(columns_of(new), arrays, ids)
                writer.write_at([raw.data], new.offset(at))

        self._replace(fill)

    def _replace(self, fill: Any) -> None:
        path, kept = self.path, self.n_records
        write_whole(path, fill)
        self._file.close()
        self._file = Appender.open(path)
        self._adopt()
        if self.outcome != "ok":
            self.outcome, self.n_records = "ok", min(kept, self.n_records)

    def _publish(self, count: int) -> None:
        """Write and sync the count, the commit point."""
        self._file.write_at([count.to_bytes(4, "little")], COUNT_AT)
        self._file.sync()
        self._header = replace(self.header, count=count, size=self._file.size())
        self.n_records = count
        self.outcome = "ok"
        self._note_state()


class _Shifted:
    """A source whose first record is another one of the file."""

    def __init__(self, file: Appender, by: int) -> None:
        self._file, self._by = file, by

    def read_into(self, offset: int, buffer: Any) -> int:
        return self._file.read_into(offset + self._by, buffer)
