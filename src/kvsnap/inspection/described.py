"""What a summary of a file is made of. Plain data; `summary` fills it from a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvsnap.identity import Identity
from kvsnap.layout import SamplerState, Shard
from kvsnap.results import Result, Table, plain, table_of

__all__ = ["Fork", "InLibrary", "LayerGroup", "LayerSummary", "PartSize", "Stored", "Summary", "TurnCounts"]


@dataclass(frozen=True, slots=True)
class Stored:
    """What one codec stores: parts, bytes stored and decoded, and the largest bound on the error of a value."""

    parts: int
    stored: int
    decoded: int
    bound: float


@dataclass(frozen=True, slots=True)
class PartSize:
    """What one codec stores of one role of one layer: parts, bytes stored and decoded, bound on the error of a value.

    `layer` is -1 for what belongs to no layer (logits, a draft). `tensors` are those that these parts are of.
    """

    layer: int
    role: str
    codec: str
    tensors: int
    parts: int
    stored: int
    decoded: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """One layer: kind, heads, widths of a row, dtype, and its sizes in bytes.

    `kind` is that of the layer (`attention`, `latent`, ...). `head_dim` is the width of a key (of the latent row in a
    latent layer), `value_dim` that of a value, `rope_dim` that of a rope row. `window` is how many rows a window keeps,
    0 for none; `tokens_per_row` the positions that one row stands for. `shares` is the layer whose cache this one uses.
    `quantisation` is the text that says how rows are kept as codes, empty where they are not. `bytes_per_token` counts
    what grows with each token, `state_bytes` what does not (recurrent states, an encoder's rows), both decoded.
    `stored` and `decoded` are the bytes of its parts. Rows that were cut away inside a part, and those of a window
    before a gap, are stored and count for nothing decoded.
    """

    index: int
    kind: str
    num_heads: int
    num_query_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: float
    value_dim: int = 0
    rope_dim: int = 0
    window: int = 0
    tokens_per_row: int = 1
    roles: tuple[str, ...] = ()
    shares: int | None = None
    quantisation: str = ""
    state_bytes: int = 0
    stored: int = 0
    decoded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are alike: everything a `LayerSummary` tells but their numbers and sizes, and the sizes in all.

    `layers` are their numbers. `text` is the same in words: `24 sliding layers (window 128): 8 heads of 64, bfloat16`.
    """

    kind: str
    layers: tuple[int, ...]
    text: str
    num_heads: int
    num_query_heads: int
    head_dim: int
    value_dim: int
    rope_dim: int
    dtype: str
    window: int
    tokens_per_row: int
    roles: tuple[str, ...]
    shares: bool
    quantisation: str
    bytes_per_token: float
    state_bytes: int
    stored: int
    decoded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """The turns of a history. A turn is live while tokens of it are part of the history.

    `n_live = n_complete + n_cut_off`. Parts of a turn that were published on the way, and that the rest of it follows,
    are no turns: `n_on_the_way` counts them. `n_inherited` of the live ones stand in the files that a fork starts in.
    `n_dropped` were appended to this file and cut off since, parts among them. `n_commits` counts all commits of this
    file, those that truncate or reset too; `last_operation` is what the last one did, `last_stop` why its answer ended
    (empty: not known).
    """

    n_commits: int
    n_live: int
    n_complete: int
    n_cut_off: int
    n_on_the_way: int
    n_inherited: int
    n_dropped: int
    last_operation: str
    last_stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where the history of a fork starts: the file id of its parent, the commit of it, and what is kept of it.

    `path` is where the parent is looked for, `found` whether it is there and is the one that is meant; `reason` says
    why not. `depth` counts the files that the history goes through, without this one, and `above_bytes` their bytes, 0
    where one is gone. `own_tokens` stand in this file.
    """

    parent: str
    path: str
    found: bool
    reason: str
    commit: int
    n_tokens: int
    n_rows: int
    own_tokens: int
    depth: int
    above_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InLibrary:
    """What a library says of one of its files: names of it, of its parent, and of the forks that start in it.

    `n_forks` counts those without a name too.
    """

    path: str
    names: tuple[str, ...]
    parent_names: tuple[str, ...]
    fork_names: tuple[str, ...]
    n_forks: int
    pinned: bool
    last_use_ns: int


def _date(time_ns: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns / 1e9)) if time_ns else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Result):
    """What `inspect` tells of a file. No tensor byte is read.

    `n_prompt + n_generated = n_tokens`; `n_pending` of them are not evaluated. `n_messages` counts the messages of the
    chat, None where they are not known. `tensor_bytes` is the decoded size of the live tensors, `file_bytes` the length
    of the file. `stored` is by codec name, `parts` by layer, role and codec; `exact` means every live part holds the
    bits that the engine held. `dropped` counts bytes behind the last published commit. `encryption` is the cipher of an
    encrypted file, `key_label` what it says of its key; both are empty for others. `shard` tells which part it is of a
    whole. `groups` are the layers by kind. `begins` and `ends` are the first and last words of the conversation, or of
    the text, with control characters escaped; empty where no text is stored. Times are nanoseconds since 1970-01-01
    UTC: `created_ns` and `committed_ns` as the file says (0: it does not), `modified_ns` as the system does.

    `damage` is what is wrong and shows without reading a tensor, one sentence each; `error` is the error that reading
    the rest ended with, as data, and None where all could be read: then counts are those of the last commit, and what
    is not known is 0 or empty.
    """

    path: str | None
    format: str
    version: str
    use: str
    file_id: str
    created_ns: int
    commit: int
    complete: bool
    sealed: bool
    architecture: str
    num_layers: int
    num_heads: int
    num_query_heads: int
    head_dim: int
    dtype: str
    n_tokens: int
    n_prompt: int
    n_generated: int
    n_pending: int
    n_rows: int
    token_offset: int
    n_spans: int
    has_logits: bool
    has_text: bool
    n_messages: int | None
    sampler: SamplerState | None
    file_bytes: int
    tensor_bytes: int
    stored: Mapping[str, Stored]
    exact: bool
    bound: float
    layers: tuple[LayerSummary, ...]
    identity: Identity
    metadata: Mapping[str, str] = field(default_factory=dict)
    dialect: str = ""
    encryption: str = ""
    key_label: str = ""
    shard: Shard | None = None
    dropped: int = 0
    notes: tuple[str, ...] = ()
    draft_bytes: int = 0
    groups: tuple[LayerGroup, ...] = ()
    parts: tuple[PartSize, ...] = ()
    turns: TurnCounts | None = None
    fork: Fork | None = None
    library: InLibrary | None = None
    committed_ns: int = 0
    modified_ns: int = 0
    begins: str = ""
    ends: str = ""
    damage: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None

    @property
    def identity_known(self) -> tuple[str, ...]:
        """Names of the fields of the identity that the file knows."""
        return tuple(name for name in _IDENTITY if self._knows(name))

    @property
    def identity_unknown(self) -> tuple[str, ...]:
        """Names of the fields of the identity that it does not know: a restore cannot compare them."""
        return tuple(name for name in _IDENTITY if not self._knows(name))

    def _knows(self, name: str) -> bool:
        value = getattr(self.identity, name)
        return value is not None if name == "adapters" else bool(value)

    @property
    def stored_bytes(self) -> int:
        """Bytes that the live parts take as they are stored; the rest of the file is tables, text and what is gone."""
        return sum(part.stored for part in self.stored.values())

    def tables(self) -> tuple[Table, ...]:
        """Return the layers; the sizes by layer, role and codec; the sizes by role; and all else as facts."""
        names = [f.name for f in fields(LayerSummary)]
        layers = Table("layers", tuple(names), tuple(tuple(_cell(getattr(x, n)) for n in names) for x in self.layers))
        sizes = table_of("stored parts", self.parts, [f.name for f in fields(PartSize)])
        facts = self.to_dict()
        simple = [(k, v) for k, v in facts.items() if v is None or isinstance(v, str | int | float)]
        return layers, sizes, self.by_role(), Table("facts", ("name", "value"), tuple(simple))

    def shown_tables(self) -> tuple[Table, ...]:
        """Return the facts first, then sizes by role, layers, and what is stored of each."""
        layers, sizes, roles, facts = self.tables()
        rows = tuple(
            (str(k).removesuffix("_ns"), _date(v)) if str(k).endswith("_ns") else (k, v) for k, v in facts.rows
        )
        return Table(facts.title, facts.columns, rows), roles, layers, sizes

    def by_role(self) -> Table:
        """Return the sizes by role and codec as a table, the largest first."""
        found: dict[tuple[str, str], list[int]] = {}
        for part in self.parts:
            sums = found.setdefault((part.role, part.codec), [0, 0, 0])
            for place, value in enumerate((part.tensors, part.stored, part.decoded)):
                sums[place] += value
        rows = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
        columns = ("role", "codec", "tensors", "stored", "decoded")
        return Table("by role", columns, tuple((*key, *sums) for key, sums in rows))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; the identity is given by counts and digests, without its list of weights.

        `error` is left out where there is none.
        """
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        identity = self.identity.to_dict()
        identity["weights"] = len(self.identity.weights)
        data.update(
            identity=identity,
            identity_known=self.identity_known,
            identity_unknown=self.identity_unknown,
            sampler=None if self.sampler is None else asdict(self.sampler),
            shard=None if self.shard is None else {"index": self.shard.index, "count": self.shard.count},
        )
        return {name: plain(value) for name, value in data.items() if name != "error" or value is not None}


_IDENTITY = (
    "architecture", "config", "weights", "cache_dtype", "quantisation", "cache_quantisation", "tokenizer", "adapters",
    "chat_template", "engine", "runtime",
)  # fmt: skip


def _cell(value: Any) -> Any:
    return " ".join(value) if isinstance(value, tuple) else value
