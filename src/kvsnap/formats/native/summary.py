"""What a `.kvsnap` file holds, from its index and tables alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvsnap import codecs
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.said import Said
from kvsnap.formats.native.tables import Part
from kvsnap.formats.native.told import piece_of
from kvsnap.identity import Identity
from kvsnap.layout import Run, SamplerState, Shard, cut_runs, join_runs
from kvsnap.records import Kind

__all__ = ["LayerSummary", "Stored", "Summary", "summary_of"]


@dataclass(frozen=True, slots=True)
class Stored:
    """What one codec stores: parts, bytes stored and decoded, and the largest bound on the error of a value."""

    parts: int
    stored: int
    decoded: int
    bound: float


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One layer: kind, heads, head width, dtype, decoded bytes per token."""

    index: int
    kind: str
    num_heads: int
    num_query_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `inspect` tells of a file. No tensor byte is read.

    `n_prompt + n_generated = n_tokens`; `n_pending` of them are not evaluated. `n_messages` counts the messages of the
    chat, None where they are not known. `tensor_bytes` is the decoded size of the live tensors, `file_bytes` the length
    of the file. `stored` is by codec name; `exact` means every live part holds the bits that the engine held. `dropped`
    counts bytes behind the last published commit. `encryption` is the cipher of an encrypted file, `key_label` what it
    says of its key; both are empty for others. `shard` tells which part it is of a whole.
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

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; the identity is given by counts and digests, without its list of weights."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        identity = self.identity.to_dict()
        identity["weights"] = len(self.identity.weights)
        data.update(
            identity=identity,
            sampler=None if self.sampler is None else asdict(self.sampler),
            stored={name: asdict(value) for name, value in self.stored.items()},
            layers=[asdict(layer) for layer in self.layers],
            metadata=dict(self.metadata),
            notes=list(self.notes),
            shard=None if self.shard is None else {"index": self.shard.index, "count": self.shard.count},
        )
        return data


def _stored(parts: list[Part]) -> dict[str, Stored]:
    table: dict[str, Stored] = {}
    for part in parts:
        name = codecs.codec_of_id(part.codec).name
        old = table.get(name, Stored(0, 0, 0, 0.0))
        table[name] = Stored(
            old.parts + 1, old.stored + part.stored, old.decoded + part.decoded, max(old.bound, part.bound)
        )
    return table


def _layers(file: NativeFile) -> tuple[LayerSummary, ...]:
    specs = {spec.id: spec for spec in file.geometry.tensors}
    out = []
    for index, layer in enumerate(file.geometry.layers):
        tensors = [specs[number] for number in layer.tensors]
        roles = ("k", "latent", "residual") if layer.quantisation else ("k", "latent")
        keys = next((s for s in tensors if s.role in roles), None)
        heads = 0 if keys is None else keys.shape[keys.axes.index("head")] if "head" in keys.axes else 1
        out.append(
            LayerSummary(
                index=index,
                kind=layer.kind,
                num_heads=heads,
                num_query_heads=layer.num_query_heads,
                head_dim=0 if keys is None else keys.shape[-1],
                dtype="" if keys is None else keys.dtype,
                bytes_per_token=sum(s.nbytes(1) / s.tokens_per_row for s in tensors if s.grows),
            )
        )
    return tuple(out)


def summary_of(file: NativeFile) -> Summary:
    """Summarise an open file; no tensor byte is read."""
    commit, header = file.commit, file.header
    runs: tuple[Run, ...] = ()
    parts: list[Part] = []
    said = Said()
    for span in file.spans():
        runs = join_runs(runs, cut_runs(span.table.runs, span.entry.n_tokens))
        parts += span.table.parts
        said = said.add(piece_of(span))
    replaced, sampler = file.state()
    place, state = file.state_place()
    if state:
        parts += place.table_at(state, Kind.STATE)[0].parts
    generated = sum(r.count for r in runs if r.kind == "generated")
    layers = _layers(file)
    first = next((layer for layer in layers if layer.head_dim), None)
    stored = _stored(parts)
    bound = max((s.bound for s in stored.values()), default=0.0)
    return Summary(
        path=file.path, format="native", version=f"{header.major}.{header.minor}",
        use="snapshot" if header.use == 1 else "session", file_id=header.file_id.hex(), created_ns=header.created_ns,
        commit=commit.number, complete=commit.complete, sealed=file.sealed, architecture=file.geometry.architecture,
        num_layers=len(layers), num_heads=first.num_heads if first else 0,
        num_query_heads=first.num_query_heads if first else 0, head_dim=first.head_dim if first else 0,
        dtype=first.dtype if first else "", n_tokens=commit.n_tokens, n_prompt=commit.n_tokens - generated,
        n_generated=generated, n_pending=commit.n_pending, n_rows=commit.n_rows, token_offset=commit.token_offset,
        n_spans=len(file.live), has_logits=any(t.role == "logits" for t in replaced.values()),
        has_text=bool(file.live) and said.text is not None, n_messages=len(said.messages) if said.known else None,
        draft_bytes=sum(t.nbytes for t in replaced.values() if t.role == "draft"),
        sampler=sampler, file_bytes=file.reader.size, tensor_bytes=sum(p.decoded for p in parts), stored=stored,
        exact=bound == 0, bound=bound, layers=layers, identity=file.identity, metadata=file.metadata,
        encryption="" if file.vault is None else file.vault.info.cipher,
        key_label="" if file.vault is None else file.vault.info.label,
        shard=file.shard(), dropped=file.end.dropped, notes=file.end.notes,
    )  # fmt: skip
