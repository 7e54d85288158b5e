"""A reader and a writer of `.kvsnap` files made from docs/spec/file.md alone: nothing of kvsnap is imported here.

The writer writes what it is told, right or wrong, with checksums that fit: hostile files are made with it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

MAGIC = bytes.fromhex("894B56534E41500A")
FOOTER_MAGIC = bytes.fromhex("4B56454E440D0A1A")
IDENTITY, LAYOUT, SPAN, STATE, NOTE, INDEX, COMMIT, BASE, KEY = range(1, 10)
FORKED = 2  # required feature bit 1
BASE_NAMES = [
    "file_id", "commit", "commit_offset", "digest", "n_entries", "n_tokens", "n_rows", "history_digest", "depth",
    "reserved",
]  # fmt: skip
SIZES = {
    "float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16, "float64": "<f8", "int8": "i1", "uint8": "u1",
    "int16": "<i2", "int32": "<i4", "int64": "<i8", "bool": "?", "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def up(n: int, to: int = 64) -> int:
    return -(-n // to) * to


def h64(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=seed % 2**64)


def h128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def chain(digest: bytes, ids: list[int], n_rows: int) -> bytes:
    """The history digest behind one more entry."""
    return h128(digest + struct.pack(f"<{len(ids)}i", *ids) + struct.pack("<Q", n_rows % 2**64))


# -- encryption (section 20) --------------------------------------------------------------------------------

STRETCH = 1_048_576


class Cipher:
    """The cipher of one file. `seal` and `unseal` take the associated data as the fields of its table."""

    def __init__(self, key: bytes, name: str, salt: bytes, file_id: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = b"kvsnap-file-key-1:" + name.encode("ascii") + b":" + file_id
        made = HKDF(SHA256(), 48, salt, info).derive(key)
        self.box = {"aes-256-gcm": AESGCM, "chacha20-poly1305": ChaCha20Poly1305}[name](made[:32])
        self.check = made[32:]
        self.context = b""

    def data(
        self, kind: int, flags: int, at: int, sequence: int, commit: int, table: int, length: int, n: int
    ) -> bytes:
        return self.context + struct.pack("<BB6xQQQQQQ", kind, flags, at, sequence, commit, table, length, n)

    def seal(self, plain: bytes, data: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self.box.encrypt(nonce, plain, data)

    def unseal(self, piece: bytes, data: bytes) -> bytes:
        return self.box.decrypt(piece[:12], piece[12:], data)


# -- reading ------------------------------------------------------------------------------------------------


WORDS: dict[str, tuple[str, ...]] = {
    "role": (
        "k", "v", "latent", "rope", "index", "conv", "recurrent", "cross_k", "cross_v", "draft_k", "draft_v", "logits",
        "positions", "code", "scale", "residual", "other", "compressed", "buffer", "overlap", "zero", "draft",
    ),
    "growth": ("grow", "window", "replaced", "static"),
    "rope": ("none", "before", "after", "unknown"),
    "pairing": ("", "half", "interleaved"),
}  # fmt: skip


def need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


class SpecReader:
    """Reads a whole, undamaged file at its last commit. `ValueError` for a broken rule.

    A fork needs the `folder` in which its parents lie. `commit` (offset and digest) asks for an earlier commit.
    """

    def __init__(
        self,
        data: bytes,
        folder: Path | None = None,
        commit: tuple[int, bytes] | None = None,
        *,
        key: bytes | None = None,
    ) -> None:
        self.data, self.folder = data, folder
        self.cipher: Cipher | None = None
        need(data[:8] == MAGIC, "magic")
        major, _minor, size = struct.unpack_from("<HHI", data, 8)
        required, _optional, use = struct.unpack_from("<QQB", data, 16)
        need((major, size) == (1, 128) and required in ({0, FORKED} if key is None else {1}), "version")
        self.forked = required == FORKED
        need(not any(data[33:40]) and not any(data[72:120]), "reserved")
        need(struct.unpack_from("<Q", data, 120)[0] == h64(data[:120]), "header checksum")
        self.use, self.file_id = use, data[40:56]
        self.salt, self.created = struct.unpack_from("<Qq", data, 56)
        need(use in {1, 2} and not (self.forked and use == 1), "use")
        if key is not None:
            self._open(key)
        if commit is None:
            need(len(data) % 64 == 0, "length")
            self.footer = self._footer(len(data) - 64)
            commit = (self.footer["commit_offset"], self.footer["digest"])
        self.commit_at = commit[0]
        self.commit = self._commit(*commit)
        need(not hasattr(self, "footer") or self.commit["number"] == self.footer["number"], "number")
        self.base = self._base(self.commit["base"]) if self.forked else None
        self.parent = self._parent() if self.base else None

    def _open(self, key: bytes) -> None:
        need(self.use == 1, "encrypted session")
        record = self.record(128, KEY)
        need((record["flags"], record["sequence"], record["commit"]) == (1, 0, 1), "KEY")
        about = json.loads(record["payload"])
        salt, check = bytes.fromhex(about["salt"]), bytes.fromhex(about["check"])
        need(len(salt) == 32 and len(check) == 16, "lengths in KEY")
        cipher = Cipher(key, about["cipher"], salt, self.file_id)
        need(cipher.check == check, "another key")
        cipher.context = hashlib.sha256(self.data[:128] + self.data[128:192] + record["payload"]).digest()
        self.cipher = cipher

    def _plain(self, at: int, record: tuple[int, int, int, int], table: int, stored: bytes) -> tuple[bytes, int]:
        """The plain payload of a record (kind, flags, sequence, commit), and the plain length of its table."""
        assert self.cipher is not None
        kind, flags, sequence, commit = record
        place = (kind, flags, at, sequence, commit, table)
        plain = [self.cipher.unseal(stored[:table], self.cipher.data(*place, len(stored), 0))]
        where, number = table, 1
        while where < len(stored):
            piece = stored[where + 8 : where + 8 + STRETCH + 28]
            need(len(piece) > 28, "an empty stretch")
            checksum = h64(piece, self.salt + at + 64 + where)
            need(struct.unpack_from("<Q", stored, where)[0] == checksum, f"checksum of piece {number}")
            plain.append(self.cipher.unseal(piece, self.cipher.data(*place, 0, number)))
            where += 8 + len(piece)
            number += 1
        return b"".join(plain), table - 28

    def _footer(self, at: int) -> dict[str, Any]:
        raw = self.data[at : at + 64]
        need(raw[:8] == FOOTER_MAGIC, "footer magic")
        need(struct.unpack_from("<Q", raw, 56)[0] == h64(raw[:56], self.salt + at), "footer checksum")
        offset, number, length = struct.unpack_from("<QQQ", raw, 8)
        need(length == at + 64 and not any(raw[48:56]), "footer length")
        return {"commit_offset": offset, "number": number, "digest": raw[32:48]}

    def record(self, at: int, kind: int | None = None) -> dict[str, Any]:
        raw = self.data[at : at + 64]
        need(at % 64 == 0 and raw[:4] == b"KVR1", f"record at {at}")
        need(struct.unpack_from("<Q", raw, 56)[0] == h64(raw[:56], self.salt + at), f"record checksum at {at}")
        found, flags, reserved, sequence, length, commit, table, checksum, rest = struct.unpack_from(
            "<BBHQQQQQQ", raw, 4
        )
        need(not reserved and not rest and (kind is None or found == kind), f"kind at {at}: {found}")
        payload = self.data[at + 64 : at + 64 + length]
        need(len(payload) == length and h64(payload[:table]) == checksum, f"payload at {at}")
        need(table == length or found in {SPAN, STATE}, "table length")
        end = up(at + 64 + length)
        need(not any(self.data[at + 64 + length : end]), "padding")
        stored = payload
        if self.cipher is not None and found != KEY:
            payload, table = self._plain(at, (found, flags, sequence, commit), table, stored)
        return {
            "at": at, "kind": found, "flags": flags, "sequence": sequence, "commit": commit, "table": table,
            "payload": payload, "stored": stored, "end": end, "check": raw[56:64],
        }  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """Every record from the header to the end, which must fill the file without a gap."""
        at, out = 128, []
        while at < len(self.data):
            out.append(self.record(at))
            at = out[-1]["end"]
            if out[-1]["kind"] == COMMIT:
                need(self._footer(at)["commit_offset"] == out[-1]["at"], "footer place")
                at += 64
        need([r["sequence"] for r in out] == list(range(len(out))), "sequence")
        return out

    def _commit(self, at: int, digest: bytes) -> dict[str, Any]:
        record = self.record(at, COMMIT)
        p = record["payload"]
        need(h128(self.data[at : at + 64] + record["stored"]) == digest, "commit digest")
        names = [
            "number", "previous", "previous_digest", "operation", "flags", "n_tail", "n_tokens", "n_rows", "n_pending",
            "token_offset", "identity", "layout", "state", "note", "index", "index_kept", "base", "time", "digest",
        ]  # fmt: skip
        commit = dict(zip(names, struct.unpack_from("<QQ16sHHIQQQqQQQQQQQq16s", p), strict=True))
        need(not any(p[152:192]) and len(p) == 192 + 64 * commit["n_tail"], "commit")
        need(bool(commit["base"]) == self.forked, "base of the commit")
        need(commit["number"] > 1 or (commit["operation"] == 4) == self.forked, "operation of the first commit")
        commit["tail"] = self._entries(p[192:])
        return commit

    @staticmethod
    def _entries(raw: bytes) -> list[dict[str, Any]]:
        names = ["span", "n_tokens", "row_start", "n_rows", "state", "check", "digest"]
        return [dict(zip(names, row, strict=True)) for row in struct.iter_unpack("<QQQQQ8s16s", raw)]

    def history(self) -> list[dict[str, Any]]:
        """All commits, newest first."""
        out = [self.commit]
        while out[-1]["previous"]:
            out.append(self._commit(out[-1]["previous"], out[-1]["previous_digest"]))
        if self.forked:
            same = {tuple(self._base(c["base"])[n] for n in BASE_NAMES[:4] + BASE_NAMES[8:9]) for c in out}
            need(len(same) == 1, "all BASE records name one origin")
        return out

    def _base(self, at: int) -> dict[str, Any]:
        p = self.record(at, BASE)["payload"]
        need(len(p) == 128, "length of base")
        base = dict(zip(BASE_NAMES, struct.unpack("<16sQQ16sQQQ16sI36s", p), strict=True))
        need(not any(base["reserved"]) and 1 <= base["depth"] <= 64, "base")
        return base

    def _parent(self) -> SpecReader:
        """The parent at the commit that the fork starts from, with every check of section 19."""
        assert self.base is not None
        assert self.folder is not None
        path = self.folder / f"{self.base['file_id'].hex()}.kvsnap"
        need(not path.is_symlink() and path.is_file(), f"parent {path.name}")
        head = path.read_bytes()
        need(head[40:56] == self.base["file_id"] != self.file_id, f"file id of {path.name}")
        (required,) = struct.unpack_from("<Q", head, 16)
        need((self.base["depth"] == 1) == (required == 0), f"depth of {path.name}")
        if required:  # before its own parent is opened: no cycle is followed
            probe = object.__new__(SpecReader)
            probe.cipher, probe.data, probe.forked, (probe.salt,) = None, head, True, struct.unpack_from("<Q", head, 56)
            found = probe._commit(self.base["commit_offset"], self.base["digest"])
            need(probe._base(found["base"])["depth"] == self.base["depth"] - 1, f"depth of {path.name}")
        parent = SpecReader(head, self.folder, (self.base["commit_offset"], self.base["digest"]))
        need(parent.commit["number"] == self.base["commit"], f"commit of {path.name}")
        return parent

    def kept(self) -> list[tuple[SpecReader, dict[str, Any]]]:
        """What BASE keeps of the live list of the parent, the last entry cut to what is kept of it."""
        if self.base is None or self.parent is None:
            return []
        live = self.parent.live()
        need(self.base["n_entries"] <= len(live), "entries kept")
        live = live[: self.base["n_entries"]]
        n_tokens, n_rows = self.base["n_tokens"], self.base["n_rows"]
        digest = bytes(16)
        if live:
            before = live[:-1]
            reader, last = live[-1]
            n_tokens -= sum(e["n_tokens"] for _, e in before)
            n_rows -= sum(e["n_rows"] for _, e in before)
            need(0 <= n_tokens <= last["n_tokens"] and 0 <= n_rows <= last["n_rows"], "tokens and rows kept")
            if (n_tokens, n_rows) != (last["n_tokens"], last["n_rows"]):
                ids = reader.table(last["span"], SPAN)["ids"][:n_tokens]
                digest = chain(before[-1][1]["digest"] if before else digest, ids, n_rows)
                last = last | {"n_tokens": n_tokens, "n_rows": n_rows, "state": 0, "digest": digest}
            digest = last["digest"]
            live = [*before, (reader, last)]
        else:
            need(n_tokens == n_rows == 0, "tokens and rows kept")
        need(digest == self.base["history_digest"], "history digest of what is kept")
        return live

    def live(self) -> list[tuple[SpecReader, dict[str, Any]]]:
        """The whole live list, each entry with the file that it is of."""
        return self.kept() + [(self, entry) for entry in self.entries()]

    def entries(self) -> list[dict[str, Any]]:
        """The live entries of this file."""
        live: list[dict[str, Any]] = []
        if self.commit["index"]:
            p = self.record(self.commit["index"], INDEX)["payload"]
            (count,) = struct.unpack_from("<Q", p)
            need(len(p) == 64 + 64 * count and not any(p[8:64]), "index")
            live = self._entries(p[64:])[: self.commit["index_kept"]]
            need(len(live) == self.commit["index_kept"], "index kept")
        return live + self.commit["tail"]

    def json(self, name: str, kind: int) -> Any:
        at = self.commit[name]
        if not at and self.parent is not None:
            return self.parent.json(name, kind)
        return json.loads(self.record(at, kind)["payload"]) if at else None

    def state(self) -> tuple[SpecReader, int] | None:
        """The STATE at the end of the history and the file in which it stands."""
        if self.commit["state"]:
            return self, self.commit["state"]
        if self.base is not None and not self.entries() and (live := self.kept()) and live[-1][1]["state"]:
            return live[-1][0], live[-1][1]["state"]
        return None

    def table(self, at: int, kind: int) -> dict[str, Any]:
        record = self.record(at, kind)
        p, end = record["payload"], record["table"]
        names = ["row_start", "n_rows", "token_start", "n_tokens", "n_runs", "n_positions", "n_parts", "n_meta"]
        t: dict[str, Any] = dict(zip(names, struct.unpack_from("<QQQQIIII", p), strict=True))
        need(not any(p[48:64]), "table reserved")
        place = 64
        t["ids"] = list(struct.unpack_from(f"<{t['n_tokens']}i", p, place))
        place = up(place + 4 * t["n_tokens"], 8)
        t["runs"] = list(struct.iter_unpack("<QQ", p[place : place + 16 * t["n_runs"]]))
        place += 16 * t["n_runs"]
        t["positions"] = list(struct.iter_unpack("<qQ", p[place : place + 16 * t["n_positions"]]))
        place += 16 * t["n_positions"]
        t["meta"] = json.loads(p[place : place + t["n_meta"]]) if t["n_meta"] else {}
        need(not any(p[place + t["n_meta"] : up(place + t["n_meta"])]), "table padding")
        place = up(place + t["n_meta"])
        need(end == place + 64 * t["n_parts"], "table length")
        need(sum(c for _, c in t["runs"]) == t["n_tokens"] and sum(c for _, c in t["positions"]) == t["n_rows"], "runs")
        names = ["tensor", "codec", "flags", "row_start", "n_rows", "offset", "stored", "checksum", "decoded", "bound"]
        parts = [dict(zip(names, row, strict=True)) for row in struct.iter_unpack("<IHHQQQQQQd", p[place:end])]
        expected = end
        for part in parts:
            need(part["offset"] == expected, "part place")
            part["bytes"] = p[part["offset"] : part["offset"] + part["stored"]]
            need(len(part["bytes"]) == part["stored"] and h64(part["bytes"]) == part["checksum"], "part checksum")
            stop = part["offset"] + part["stored"]
            expected = up(stop)
            need(not any(p[stop:expected]), "part padding")
        need(len(p) == (parts[-1]["offset"] + parts[-1]["stored"] if parts else end), "payload length")
        t["parts"], t["check"] = parts, record["check"]
        return t

    def values(self, spec: dict[str, Any], part: dict[str, Any]) -> np.ndarray[Any, Any]:
        shape = [part["n_rows"] if i == spec["row_axis"] else n for i, n in enumerate(spec["shape"])]
        dtype = np.dtype(SIZES[spec["dtype"]])
        need(part["decoded"] == dtype.itemsize * int(np.prod(shape, dtype=np.int64)), "decoded length")
        if part["codec"] == 1:
            return np.frombuffer(part["bytes"], dtype).reshape(shape)
        need(part["codec"] == 3, "codec")
        return self._q8(spec, part["bytes"], shape).astype(dtype)

    @staticmethod
    def _q8(spec: dict[str, Any], raw: bytes, shape: list[int]) -> np.ndarray[Any, Any]:
        axis = spec["axes"].index("head") if "head" in spec["axes"] else None
        groups = 1 if axis is None else shape[axis]
        rest = [n for i, n in enumerate(shape) if i != axis]
        n = int(np.prod(rest))
        need(struct.unpack_from("<II", raw) == (groups, 0), "q8 groups")
        at, out = 8 + 8 * groups, []
        for g in range(groups):
            scale, mode = struct.unpack_from("<fI", raw, 8 + 8 * g)
            if mode == 0:
                out.append(np.frombuffer(raw, "i1", n, at).astype(np.float32) * np.float32(scale))
                at += up(n, 4)
            else:
                out.append(np.frombuffer(raw, "<f4", n, at))
                at += 4 * n
        need(at == len(raw), "q8 length")
        groups_first = np.stack(out).reshape([groups, *rest])
        return groups_first.reshape(rest) if axis is None else np.moveaxis(groups_first, 0, axis)

    def reachable(self) -> list[int]:
        """The numbers of tokens that the history may be cut to (section 11), found by trying each."""
        layout = self.json("layout", LAYOUT)
        specs = [t for t in (layout["tensors"] if layout else []) if t["role"] not in ("logits", "draft")]
        stateful = any(s["growth"] == "replaced" for s in specs)
        unstored = self.commit["n_rows"] + self.commit["n_pending"] - self.commit["n_tokens"]
        found, tokens, rows = {0, self.commit["n_tokens"]}, 0, 0
        held: dict[int, set[int]] = {s["id"]: set() for s in specs}
        for reader, entry in self.live():
            for part in reader.table(entry["span"], SPAN)["parts"]:
                held[part["tensor"]] |= set(range(part["row_start"], part["row_start"] + part["n_rows"]))
            end = rows + entry["n_rows"]
            for s in specs:  # what a cut took away is not held any more
                held[s["id"]] = {r for r in held[s["id"]] if r < end // s["tokens_per_row"]}
            for n in range(tokens + 1, tokens + entry["n_tokens"]):
                r = min(end, n + unstored)
                if not stateful and (r == end or all(self._whole(s, held[s["id"]], r) for s in specs)):
                    found.add(n)
            tokens, rows = tokens + entry["n_tokens"], end
            if entry["state"] or not stateful:
                found.add(tokens)
        return sorted(found)

    @staticmethod
    def _whole(spec: dict[str, Any], held: set[int], r: int) -> bool:
        """Whether a tensor that grows can be cut to `r` rows of the history."""
        m, first = spec["tokens_per_row"], 0
        if spec["growth"] == "static":
            return True
        if spec["growth"] == "window" and spec["window"]:
            first = max(0, r - (spec["window"] - 1)) // m
        return r % m == 0 and held.issuperset(range(first, r // m))

    def content(self) -> dict[str, Any]:
        """Everything: ids, runs, positions, tensors by name, logits, sampler, identity, text, metadata."""
        layout = self.json("layout", LAYOUT)
        shard = (layout or {}).get("shard")
        if shard is not None:
            need(not {"tensors", "layers"} & layout.keys(), "tensors and layers stand in the shard")
            layout = {"architecture": layout["architecture"], "tensors": shard["tensors"], "layers": shard["layers"]}
            check_heads(shard)
        for spec in layout["tensors"] if layout else ():
            need(all(spec[name] in words for name, words in WORDS.items()), "a word of a later version")
        specs = {t["id"]: t for t in layout["tensors"]} if layout else {}
        pieces: dict[str, list[Any]] = {}
        starts: dict[str, list[int]] = {}
        out: dict[str, Any] = {"ids": [], "kinds": [], "positions": [], "texts": [], "exact": True, "bound": 0.0}
        said: tuple[list[Any], bool, bool] = ([], True, False)
        digest, rows = bytes(16), 0
        for reader, entry in self.live():
            t = reader.table(entry["span"], SPAN)
            need(entry["check"] == t["check"] and entry["row_start"] == t["row_start"] == rows, "entry")
            need(t["token_start"] == len(out["ids"]), "token_start")
            ids = t["ids"][: entry["n_tokens"]]
            need(len(ids) == entry["n_tokens"] and entry["n_rows"] <= t["n_rows"], "entry counts")
            digest = chain(digest, ids, entry["n_rows"])
            need(digest == entry["digest"], "history digest")
            out["ids"] += ids
            out["kinds"] += [k for k, count in t["runs"] for _ in range(count)][: len(ids)]
            out["positions"] += [p + i for p, count in t["positions"] for i in range(count)][: entry["n_rows"]]
            out["texts"].append(t["meta"].get("text") if entry["n_tokens"] == t["n_tokens"] else None)
            said = joined_messages(said, t["meta"], cut=entry["n_tokens"] < t["n_tokens"])
            rows += entry["n_rows"]
            for part in t["parts"]:
                spec = specs[part["tensor"]]
                values = self.values(spec, part)
                if spec["growth"] in {"grow", "window"}:
                    kept = rows // spec["tokens_per_row"] - part["row_start"]
                    values = np.take(values, range(min(kept, part["n_rows"])), axis=spec["row_axis"])
                name = spec["name"]
                if spec["growth"] == "window":  # only what is behind the last gap is the tensor
                    at = starts.get(name, [0, 0])
                    first = min(part["row_start"], rows // spec["tokens_per_row"])
                    if at[1] != first:
                        pieces[name], at = [], [first, 0]
                    starts[name] = [at[0], first + values.shape[spec["row_axis"]]]
                pieces.setdefault(name, []).append((spec["row_axis"], values))
                out["exact"] = out["exact"] and part["flags"] == 1
                out["bound"] = max(out["bound"], part["bound"])
        need(digest == self.commit["digest"] and rows == self.commit["n_rows"], "live list")
        need(len(out["ids"]) == self.commit["n_tokens"], "tokens")
        out["tensors"] = {
            name: np.concatenate([v for _, v in found], axis=found[0][0]) if found[0][0] >= 0 else found[-1][1]
            for name, found in pieces.items()
        }
        out["starts"] = {name: first for name, (first, _) in starts.items()}
        out["sampler"] = out["random"] = out["logits"] = None
        if found_state := self.state():
            t = found_state[0].table(found_state[1], STATE)
            need(not t["ids"] and not t["runs"] and not t["positions"] and t["n_rows"] == 0, "state")
            need(t["row_start"] == rows, "row_start of the state")
            out["sampler"], out["random"] = t["meta"].get("sampler"), t["meta"].get("random")
            out["proof"] = t["meta"].get("shard")
            for part in t["parts"]:
                spec = specs[part["tensor"]]
                if spec["role"] == "logits":
                    out["logits"] = self.values(spec, part)
                else:
                    out["tensors"][spec["name"]] = self.values(spec, part)
        out["messages"] = said[0] if said[1] and said[2] else None
        out["identity"] = self.json("identity", IDENTITY)
        note = self.json("note", NOTE)
        out["metadata"] = note["metadata"] if note else {}
        out["layout"] = layout
        out["shard"] = shard and {name: shard[name] for name in ("index", "count", "heads")}
        if shard and out.get("proof"):
            need(len(out["proof"]["parts"]) == shard["count"], "one digest for each shard")
            found = self.shard_digest(out, specs)
            need(out["proof"]["parts"][shard["index"]] == found, f"digest of the shard: {found}")
        return out

    def shard_digest(self, content: dict[str, Any], specs: dict[int, dict[str, Any]]) -> str:
        """The digest of a shard that was not cut (section 9)."""
        c, shard = self.commit, content["shard"]
        digest = xxhash.xxh3_128(
            struct.pack(
                "<5Qq", shard["index"], shard["count"], c["n_tokens"], c["n_rows"], c["n_pending"], c["token_offset"]
            )
        )
        digest.update(struct.pack(f"<{len(content['ids'])}i", *content["ids"]))
        runs: list[list[int]] = []
        for position in content["positions"]:
            if runs and sum(runs[-1]) == position:
                runs[-1][1] += 1
            else:
                runs.append([position, 1])
        digest.update(b"".join(struct.pack("<qQ", *run) for run in runs))
        starts = dict(content["proof"]["starts"])
        for number, spec in sorted(specs.items()):
            values = content["logits"] if spec["role"] == "logits" else content["tensors"].get(spec["name"])
            if values is not None:
                digest.update(spec["dtype"].encode("ascii") + bytes(1))
                about = [number, starts.get(number, 0), values.ndim, *values.shape]
                digest.update(struct.pack(f"<{len(about)}Q", *about) + h128(np.ascontiguousarray(values).tobytes()))
        return str(digest.hexdigest())


def joined_messages(
    said: tuple[list[Any], bool, bool], meta: dict[str, Any], *, cut: bool
) -> tuple[list[Any], bool, bool]:
    """The messages behind one more span (section 9): the first ones, whether these are all, whether any were told."""
    if "messages" not in meta:
        return said
    before, all_of_them, _ = said
    added, after = meta["messages"], meta.get("messages_after")
    need(after is None or (type(after) is int and after >= 0), "messages_after")
    need(added is None or all(type(m) is dict and type(m["role"]) is str for m in added), "messages")
    if cut or added is None:
        return before[:after], False, True
    if after is None and all_of_them:
        return before + added, True, True
    if after is not None and after <= len(before):
        return before[:after] + added, True, True
    return before, False, True


def check_heads(shard: dict[str, Any]) -> None:
    """The rules of section 6 for the heads of a shard."""
    index, count, heads = shard["index"], shard["count"], dict(shard["heads"])
    need(2 <= count <= 65_536 and 0 <= index < count and len(heads) == len(shard["heads"]), "shard")
    need(heads.keys() == {t["id"] for t in shard["tensors"] if "head" in t["axes"]}, "heads of which tensors")
    for spec in shard["tensors"]:
        if spec["id"] in heads:
            whole, found = heads[spec["id"]], spec["shape"][spec["axes"].index("head")]
            need(whole % count == 0 or count % whole == 0, "heads that can be shared out")
            need(found == (whole // count if whole % count == 0 else 1), "heads of one rank")


# -- writing ------------------------------------------------------------------------------------------------


class SpecWriter:
    """Puts records together. Every field can be overridden; checksums are made last, so that they fit."""

    def __init__(
        self, use: int = 1, *, salt: int = 77, header: dict[str, Any] | None = None, key: bytes | None = None,
        cipher: str = "aes-256-gcm",
    ) -> None:  # fmt: skip
        self.salt, self.sequence = salt, 0
        self.cipher: Cipher | None = None
        header = ({"required": 1} if key is not None else {}) | (header or {})
        fields = {
            "magic": MAGIC, "major": 1, "minor": 0, "size": 128, "required": 0, "optional": 0, "use": use,
            "reserved": bytes(7), "file_id": bytes(range(16)), "salt": salt, "created": 0, "rest": bytes(48),
        } | header  # fmt: skip
        raw = struct.pack("<8sHHIQQB7s16sQq48s", *fields.values())
        self.data = bytearray(raw + struct.pack("<Q", h64(raw)))
        if key is not None:
            salt_of_key = os.urandom(32)
            made = Cipher(key, cipher, salt_of_key, fields["file_id"])
            about = {"cipher": cipher, "salt": salt_of_key.hex(), "check": made.check.hex(), "more": "ignored"}
            self.record(KEY, payload := json.dumps(about).encode(), flags=1)
            made.context = hashlib.sha256(self.data[: 192 + len(payload)]).digest()
            self.cipher = made

    def _sealed(self, kind: int, flags: int, commit: int, payload: bytes, table: int) -> tuple[bytes, int]:
        assert self.cipher is not None
        at, body = len(self.data), payload[table:]
        count = up(len(body), STRETCH) // STRETCH
        place = (kind, flags, at, self.sequence, commit, table + 28)
        length = table + 28 + len(body) + 36 * count
        out = bytearray(self.cipher.seal(payload[:table], self.cipher.data(*place, length, 0)))
        for n in range(count):
            piece = self.cipher.seal(body[n * STRETCH : (n + 1) * STRETCH], self.cipher.data(*place, 0, n + 1))
            out += struct.pack("<Q", h64(piece, self.salt + at + 64 + len(out))) + piece
        return bytes(out), table + 28

    def record(
        self, kind: int, payload: bytes, *, table: int | None = None, commit: int = 1, flags: int = 0,
        reserved: int = 0, rest: int = 0, length: int | None = None, pad: bytes = b"\0",
    ) -> int:  # fmt: skip
        at = len(self.data)
        table = len(payload) if table is None else table
        if self.cipher is not None:
            payload, table = self._sealed(kind, flags, commit, payload, table)
        self.data += self.header(
            at,
            kind,
            len(payload) if length is None else length,
            table,
            h64(payload[:table]),
            commit,
            flags,
            reserved,
            rest,
        )
        self.data += payload
        self.data += (pad * 64)[: -len(self.data) % 64]
        return at

    def header(
        self, at: int, kind: int, length: int, table: int, checksum: int, commit: int = 1, flags: int = 0,
        reserved: int = 0, rest: int = 0,
    ) -> bytes:  # fmt: skip
        raw = struct.pack(
            "<4sBBHQQQQQQ", b"KVR1", kind, flags, reserved, self.sequence, length, commit, table, checksum, rest
        )
        self.sequence += 1
        return raw + struct.pack("<Q", h64(raw, self.salt + at))

    def check_of(self, at: int) -> bytes:
        return bytes(self.data[at + 56 : at + 64])

    def json(self, kind: int, value: Any, **options: Any) -> int:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.record(kind, raw, **options)

    def table(self, kind: int, fields: dict[str, Any], *, commit: int = 1) -> int:
        payload, table = pack_table(fields)
        return self.record(kind, payload, table=table, commit=commit)

    def commit(
        self, fields: dict[str, Any], tail: list[dict[str, Any]], *, footer: dict[str, Any] | None = None
    ) -> int:
        f = {
            "number": 1, "previous": 0, "previous_digest": bytes(16), "operation": 1, "flags": 3, "n_tail": len(tail),
            "n_tokens": 0, "n_rows": 0, "n_pending": 0, "token_offset": 0, "identity": 0, "layout": 0, "state": 0,
            "note": 0, "index": 0, "index_kept": 0, "base": 0, "time": 0, "digest": bytes(16), "reserved": bytes(40),
        } | fields  # fmt: skip
        payload = struct.pack("<QQ16sHHIQQQqQQQQQQQq16s40s", *f.values()) + pack_entries(tail)
        at = self.record(COMMIT, payload, commit=f["number"])
        place = len(self.data)
        digest = self.digest_of(at)
        foot = {
            "magic": FOOTER_MAGIC,
            "offset": at,
            "number": f["number"],
            "length": place + 64,
            "digest": digest,
            "rest": 0,
        }
        raw = struct.pack("<8sQQQ16sQ", *(foot | (footer or {})).values())
        self.data += raw + struct.pack("<Q", h64(raw, self.salt + place))
        return at

    def digest_of(self, commit_at: int) -> bytes:
        (length,) = struct.unpack_from("<Q", self.data, commit_at + 16)
        return h128(bytes(self.data[commit_at : commit_at + 64 + length]))


def pack_entries(entries: list[dict[str, Any]]) -> bytes:
    names = ["span", "n_tokens", "row_start", "n_rows", "state", "check", "digest"]
    return b"".join(struct.pack("<QQQQQ8s16s", *(e[n] for n in names)) for e in entries)


def pack_table(fields: dict[str, Any]) -> tuple[bytes, int]:
    """Return payload and table length. Members of `fields` that start with `set_` override a count or a length."""
    f = {
        "row_start": 0, "n_rows": 0, "token_start": 0, "ids": [], "runs": [], "positions": [], "meta": b"", "parts": [],
        "reserved": bytes(16), "id_padding": b"\0", "padding": b"\0", "part_padding": b"\0",
    } | fields  # fmt: skip
    head = struct.pack(
        "<QQQQIIII16s", f["row_start"], f["n_rows"], f["token_start"], f.get("set_n_tokens", len(f["ids"])),
        f.get("set_n_runs", len(f["runs"])), f.get("set_n_positions", len(f["positions"])),
        f.get("set_n_parts", len(f["parts"])), f.get("set_n_meta", len(f["meta"])), f["reserved"],
    )  # fmt: skip
    raw = bytearray(head + struct.pack(f"<{len(f['ids'])}i", *f["ids"]))
    raw += (f["id_padding"] * 8)[: -len(raw) % 8]
    raw += b"".join(struct.pack("<QQ", *run) for run in f["runs"])
    raw += b"".join(struct.pack("<qQ", *run) for run in f["positions"])
    raw += f["meta"]
    raw += (f["padding"] * 64)[: -len(raw) % 64]
    table = len(raw) + 64 * len(f["parts"])
    body, at = bytearray(), table
    for part in f["parts"]:
        p = {
            "tensor": 0, "codec": 1, "flags": 1, "row_start": 0, "n_rows": 0, "offset": at, "stored": len(part["data"]),
            "checksum": h64(part["data"]), "decoded": len(part["data"]), "bound": 0.0,
        } | {k: v for k, v in part.items() if k != "data"}  # fmt: skip
        raw += struct.pack("<IHHQQQQQQd", *p.values())
        body += (f["part_padding"] * 64)[: at - table - len(body)]
        body += part["data"]
        at = up(table + len(body))
    return bytes(raw + body + f.get("more", b"")), table


def tensor(number: int, role: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": number, "name": f"layer0.{role}", "layer": 0, "role": role, "dtype": "float32",
        "axes": ["head", "row", "dim"], "shape": [2, 0, 4], "growth": "grow", "row_axis": 1, "tokens_per_row": 1,
        "window": 0, "rope": "after", "pairing": "half",
    } | fields  # fmt: skip


class Minimal:
    """One layer, three tokens, three rows, logits: a snapshot as the spec says. Change a member, then `build`."""

    def __init__(self, use: int = 1, key: bytes | None = None, cipher: str = "aes-256-gcm") -> None:
        self.use, self.key, self.cipher = use, key, cipher
        self.header: dict[str, Any] = {}
        self.k = np.arange(24, dtype="<f4").reshape(2, 3, 4)
        self.logits = np.linspace(-1, 1, 5, dtype="<f4")
        self.identity: Any = {"architecture": "tiny", "config": {"width": "4"}, "weights": [], "extra": 1}
        self.layout: Any = {
            "architecture": "tiny",
            "tensors": [
                tensor(0, "k"),
                tensor(1, "v"),
                tensor(9, "logits", layer=-1, axes=["vocab"], shape=[5], row_axis=-1, growth="replaced", rope="none"),
            ],
            "layers": [{"index": 0, "kind": "attention", "num_query_heads": 4, "shares": None, "tensors": [0, 1]}],
        }  # fmt: skip
        rows = {"n_rows": 3, "data": self.k.tobytes()}
        self.span: dict[str, Any] = {
            "n_rows": 3, "ids": [5, 6, 7], "runs": [(0, 2), (1, 1)], "positions": [(0, 3)], "meta": b'{"text":"abc"}',
            "parts": [{"tensor": 0} | rows, {"tensor": 1} | rows],
        }  # fmt: skip
        self.state: dict[str, Any] = {
            "row_start": 3, "meta": b"", "parts": [{"tensor": 9, "n_rows": 1, "data": self.logits.tobytes()}],
        }  # fmt: skip
        self.note: Any = {"metadata": {"a": "b"}}
        self.commit: dict[str, Any] = {}
        self.entry: dict[str, Any] = {}
        self.footer: dict[str, Any] = {}
        self.index: dict[str, Any] | None = None
        self.before: list[tuple[int, bytes, dict[str, Any]]] = []
        self.places: dict[str, int] = {}

    def as_shard(self, **fields: Any) -> dict[str, Any]:
        """Make it shard 0 of 2 of a whole with twice the heads; return the member of LAYOUT to change."""
        inside = {name: self.layout.pop(name) for name in ("tensors", "layers")}
        shard: dict[str, Any] = {"index": 0, "count": 2, "heads": [[0, 4], [1, 4]]} | inside | fields
        self.layout["shard"] = shard
        return shard

    def part(self, number: int) -> dict[str, Any]:
        self.span["parts"] = copy.deepcopy(self.span["parts"])
        found: dict[str, Any] = self.span["parts"][number]
        return found

    def build(self) -> bytes:
        return bytes(self.writer().data)

    def writer(self) -> SpecWriter:
        w = SpecWriter(self.use, header=self.header, key=self.key, cipher=self.cipher)
        for kind, payload, options in self.before:
            w.record(kind, payload, **options)
        at = self.places
        at["identity"] = w.json(IDENTITY, self.identity)
        at["layout"] = w.json(LAYOUT, self.layout)
        at["span"] = w.table(SPAN, self.span)
        at["state"] = w.table(STATE, self.state)
        at["note"] = w.json(NOTE, self.note)
        ids = self.span["ids"]
        n_rows = self.span["n_rows"]
        digest = h128(bytes(16) + struct.pack(f"<{len(ids)}i", *ids) + struct.pack("<Q", n_rows % 2**64))
        entry = {
            "span": at["span"], "n_tokens": len(ids), "row_start": 0, "n_rows": n_rows, "state": at["state"],
            "check": w.check_of(at["span"]), "digest": digest,
        } | self.entry  # fmt: skip
        fields: dict[str, Any] = {
            "n_tokens": len(ids), "n_rows": n_rows, "token_offset": n_rows, "identity": at["identity"],
            "layout": at["layout"], "state": at["state"], "note": at["note"], "digest": digest,
        }  # fmt: skip
        tail = [entry]
        if self.index is not None:
            count = self.index.get("count", 1)
            at["index"] = w.record(
                INDEX, struct.pack("<Q", count) + self.index.get("reserved", bytes(56)) + pack_entries([entry])
            )
            fields |= {"index": at["index"], "index_kept": self.index.get("kept", 1)}
            tail = []
        at["commit"] = len(w.data)
        w.commit(fields | self.commit, tail, footer=self.footer)
        return w


class MinimalFork:
    """A fork of a file as the spec says, without entries of its own. Change a member, then `build`.

    It keeps the first `n_entries` of the live list (None: all); with `n_tokens` the last of them is cut to so many
    tokens of the history, and to `n_rows`.
    """

    def __init__(
        self, parent: SpecReader, n_entries: int | None = None, *, n_tokens: int | None = None, n_rows: int = 0
    ) -> None:
        live = parent.live()[:n_entries]
        before, last = ([e for _, e in live[:-1]], live[-1]) if live else ([], None)
        tokens, rows, digest = sum(e["n_tokens"] for e in before), sum(e["n_rows"] for e in before), bytes(16)
        if last is not None:
            n_tokens = tokens + last[1]["n_tokens"] if n_tokens is None else n_tokens
            n_rows = n_rows or rows + last[1]["n_rows"]
            ids = last[0].table(last[1]["span"], SPAN)["ids"][: n_tokens - tokens]
            digest = chain(before[-1]["digest"] if before else digest, ids, n_rows - rows)
            tokens, rows = n_tokens, n_rows
        self.header: dict[str, Any] = {"required": FORKED, "use": 2, "file_id": bytes(reversed(range(16)))}
        self.base: dict[str, Any] = {
            "file_id": parent.file_id, "commit": parent.commit["number"], "commit_offset": parent.commit_at,
            "digest": h128(parent.data[parent.commit_at : parent.record(parent.commit_at)["at"] + 64]
                           + parent.record(parent.commit_at)["payload"]),
            "n_entries": len(live), "n_tokens": tokens, "n_rows": rows, "history_digest": digest,
            "depth": 1 + (parent.base["depth"] if parent.base else 0), "reserved": bytes(36),
        }  # fmt: skip
        self.commit: dict[str, Any] = {
            "operation": 4, "n_tokens": tokens, "n_rows": rows, "n_pending": tokens - rows, "token_offset": rows,
            "digest": digest,
        }  # fmt: skip
        self.more: list[dict[str, Any]] = []  # later commits: {"base": ..., "commit": ..., "span": ...}

    def build(self) -> bytes:
        return bytes(self.writer().data)

    def writer(self) -> SpecWriter:
        w = SpecWriter(2, header=self.header)
        at = w.commit({"flags": 1, "base": w.record(BASE, pack_base(self.base))} | self.commit, [])
        for number, more in enumerate(self.more, 2):
            base = w.record(BASE, pack_base(self.base | more.get("base", {})), commit=number)
            tail = []
            fields = self.commit | {"operation": 2}
            if "span" in more:
                span = more["span"]
                place = w.table(SPAN, span, commit=number)
                digest = chain(self.base["history_digest"], span["ids"], span["n_rows"])
                tail = [{
                    "span": place, "n_tokens": len(span["ids"]), "row_start": span["row_start"],
                    "n_rows": span["n_rows"], "state": 0, "check": w.check_of(place), "digest": digest,
                }]  # fmt: skip
                fields |= {
                    "operation": 1, "digest": digest, "n_tokens": fields["n_tokens"] + len(span["ids"]),
                    "n_rows": fields["n_rows"] + span["n_rows"], "token_offset": fields["n_rows"] + span["n_rows"],
                }  # fmt: skip
            fields |= {"number": number, "previous": at, "previous_digest": w.digest_of(at), "flags": 1, "base": base}
            at = w.commit(fields | more.get("commit", {}), tail)
        return w


def pack_base(fields: dict[str, Any]) -> bytes:
    return struct.pack("<16sQQ16sQQQ16sI36s", *(fields[name] for name in BASE_NAMES)) + fields.get("extra", b"")
