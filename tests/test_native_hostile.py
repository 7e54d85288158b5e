"""Files that break one rule of docs/spec/file.md each, with checksums that fit.

All are opened in a process with little memory: each must be refused with the right class of error, and nothing but
`KvsnapError` may come out of any way to read, verify or repair a file. `hostile_files` has forks and encrypted files.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostile_files
from spec_file import COMMIT, IDENTITY, LAYOUT, NOTE, SPAN, STATE, Minimal, SpecWriter, h64, h128, pack_table, up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is that of Linux")

HERE = Path(__file__).parent
MEMORY = 512 << 20
HUGE = 2**40

Cases = dict[str, tuple[Callable[[], Any], str]]
CASES: Cases = {}
CHANGES: dict[str, Callable[[Minimal], Any]] = {}


def case(expected: str) -> Callable[[Callable[[Minimal], Any]], Callable[[Minimal], Any]]:
    """Register a function that changes a `Minimal` (or returns bytes) and the error class that must come of it.

    "" for a file that is good, "verify" for what only a look at every byte finds.
    """

    def add(change: Callable[[Minimal], Any]) -> Callable[[Minimal], Any]:
        def make() -> Any:
            m = Minimal()
            made = change(m)
            return m.build() if made is None else made

        CASES[change.__name__] = (make, expected)
        CHANGES[change.__name__] = change
        return change

    return add


# -- section 2: the header


@case("FormatError")
def header_magic_of_another_kind(m: Minimal) -> Any:
    m.header["magic"] = b"\x89KVSNAQ\n"


@case("VersionError")
def header_newer_major_version(m: Minimal) -> Any:
    m.header["major"] = 2


@case("VersionError")
def header_unknown_required_feature(m: Minimal) -> Any:
    m.header["required"] = 1 << 63


@case("FormatError")
def header_size_of_another_version(m: Minimal) -> Any:
    m.header["size"] = 192


@case("FormatError")
def header_reserved_set(m: Minimal) -> Any:
    m.header["reserved"] = b"\0\0\1\0\0\0\0"


@case("FormatError")
def header_rest_set(m: Minimal) -> Any:
    m.header["rest"] = b"\1" + bytes(47)


@case("FormatError")
def header_unknown_use(m: Minimal) -> Any:
    m.header["use"] = 3


# -- section 3: records


def patched_record(m: Minimal, name: str, **fields: Any) -> bytes:
    """Rewrite the header of one record of a finished file, and what depends on its bytes."""
    w = m.writer()
    at = m.places[name]
    names = ["kind", "flags", "reserved", "sequence", "length", "commit", "table", "checksum", "rest"]
    f = dict(zip(names, struct.unpack_from("<BBHQQQQQQ", w.data, at + 4), strict=True)) | fields
    w.sequence = f.pop("sequence")
    w.data[at : at + 64] = w.header(at, f.pop("kind"), f.pop("length"), f.pop("table"), f.pop("checksum"), **f)
    return bytes(w.data)


@case("FormatError")
def record_reserved_set(m: Minimal) -> Any:
    return patched_record(m, "layout", reserved=1)


@case("FormatError")
def record_rest_set(m: Minimal) -> Any:
    return patched_record(m, "layout", rest=1)


@case("DamagedError")
def record_longer_than_the_file(m: Minimal) -> Any:
    return patched_record(m, "identity", length=2**41, table=2**41)


@case("FormatError")
def record_longer_than_any_file(m: Minimal) -> Any:
    return patched_record(m, "identity", length=2**63, table=2**63)


@case("FormatError")
def record_table_longer_than_payload(m: Minimal) -> Any:
    return patched_record(m, "span", table=2**62)


@case("FormatError")
def record_table_shorter_than_payload(m: Minimal) -> Any:
    return patched_record(m, "note", table=2)


@case("DamagedError")
def record_of_another_kind(m: Minimal) -> Any:
    return patched_record(m, "layout", kind=IDENTITY)


@case("VersionError")
def record_of_unknown_critical_kind_in_the_way(m: Minimal) -> Any:
    m.before.append((77, b"what is this", {"flags": 1}))


@case("VersionError")
def record_of_unknown_critical_kind_that_is_live(m: Minimal) -> Any:
    return patched_record(m, "layout", kind=77, flags=1)


@case("FormatError")
def record_flag_unknown(m: Minimal) -> Any:
    return patched_record(m, "layout", flags=2)


@case("DamagedError")
def record_moved(m: Minimal) -> Any:
    w = m.writer()
    at = m.places["note"]
    data = bytes(w.data)
    m.commit["note"] = at + 128
    moved = m.writer()
    moved.data[at + 128 : at + 256] = data[at : at + 128]
    return bytes(moved.data)


# -- sections 5, 6, 8, 9: JSON


@case("FormatError")
def json_deeply_nested(m: Minimal) -> Any:
    m.identity = b'{"config":' + b"[" * 10_000 + b"]" * 10_000 + b"}"


@case("FormatError")
def json_nested_just_below_the_limit_in_a_name(m: Minimal) -> Any:
    return nested_files(m, "name", "DEEP")


@case("FormatError")
def json_nested_just_below_the_limit_in_axes(m: Minimal) -> Any:
    return nested_files(m, "axes", ["head", "row", "DEEP"])


def nested_files(m: Minimal, member: str, value: Any) -> list[bytes]:
    # Where the parser of this interpreter gives up is not ours to know; what is only just parsed must not crash later.
    m.layout["tensors"][0][member] = value
    text, out = json.dumps(m.layout), []
    for depth in range(860, 1000, 4):
        m.layout = text.replace('"DEEP"', "[" * depth + "]" * depth).encode()
        out.append(m.build())
    return out


@case("FormatError")
def json_with_nan(m: Minimal) -> Any:
    m.identity = b'{"architecture": NaN}'


@case("FormatError")
def json_with_a_member_twice(m: Minimal) -> Any:
    m.identity = b'{"architecture": "a", "architecture": "b"}'


@case("FormatError")
def json_with_infinity(m: Minimal) -> Any:
    m.state["meta"] = b'{"sampler":{"temperature":-Infinity},"random":null}'


@case("FormatError")
def json_with_a_number_of_5000_digits(m: Minimal) -> Any:
    m.layout["tensors"][0]["id"] = "ID"
    m.layout = json.dumps(m.layout).replace('"ID"', "9" * 5000).encode()


@case("FormatError")
def json_with_a_number_of_4000_digits(m: Minimal) -> Any:
    m.layout["tensors"][0]["shape"] = ["N", 0, 4]
    m.layout = json.dumps(m.layout).replace('"N"', "9" * 4000).encode()


@case("FormatError")
def json_not_utf8(m: Minimal) -> Any:
    m.note = b'{"metadata":{"a":"\xff"}}'


@case("FormatError")
def json_half_of_a_pair_of_surrogates(m: Minimal) -> Any:
    m.note = b'{"metadata":{"a":"\\uD800"}}'


@case("FormatError")
def json_a_list(m: Minimal) -> Any:
    m.note = b"[]"


@case("FormatError")
def json_empty(m: Minimal) -> Any:
    m.note = b""


@case("FormatError")
def identity_of_wrong_types(m: Minimal) -> Any:
    m.identity = {"weights": [["a", "float32", [1, "2"], "00"]]}


@case("FormatError")
def note_with_a_number(m: Minimal) -> Any:
    m.note = {"metadata": {"a": 1}}


@case("FormatError")
def text_a_number(m: Minimal) -> Any:
    m.span["meta"] = b'{"text":7}'


def sampler_meta(**fields: Any) -> bytes:
    settings = {
        "repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1,
    }  # fmt: skip
    random = {"algorithm": "philox4x64", "seed": 1, "draws": 0}
    for name, value in fields.items():
        place, _, member = name.partition("__")
        {"sampler": settings, "random": random}[place][member] = value
    return json.dumps({"sampler": settings, "random": random}).replace('"HUGE"', "1" + "0" * 4000).encode()


@case("FormatError")
def sampler_temperature_beyond_float(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(sampler__temperature="HUGE")


@case("FormatError")
def sampler_penalty_infinite(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(sampler__repetition_penalty="X").replace(b'"X"', b"1e999")


@case("FormatError")
def sampler_top_k_a_fraction(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(sampler__top_k=1.5)


@case("FormatError")
def random_draws_negative(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(random__draws=-1)


@case("FormatError")
def random_seed_too_large(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(random__seed=2**64)


@case("FormatError")
def layout_ids_twice(m: Minimal) -> Any:
    m.layout["tensors"][1]["id"] = 0


@case("FormatError")
def layout_huge_axis(m: Minimal) -> Any:
    m.layout["tensors"][0]["shape"] = [HUGE, 0, HUGE]


@case("FormatError")
def layout_huge_axis_beside_an_empty_one(m: Minimal) -> Any:
    m.layout["tensors"][0]["shape"] = [2**39, 0, 0]
    m.span |= {"n_rows": 2**31 - 1, "positions": [(0, 2**31 - 1)]}
    m.part(0)
    m.span["parts"][0] = {"tensor": 0, "data": b"", "n_rows": 2**31 - 1}
    del m.span["parts"][1]
    m.layout["layers"][0]["tensors"] = [0]
    del m.layout["tensors"][1]
    m.state["row_start"] = 2**31 - 1


@case("FormatError")
def layout_nine_axes(m: Minimal) -> Any:
    m.layout["tensors"][0] |= {"axes": list("abcdefghi"), "shape": [2, 0, 4, 1, 1, 1, 1, 1, 1]}


@case("FormatError")
def layout_axes_of_another_count(m: Minimal) -> Any:
    m.layout["tensors"][0]["axes"] = ["head", "row"]


@case("FormatError")
def layout_axis_not_text(m: Minimal) -> Any:
    m.layout["tensors"][0]["axes"] = ["head", "row", 5]


@case("VersionError")
def layout_unknown_dtype(m: Minimal) -> Any:
    m.layout["tensors"][0]["dtype"] = "object"


@case("VersionError")
def layout_unknown_role(m: Minimal) -> Any:
    m.layout["tensors"][0]["role"] = "__class__"


@case("FormatError")
def layout_negative_size(m: Minimal) -> Any:
    m.layout["tensors"][0]["shape"] = [2, 0, -4]


@case("FormatError")
def layout_row_axis_outside(m: Minimal) -> Any:
    m.layout["tensors"][0]["row_axis"] = 3


@case("FormatError")
def layout_row_axis_of_fixed_length(m: Minimal) -> Any:
    m.layout["tensors"][0]["row_axis"] = 2


@case("FormatError")
def layout_grows_without_axis(m: Minimal) -> Any:
    m.layout["tensors"][0]["row_axis"] = -1


@case("FormatError")
def layout_no_tokens_per_row(m: Minimal) -> Any:
    m.layout["tensors"][0]["tokens_per_row"] = 0


@case("FormatError")
def layout_true_for_a_number(m: Minimal) -> Any:
    m.layout["tensors"][0]["tokens_per_row"] = True


@case("FormatError")
def layout_layer_out_of_order(m: Minimal) -> Any:
    m.layout["layers"][0]["index"] = 1


@case("FormatError")
def layout_layer_names_unknown_tensor(m: Minimal) -> Any:
    m.layout["layers"][0]["tensors"] = [0, 1, 2]


@case("FormatError")
def layout_layer_shares_itself(m: Minimal) -> Any:
    m.layout["layers"][0]["shares"] = 0


@case("FormatError")
def layout_layer_shares_outside(m: Minimal) -> Any:
    m.layout["layers"][0]["shares"] = HUGE


@case("FormatError")
def layout_layer_shares_what_is_no_object(m: Minimal) -> Any:
    m.layout["layers"][0]["shares"] = 1
    m.layout["layers"].append(5)


@case("FormatError")
def layout_tensors_not_a_list(m: Minimal) -> Any:
    m.layout["tensors"] = {"0": 1}


@case("")
def layout_of_a_shard(m: Minimal) -> Any:
    m.as_shard()


@case("FormatError")
def layout_of_a_shard_of_no_rank(m: Minimal) -> Any:
    m.as_shard(index=2)


@case("FormatError")
def layout_of_a_shard_with_a_count_without_end(m: Minimal) -> Any:
    m.as_shard(count=HUGE, heads=[[0, HUGE], [1, HUGE]])


@case("FormatError")
def layout_of_a_shard_with_other_heads(m: Minimal) -> Any:
    m.as_shard(heads=[[0, 4], [1, 6]])


@case("FormatError")
def layout_of_a_shard_beside_a_whole(m: Minimal) -> Any:
    m.layout["layers"] = m.as_shard()["layers"]


@case("FormatError")
def state_of_a_shard_with_too_few_digests(m: Minimal) -> Any:
    m.as_shard()
    m.state["meta"] = json.dumps({"shard": {"parts": ["0" * 32], "starts": []}}).encode()


@case("FormatError")
def state_of_a_shard_that_starts_nowhere(m: Minimal) -> Any:
    m.as_shard()
    m.state["meta"] = json.dumps({"shard": {"parts": ["0" * 32] * 2, "starts": [[1, -HUGE]]}}).encode()


# -- section 7: SPAN and STATE


@case("FormatError")
def span_more_tokens_than_bytes(m: Minimal) -> Any:
    m.span["set_n_tokens"] = 2**61


@case("FormatError")
def span_4_thousand_million_parts(m: Minimal) -> Any:
    m.span["set_n_parts"] = 2**32 - 1


@case("FormatError")
def span_more_runs_than_bytes(m: Minimal) -> Any:
    m.span["set_n_runs"] = 2**32 - 1


@case("FormatError")
def span_more_position_runs_than_bytes(m: Minimal) -> Any:
    m.span["set_n_positions"] = 2**32 - 1


@case("FormatError")
def span_meta_longer_than_the_record(m: Minimal) -> Any:
    m.span["set_n_meta"] = 2**32 - 1


@case("FormatError")
def span_table_of_63_bytes(m: Minimal) -> Any:
    payload = pack_table(m.span)[0]
    return patched_record(m, "span", table=63, length=63, checksum=h64(payload[:63]))


@case("FormatError")
def span_reserved_set(m: Minimal) -> Any:
    m.span["reserved"] = bytes(15) + b"\1"


@case("FormatError")
def span_padding_of_ids_set(m: Minimal) -> Any:
    m.span["id_padding"] = b"\1"


@case("FormatError")
def span_padding_of_meta_set(m: Minimal) -> Any:
    m.span["padding"] = b"\1"


@case("FormatError")
def span_negative_id(m: Minimal) -> Any:
    m.span["ids"] = [5, -6, 7]


@case("FormatError")
def span_run_of_unknown_kind(m: Minimal) -> Any:
    m.span["runs"] = [(2, 3)]


@case("FormatError")
def span_run_of_nothing(m: Minimal) -> Any:
    m.span["runs"] = [(0, 3), (1, 0)]


@case("FormatError")
def span_runs_that_wrap_around(m: Minimal) -> Any:
    m.span["runs"] = [(0, 2**64 - 1), (1, 4)]


@case("FormatError")
def span_runs_of_fewer_tokens(m: Minimal) -> Any:
    m.span["runs"] = [(0, 2)]


@case("FormatError")
def span_positions_of_more_rows(m: Minimal) -> Any:
    m.span["positions"] = [(0, 4)]


@case("FormatError")
def span_positions_beyond_64_bits(m: Minimal) -> Any:
    m.span["positions"] = [(2**63 - 2, 3)]


@case("FormatError")
def part_of_unknown_tensor(m: Minimal) -> Any:
    m.part(1)["tensor"] = 2


@case("FormatError")
def part_twice(m: Minimal) -> Any:
    m.part(1)["tensor"] = 0


@case("FormatError")
def part_over_another(m: Minimal) -> Any:
    first = m.part(0)
    table = up(64 + 16 + 16 * 3 + len(m.span["meta"])) + 128
    m.span["parts"][1]["offset"] = table
    assert first["tensor"] == 0


@case("FormatError")
def part_behind_the_record(m: Minimal) -> Any:
    m.part(1)["stored"] = HUGE


@case("FormatError")
def part_that_wraps_around(m: Minimal) -> Any:
    m.part(1)["stored"] = 2**64 - 64


@case("FormatError")
def part_unaligned(m: Minimal) -> Any:
    m.part(0)["offset"] = 65


@case("FormatError")
def part_of_another_decoded_size(m: Minimal) -> Any:
    m.part(0)["decoded"] = 100


@case("FormatError")
def part_of_more_rows_than_bytes(m: Minimal) -> Any:
    m.part(0)["n_rows"] = 2**30


@case("FormatError")
def part_of_more_rows_than_bytes_decoded_too(m: Minimal) -> Any:
    m.part(0).update(n_rows=2**30, decoded=2 * 2**30 * 16)


@case("FormatError")
def part_of_fewer_rows(m: Minimal) -> Any:
    m.part(0).update(n_rows=2, data=m.k[:, :2].tobytes())


@case("FormatError")
def part_of_other_rows(m: Minimal) -> Any:
    m.part(0)["row_start"] = 1


@case("FormatError")
def part_missing(m: Minimal) -> Any:
    m.part(0)
    del m.span["parts"][0]


@case("FormatError")
def part_unknown_flag(m: Minimal) -> Any:
    m.part(0)["flags"] = 3


@case("FormatError")
def part_exact_with_a_bound(m: Minimal) -> Any:
    m.part(0)["bound"] = 0.5


@case("FormatError")
def part_lossy_without_a_bound(m: Minimal) -> Any:
    m.part(0)["flags"] = 0


@case("FormatError")
def part_bound_nan(m: Minimal) -> Any:
    m.part(0).update(flags=0, bound=float("nan"))


@case("VersionError")
def part_codec_unknown(m: Minimal) -> Any:
    m.part(0)["codec"] = 77


@case("UnsupportedError")
def part_codec_reserved(m: Minimal) -> Any:
    m.part(0)["codec"] = 2


@case("DamagedError")
def part_checksum_wrong(m: Minimal) -> Any:
    m.part(0)["checksum"] = 1


@case("FormatError")
def part_of_a_replaced_tensor_in_a_span(m: Minimal) -> Any:
    m.part(0)
    m.span["parts"].append({"tensor": 9, "n_rows": 1, "data": m.logits.tobytes()})


@case("FormatError")
def part_of_a_growing_tensor_in_a_state(m: Minimal) -> Any:
    m.state["parts"] = [{"tensor": 0, "n_rows": 1, "data": m.k[:, :1].tobytes()}]


@case("FormatError")
def bytes_behind_the_last_part(m: Minimal) -> Any:
    m.span["more"] = b"more"


def q8(m: Minimal, data: bytes, **fields: Any) -> None:
    m.part(0).update({"codec": 3, "flags": 0, "bound": 1.0, "data": data, "decoded": 96} | fields)


GOOD_Q8 = struct.pack("<IIfIfI", 2, 0, 1.0, 0, 1.0, 0) + bytes(24)


@case("")
def q8_good(m: Minimal) -> Any:
    q8(m, GOOD_Q8)


@case("FormatError")
def q8_of_huge_decoded_size(m: Minimal) -> Any:
    n_rows = 2**31 - 1
    q8(m, GOOD_Q8, n_rows=n_rows, decoded=n_rows * 32)
    m.span |= {"n_rows": n_rows, "positions": [(0, n_rows)]}
    m.layout["layers"][0]["tensors"] = [0]
    del m.layout["tensors"][1], m.span["parts"][1]
    m.state["row_start"] = n_rows


@case("FormatError")
def q8_cut_off(m: Minimal) -> Any:
    q8(m, GOOD_Q8[:20])


@case("DamagedError")
def q8_group_count(m: Minimal) -> Any:
    q8(m, struct.pack("<I", 2**32 - 1) + GOOD_Q8[4:])


@case("DamagedError")
def q8_scale_nan(m: Minimal) -> Any:
    q8(m, GOOD_Q8[:8] + struct.pack("<f", float("nan")) + GOOD_Q8[12:])


@case("DamagedError")
def q8_unknown_mode(m: Minimal) -> Any:
    q8(m, GOOD_Q8[:12] + struct.pack("<I", 2) + GOOD_Q8[16:])


@case("DamagedError")
def q8_float_mode_without_the_bytes(m: Minimal) -> Any:
    q8(m, GOOD_Q8[:8] + struct.pack("<fI", 0.0, 1) + GOOD_Q8[16:])


@case("KvsnapError")
def q8_of_a_tensor_that_it_does_not_apply_to(m: Minimal) -> Any:
    m.layout["tensors"][0]["dtype"] = "int32"
    q8(m, GOOD_Q8)


@case("FormatError")
def state_with_tokens(m: Minimal) -> Any:
    m.state |= {"ids": [1], "runs": [(0, 1)]}


@case("FormatError")
def state_of_another_row(m: Minimal) -> Any:
    m.state["row_start"] = 2


# -- sections 10 and 11


@case("FormatError")
def index_kept_above_its_count(m: Minimal) -> Any:
    m.index = {"kept": 2}


@case("FormatError")
def index_count_above_its_bytes(m: Minimal) -> Any:
    m.index = {"count": 2**58}


@case("FormatError")
def index_reserved_set(m: Minimal) -> Any:
    m.index = {"reserved": bytes(55) + b"\1"}


@case("FormatError")
def live_list_with_a_gap(m: Minimal) -> Any:
    m.entry["row_start"] = 1


@case("FormatError")
def entry_keeps_more_than_the_span(m: Minimal) -> Any:
    m.entry["n_rows"] = 4
    m.commit["n_rows"] = 4


@case("FormatError")
def entry_of_another_span(m: Minimal) -> Any:
    m.entry["check"] = bytes(8)


@case("FormatError")
def entry_that_wraps_around(m: Minimal) -> Any:
    m.entry["n_tokens"] = 2**64 - 1


@case("DamagedError")
def entry_of_another_history(m: Minimal) -> Any:
    m.entry["digest"] = m.commit["digest"] = b"\1" * 16


@case("DamagedError")
def entry_points_behind_the_file(m: Minimal) -> Any:
    m.entry["span"] = HUGE


@case("FormatError")
def entry_points_into_the_header(m: Minimal) -> Any:
    m.entry["span"] = 64


@case("FormatError")
def commit_of_more_tokens_than_the_list(m: Minimal) -> Any:
    m.commit.update(n_tokens=4, n_pending=1)


@case("FormatError")
def commit_counts_contradict(m: Minimal) -> Any:
    m.commit.update(n_pending=4)


@case("FormatError")
def commit_huge_counts(m: Minimal) -> Any:
    m.commit.update(n_tokens=2**63, n_rows=2**63)


@case("FormatError")
def commit_tail_of_4_thousand_million(m: Minimal) -> Any:
    m.commit["n_tail"] = 2**32 - 1


@case("FormatError")
def commit_reserved_set(m: Minimal) -> Any:
    m.commit["reserved"] = bytes(39) + b"\1"


@case("FormatError")
def commit_unknown_flag(m: Minimal) -> Any:
    m.commit["flags"] = 7


@case("FormatError")
def commit_unknown_operation(m: Minimal) -> Any:
    m.commit["operation"] = 7


@case("FormatError")
def commit_base_set(m: Minimal) -> Any:
    m.commit["base"] = 128


@case("FormatError")
def commit_number_unlike_its_footer(m: Minimal) -> Any:
    m.footer["number"] = 2


@case("DamagedError")
def commit_state_points_behind_the_file(m: Minimal) -> Any:
    m.commit["state"] = m.entry["state"] = 2**63


@case("DamagedError")
def commit_layout_unaligned(m: Minimal) -> Any:
    m.commit["layout"] = 129


@case("DamagedError")
def footer_of_another_digest(m: Minimal) -> Any:
    m.footer["digest"] = bytes(16)


@case("DamagedError")
def footer_of_another_length(m: Minimal) -> Any:
    m.footer["length"] = 128


@case("DamagedError")
def footer_reserved_set(m: Minimal) -> Any:
    m.footer["rest"] = 1


@case("DamagedError")
def footer_not_behind_its_commit(m: Minimal) -> Any:
    w = m.writer()
    at = m.places["commit"]
    again = m.writer()
    again.sequence = w.sequence
    del again.data[-64:]
    again.record(NOTE, b"{}")
    place = len(again.data)
    digest = again.digest_of(at)
    raw = struct.pack("<8sQQQ16sQ", bytes.fromhex("4B56454E440D0A1A"), at, 1, place + 64, digest, 0)
    return bytes(again.data + raw + struct.pack("<Q", h64(raw, again.salt + place)))


@case("DamagedError")
def bytes_behind_a_sealed_file(m: Minimal) -> Any:
    return m.build() + bytes(64)


@case("FormatError")
def spans_inside_one_another(m: Minimal) -> Any:
    """90 SPAN records, each inside the part of the one before: 90 times the file, if it were believed."""
    return nested_spans(90)


def nested_spans(n: int) -> bytes:
    m = Minimal(2)
    m.layout["tensors"][0] |= {"dtype": "int8", "axes": ["row", "dim"], "shape": [0, 64], "row_axis": 0}
    del m.layout["tensors"][1]
    m.layout["layers"][0]["tensors"] = [0]
    w = SpecWriter(2)
    layout = w.json(LAYOUT, m.layout)
    first = len(w.data)
    head = len(pack_table({"n_rows": 1, "positions": [(0, 1)], "parts": [{"data": b""}]})[0])
    inner_rows = (8 << 20) // 64
    data = bytes(64 * inner_rows)
    made = []
    # From the innermost outwards; the rows of the outer ones come first in the history.
    sizes = [inner_rows]
    for _ in range(n - 1):
        sizes.append(sizes[-1] + (64 + head) // 64)
    sizes.reverse()
    starts = [sum(sizes[:i]) for i in range(n)]
    for i in reversed(range(n)):
        at = first + i * (64 + head)
        fields = {
            "row_start": starts[i], "n_rows": sizes[i], "positions": [(0, sizes[i])],
            "parts": [{"tensor": 0, "row_start": starts[i], "n_rows": sizes[i], "data": data}],
        }  # fmt: skip
        payload, table = pack_table(fields)
        w.sequence = i
        record = w.header(at, SPAN, len(payload), table, h64(payload[:table]))
        made.append(record[56:64])
        data = record + payload
    made.reverse()
    w.sequence = n
    w.data += data
    tail, digest = [], bytes(16)
    for i in range(n):
        digest = h128(digest + struct.pack("<Q", sizes[i]))
        tail.append({
            "span": first + i * (64 + head), "n_tokens": 0, "row_start": starts[i], "n_rows": sizes[i], "state": 0,
            "check": made[i], "digest": digest,
        })  # fmt: skip
    w.commit({"flags": 1, "n_rows": sum(sizes), "layout": layout, "digest": digest}, tail)
    return bytes(w.data)


@case("verify")
def ten_thousand_footers_of_one_large_commit(m: Minimal) -> Any:
    """Every footer is valid and names a commit of 2 MB that does not fit: each may be read once, not each for all."""
    w = SpecWriter(2)
    w.commit({"flags": 1}, [])
    at = w.record(COMMIT, bytes(2 << 20))
    for _ in range(10_000):
        place = len(w.data)
        raw = struct.pack("<8sQQQ16sQ", bytes.fromhex("4B56454E440D0A1A"), at, 2, place + 64, bytes(16), 0)
        w.data += raw + struct.pack("<Q", h64(raw, w.salt + place))
    return bytes(w.data)


# -- section 1


@case("verify")
def padding_behind_a_record_set(m: Minimal) -> Any:
    w = m.writer()
    place = m.places["note"] + 64 + len(json.dumps(m.note))
    w.data[place] = 1
    return bytes(w.data)


@case("verify")
def padding_between_parts_set(m: Minimal) -> Any:
    m.span["part_padding"] = b"\1"


@case("FormatError")
def json_with_a_byte_order_mark(m: Minimal) -> Any:
    m.note = b"\xef\xbb\xbf" + json.dumps({"metadata": {}}).encode()


@case("FormatError")
def commit_more_tokens_than_positions(m: Minimal) -> Any:
    m.span |= {"n_rows": 2, "positions": [(0, 2)]}
    for number in (0, 1):
        m.part(number).update(n_rows=2, data=m.k[:, :2].tobytes())
    m.state["row_start"] = 2


# -- section 2


@case("FormatError")
def header_forked_snapshot(m: Minimal) -> Any:
    m.header["required"] = 2
    return m.build()


@case("FormatError")
def header_forked_without_base(m: Minimal) -> Any:
    m.use, m.header["required"], m.commit["flags"] = 2, 2, 1
    return m.build()


@case("DamagedError")
def header_encrypted_without_key(m: Minimal) -> Any:
    m.header["required"] = 1
    return m.build()


@case("VersionError")
def header_encrypted_session(m: Minimal) -> Any:
    m.use, m.header["required"], m.commit["flags"] = 2, 1, 1
    return m.build()


@case("DamagedError")
def header_checksum_wrong(m: Minimal) -> Any:
    data = bytearray(m.build())
    data[120] ^= 1
    return bytes(data)


# -- section 5


@case("FormatError")
def identity_config_of_numbers(m: Minimal) -> Any:
    m.identity = {"config": {"width": 4}}


@case("FormatError")
def identity_adapters_of_two(m: Minimal) -> Any:
    m.identity = {"adapters": [["a", "00"]]}


@case("FormatError")
def identity_runtime_a_list(m: Minimal) -> Any:
    m.identity = {"runtime": ["threads"]}


@case("FormatError")
def identity_tokenizer_null(m: Minimal) -> Any:
    m.identity = {"tokenizer": None}


# -- section 6


def layout_member(name: str, value: Any, *, of: str = "tensors") -> Callable[[Minimal], Any]:
    """A change of one member of the first tensor or layer."""

    def change(m: Minimal) -> None:
        m.layout[of][0][name] = value

    shown = "".join(c if c.isalnum() else "_" for c in str(value))
    change.__name__ = f"layout_{of[:-1]}_{name}_{shown}"
    return change


for _name, _value in [
    ("id", -1), ("id", 2**32), ("name", 7), ("layer", -2), ("layer", 65_537), ("growth", "shrink"), ("rope", "within"),
    ("pairing", "thirds"), ("tokens_per_row", 2**20 + 1), ("window", -1), ("window", 2**40 + 1),
    ("axes", "head row dim"), ("shape", None), ("shape", [2**40 + 1, 0, 0]), ("shape", [2, 0, 4.0]), ("row_axis", -2),
]:  # fmt: skip
    case("FormatError")(layout_member(_name, _value))
for _name, _value in [
    ("kind", "unknown"), ("num_query_heads", -1), ("num_query_heads", 2**20 + 1), ("tensors", [2**32]),
    ("tensors", {"0": 1}), ("shares", -1), ("shares", "0"), ("index", -1), ("index", False),
]:  # fmt: skip
    case("FormatError")(layout_member(_name, _value, of="layers"))


@case("FormatError")
def layout_logits_not_replaced(m: Minimal) -> Any:
    m.layout["tensors"][2] |= {"growth": "static"}
    m.state["parts"] = []
    m.part(0)
    m.span["parts"].append({"tensor": 9, "n_rows": 1, "data": m.logits.tobytes()})


@case("FormatError")
def layout_65537_tensors(m: Minimal) -> Any:
    first = m.layout["tensors"][0]
    m.layout["tensors"] += [{**first, "id": 100 + i} for i in range(65_534)]


@case("FormatError")
def layout_65537_layers(m: Minimal) -> Any:
    first = {**m.layout["layers"][0], "tensors": []}
    m.layout["layers"] += [{**first, "index": i} for i in range(1, 65_537)]


@case("FormatError")
def layout_layer_shares_one_that_shares(m: Minimal) -> Any:
    first = {**m.layout["layers"][0], "tensors": []}
    m.layout["layers"] += [{**first, "index": 1, "shares": 0}, {**first, "index": 2, "shares": 1}]


@case("FormatError")
def layout_architecture_null(m: Minimal) -> Any:
    m.layout["architecture"] = None


@case("FormatError")
def layout_without_tensors(m: Minimal) -> Any:
    del m.layout["tensors"]


@case("FormatError")
def layout_missing(m: Minimal) -> Any:
    m.commit["layout"] = 0


# -- section 7


@case("FormatError")
def span_token_start_elsewhere(m: Minimal) -> Any:
    m.span["token_start"] = 1


@case("FormatError")
def span_row_start_elsewhere(m: Minimal) -> Any:
    m.span["row_start"] = 1


@case("FormatError")
def span_row_start_beyond_32_bits(m: Minimal) -> Any:
    m.span["row_start"] = m.entry["row_start"] = 2**32


@case("FormatError")
def span_position_run_of_nothing(m: Minimal) -> Any:
    m.span["positions"] = [(0, 3), (7, 0)]


@case("FormatError")
def span_position_beyond_2_to_62(m: Minimal) -> Any:
    m.span["positions"] = [(2**62 + 1, 3)]


@case("FormatError")
def span_position_below_minus_2_to_62(m: Minimal) -> Any:
    m.span["positions"] = [(-(2**62) - 1, 3)]


@case("FormatError")
def part_behind_a_gap(m: Minimal) -> Any:
    m.part(1)["offset"] = up(64 + 16 + 16 * 3 + len(m.span["meta"])) + 2 * 64 + 256
    m.span["parts"].append({"tensor": 2, "data": bytes(64)})


@case("FormatError")
def part_bound_negative(m: Minimal) -> Any:
    m.part(0).update(flags=0, bound=-1.0)


@case("FormatError")
def part_of_two_where_no_axis_varies(m: Minimal) -> Any:
    m.state["parts"] = [{"tensor": 9, "n_rows": 2, "data": m.logits.tobytes()}]


@case("FormatError")
def part_that_starts_where_no_axis_varies(m: Minimal) -> Any:
    m.state["parts"] = [{"tensor": 9, "n_rows": 1, "row_start": 1, "data": m.logits.tobytes()}]


@case("FormatError")
def part_row_start_beyond_32_bits(m: Minimal) -> Any:
    m.part(0)["row_start"] = 2**63


@case("VersionError")
def part_codec_0(m: Minimal) -> Any:
    m.part(0)["codec"] = 0


@case("UnsupportedError")
def part_codec_q8_zstd(m: Minimal) -> Any:
    m.part(0)["codec"] = 4


@case("FormatError")
def part_of_more_than_the_row_limit(m: Minimal) -> Any:
    m.part(0)["n_rows"] = 2**31


@case("FormatError")
def state_with_rows(m: Minimal) -> Any:
    m.state |= {"n_rows": 1, "positions": [(0, 1)]}


@case("FormatError")
def state_with_an_unknown_tensor(m: Minimal) -> Any:
    m.state["parts"] = [{"tensor": 8, "n_rows": 1, "data": m.logits.tobytes()}]


# -- sections 8 and 9


@case("FormatError")
def note_without_metadata(m: Minimal) -> Any:
    m.note = {}


@case("FormatError")
def text_after_negative(m: Minimal) -> Any:
    m.span["meta"] = b'{"text":"abc","after":-1}'


@case("FormatError")
def text_after_a_fraction(m: Minimal) -> Any:
    m.span["meta"] = b'{"text":"abc","after":0.5}'


@case("FormatError")
def span_messages_that_are_no_list(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":{"role":"user"}}'


@case("FormatError")
def span_message_without_a_role(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[{"content":"a"}]}'


@case("FormatError")
def span_message_that_nests_too_deep(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[{"role":"user","content":' + b"[" * 64 + b"]" * 64 + b"}]}"


@case("FormatError")
def span_message_that_nests_without_end(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[{"role":"user","content":' + b"[" * 500_000 + b"]" * 500_000 + b"}]}"


@case("FormatError")
def span_message_with_an_infinite_number(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[{"role":"user","content":[-1e400]}]}'


@case("FormatError")
def span_messages_after_below_zero(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[],"messages_after":-1}'


@case("")
def span_messages_behind_more_than_there_are(m: Minimal) -> Any:
    m.span["meta"] = b'{"messages":[{"role":"user"}],"messages_after":1099511627776}'


@case("FormatError")
def span_meta_a_list(m: Minimal) -> Any:
    m.span["meta"] = b"[]"


@case("FormatError")
def state_token_offset_a_text(m: Minimal) -> Any:
    m.state["meta"] = b'{"sampler":null,"random":null,"token_offset":"3"}'


@case("FormatError")
def state_token_offset_null(m: Minimal) -> Any:
    m.state["meta"] = b'{"token_offset":null}'


@case("FormatError")
def state_token_offset_beyond_2_to_62(m: Minimal) -> Any:
    m.state["meta"] = json.dumps({"token_offset": 2**62 + 1}).encode()


@case("FormatError")
def sampler_top_k_beyond_its_limit(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(sampler__top_k=2**31 + 1)


@case("FormatError")
def sampler_seed_negative(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(sampler__seed=-1)


@case("FormatError")
def sampler_without_top_p(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta().replace(b'"top_p"', b'"top_q"')


@case("FormatError")
def sampler_a_list(m: Minimal) -> Any:
    m.state["meta"] = b'{"sampler":[],"random":{}}'


@case("FormatError")
def random_draws_beyond_their_limit(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(random__draws=2**63 + 1)


@case("")
def random_algorithm_of_a_newer_version(m: Minimal) -> Any:
    m.state["meta"] = sampler_meta(random__algorithm="mt19937")  # refused where a number is to be drawn


# -- sections 10 and 11


@case("FormatError")
def index_kept_of_no_index(m: Minimal) -> Any:
    m.commit["index_kept"] = 1


@case("FormatError")
def index_of_63_bytes(m: Minimal) -> Any:
    m.before.append((6, bytes(63), {}))
    m.commit["index"] = 128
    return m.build()


@case("DamagedError")
def index_that_is_a_note(m: Minimal) -> Any:
    m.before.append((NOTE, b'{"metadata":{}}', {}))
    m.commit["index"] = 128
    return m.build()


@case("FormatError")
def entry_keeps_more_tokens_than_the_span(m: Minimal) -> Any:
    m.entry["n_tokens"] = 4
    m.commit.update(n_tokens=4, n_pending=1)


@case("DamagedError")
def entry_that_is_a_layout(m: Minimal) -> Any:
    m.before.append((LAYOUT, b"{}", {}))
    m.entry["span"] = 128
    return m.build()


@case("DamagedError")
def commit_state_that_is_a_span(m: Minimal) -> Any:
    m.before.append((SPAN, bytes(64), {"table": 64}))
    m.commit["state"] = m.entry["state"] = 128
    return m.build()


@case("FormatError")
def commit_state_of_none_where_its_entry_has_one(m: Minimal) -> Any:
    m.commit["state"] = 0


@case("FormatError")
def commit_state_that_its_entry_does_not_name(m: Minimal) -> Any:
    m.entry["state"] = 0


@case("FormatError")
def commit_number_0(m: Minimal) -> Any:
    m.commit["number"] = 0


@case("FormatError")
def commit_operation_0(m: Minimal) -> Any:
    m.commit["operation"] = 0


@case("FormatError")
def commit_token_offset_beyond_2_to_62(m: Minimal) -> Any:
    m.commit["token_offset"] = 2**62 + 1


@case("FormatError")
def commit_more_pending_than_tokens(m: Minimal) -> Any:
    m.commit.update(n_pending=2**31)


@case("FormatError")
def commit_of_191_bytes(m: Minimal) -> Any:
    return raw_commit(m, bytes(191))


@case("FormatError")
def commit_of_half_an_entry(m: Minimal) -> Any:
    w = m.writer()
    at = m.places["commit"]
    return raw_commit(m, bytes(w.data[at + 64 : at + 64 + 192 + 32]))


def raw_commit(m: Minimal, payload: bytes) -> bytes:
    """The file with another payload of its COMMIT, and a footer that fits."""
    w = m.writer()
    at = m.places["commit"]
    del w.data[at:]
    w.sequence -= 1
    w.record(COMMIT, payload)
    place, digest = len(w.data), h128(bytes(w.data[at : at + 64]) + payload)
    raw = struct.pack("<8sQQQ16sQ", bytes.fromhex("4B56454E440D0A1A"), at, 1, place + 64, digest, 0)
    return bytes(w.data + raw + struct.pack("<Q", h64(raw, w.salt + place)))


@case("verify")
def commit_that_follows_a_sealed_one(m: Minimal) -> Any:
    m.use = 2
    w = m.writer()
    return second_commit(w, m.places["commit"], 1)


@case("FormatError")
def commit_that_follows_that_of_a_snapshot(m: Minimal) -> Any:
    w = m.writer()
    return second_commit(w, m.places["commit"], 3)


@case("verify")
def commit_of_a_snapshot_that_hides_one_before(m: Minimal) -> Any:
    w = m.writer()
    w.commit({"operation": 3}, [])
    return bytes(w.data)


def second_commit(w: SpecWriter, first: int, flags: int) -> bytes:
    w.commit(
        {"number": 2, "previous": first, "previous_digest": w.digest_of(first), "operation": 3, "flags": flags}, []
    )
    return bytes(w.data)


# -- section 15


@case("FormatError")
def json_over_64_megabytes(m: Minimal) -> Any:
    m.identity = b"{" + b" " * (64 << 20) + b"}"


# -- sections 16 and 17: the size is what a writer writes; newer minor versions, optional features and members are read


@case("")
def header_newer_minor_version(m: Minimal) -> Any:
    m.header["minor"] = 7


@case("")
def header_unknown_optional_feature(m: Minimal) -> Any:
    m.header["optional"] = 1 << 63


@case("")
def json_with_unknown_members(m: Minimal) -> Any:
    m.layout["more"] = m.layout["tensors"][0]["more"] = m.layout["layers"][0]["more"] = [1]
    m.state["meta"] = b'{"more":1}'
    m.note["more"] = {}


# -- running them


def every_way() -> dict[str, Callable[[Path], None]]:
    """All ways to look at a file."""
    import numpy as np

    from kvsnap.errors import KvsnapError
    from kvsnap.filing import repair
    from kvsnap.formats import native
    from kvsnap.inspection import summarise, verify
    from kvsnap.session import Session

    def key_of(path: Path) -> bytes | None:
        return hostile_files.USER_KEY if path.parent.name.startswith("key_") else None

    def read(path: Path, mmap: bool, into: bool) -> None:
        snapshot = native.load(path, mmap=mmap, key=key_of(path))
        for tensor_ in [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]:
            if into:
                tensor_.read_into(np.empty(tensor_.shape, dtype=tensor_.array.dtype))
            else:
                assert tensor_.array.nbytes == tensor_.nbytes
        for layer in range(snapshot.num_layers):
            snapshot.head(layer, 0)
        repr(snapshot)

    def history(path: Path) -> None:
        with Session.open(path, readonly=True) as session:
            assert session.history
            assert session.tokens is not None

    def again(path: Path) -> None:
        native.loads(native.dumps(native.loads(path.read_bytes())))

    def rewind(path: Path) -> None:
        with Session.open(path) as session:
            for n in range(session.n_tokens - 1, -1, -1):
                session.truncate(n)
                session.load()

    def checked(path: Path) -> None:
        report = verify(path, key=key_of(path))
        if report.damages:
            raise KvsnapError("verify: " + "; ".join(str(d) for d in report.damages[:9]))

    def repaired(path: Path, keep_tokens: bool) -> None:
        out = path.with_name("out")
        try:
            report = repair(path, out, keep_tokens=keep_tokens)
            assert verify(out).damages == ()
            assert report.nbytes <= 4 * path.stat().st_size + (64 << 10), "a small file makes a large one"
        finally:
            out.unlink(missing_ok=True)

    return {
        "read": lambda p: read(p, False, False),
        "mapped": lambda p: read(p, True, False),
        "into": lambda p: read(p, False, True),
        "mapped into": lambda p: read(p, True, True),
        "summarise": lambda p: str(summarise(p, key=key_of(p)).to_dict()) and None,
        "verify": checked,
        "verify without a key": lambda p: str(verify(p).to_dict()) and None,
        "repair": lambda p: repaired(p, False),
        "repair with ids": lambda p: repaired(p, True),
        "history": history,
        "again": again,
        "rewind": rewind,
    }


def attack(directory: Path) -> None:
    """Open the file `a` of every directory in every way; write what came of it as JSON lines; a process of its own."""
    import resource

    from kvsnap import files
    from kvsnap.errors import KvsnapError

    ways = every_way()
    files.system.sync = lambda *_a, **_k: None  # type: ignore[assignment] # thousands of files, none worth a sync
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for path in sorted(directory.glob("*/a")):
        for way, run in ways.items():
            start = time.perf_counter()
            try:
                run(path)
                outcome: dict[str, Any] = {"error": ""}
            except KvsnapError as error:
                names = [c.__name__ for c in type(error).__mro__]
                outcome = {"error": names[0], "bases": names, "message": str(error), "offset": error.offset}
            except BaseException as error:  # noqa: BLE001 # what must not come out is what is looked for
                outcome = {"error": type(error).__name__, "bases": [], "message": repr(error)[:300], "offset": None}
            print(
                json.dumps({"file": path.parent.name, "way": way, "s": time.perf_counter() - start} | outcome),
                flush=True,
            )


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("hostile")
    for name, (make, _) in EVERY.items():
        made: Any = make()
        for number, data in enumerate(made if isinstance(made, list) else [made]):
            place = directory / f"{name}.{number}"
            place.mkdir()
            for file, raw in (data if isinstance(data, dict) else {"a": data}).items():
                (place / file).write_bytes(raw)
    done = subprocess.run(
        [sys.executable, __file__, str(directory)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in EVERY}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found[row["file"].split(".")[0]].append(row)
    rows = [row for each in found.values() for row in each]
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    tell = reporter.write_line if reporter else print
    for way in ("read", "verify", "repair"):
        times = sorted(row["s"] for row in rows if row["way"] == way)
        tell(f"{way}: {len(times)} files, {sum(times):.2f} s in all, median {1e3 * times[len(times) // 2]:.2f} ms")
    print(
        f"{len(rows)} looks at {len(found)} rules, {sum(row['s'] for row in rows):.2f} s, {MEMORY >> 20} MB more memory"
    )
    return found


EVERY: dict[str, tuple[Callable[[], Any], str]] = {**CASES, **hostile_files.CASES}


@pytest.mark.parametrize("name", EVERY)
def test_hostile_file_is_refused(name: str, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    expected = EVERY[name][1]
    assert outcomes[name]
    for row in outcomes[name]:
        said = f"{row['way']}: {row.get('message')}"
        assert row["error"] == "" or "KvsnapError" in row["bases"], said
        reads = row["way"] in {"read", "mapped", "into", "mapped into"}
        if expected == "verify" or name == "record_of_unknown_critical_kind_in_the_way":
            # Nothing of it is on the way of a reader that loads: verify comes upon it.
            if reads or row["way"] == "verify":
                assert bool(row["error"]) == (row["way"] == "verify"), said
        elif expected and reads:
            assert expected in row.get("bases", [row["error"]]), said
            named = row["offset"] is not None or expected in {"KvsnapError", "KeyNeededError", "MissingError"}
            assert named or "this fork" in row["message"], f"no offset: {said}"
        elif row["way"] == "verify":
            assert bool(row["error"]) == bool(expected), said
            if expected in {"VersionError", "KeyNeededError"}:
                assert row["error"] == expected, said
        elif not expected and not reads and name.startswith("key_"):
            continue  # the other ways are without the key
        elif not expected:
            # A fork is a file, and nothing that bytes alone could be.
            assert row["error"] in {"", "InputError", *(["UnsupportedError"] if "fork" in name else [])}, said


def test_the_unchanged_files_are_good(tmp_path: Path) -> None:
    # Negative control: without its fault each of these files would be read.
    from kvsnap.formats import native
    from kvsnap.inspection import verify

    for number, use in enumerate((1, 2)):
        m = Minimal(use)
        m.commit["flags"] = 3 if use == 1 else 1
        path = tmp_path / f"{number}"
        path.write_bytes(m.build())
        assert native.load(path).tokens == (5, 6, 7)
        assert verify(path).ok


def test_unknown_kind_that_is_not_critical_is_stepped_over(tmp_path: Path) -> None:
    from kvsnap.formats import native
    from kvsnap.inspection import verify

    m = Minimal()
    m.before.append((77, b"what is this", {"flags": 0}))
    path = tmp_path / "a"
    path.write_bytes(m.build())
    assert native.load(path).tokens == (5, 6, 7)
    assert verify(path).ok


def session_with_commits(changes: dict[int, dict[str, Any]], n: int = 3) -> bytes:
    """A session of `n` empty commits; `changes` override fields of one of them."""
    w = SpecWriter(2)
    at, digest = 0, bytes(16)
    for number in range(1, n + 1):
        fields = {"number": number, "previous": at, "previous_digest": digest, "operation": 3, "flags": 1}
        at = w.commit(fields | changes.get(number, {}), [])
        digest = w.digest_of(at)
    return bytes(w.data)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("forward", {"previous": 2**40}),
        ("itself", {"previous": 128 + 2 * 320}),
        ("the next", {"previous": 128 + 3 * 320}),
        ("a footer", {"previous": 128 + 256}),
        ("another digest", {"previous_digest": b"\7" * 16}),
    ],
)
def test_history_that_points_astray(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from kvsnap.errors import DamagedError, FormatError
    from kvsnap.inspection import verify
    from kvsnap.session import Session

    path = tmp_path / "a"
    path.write_bytes(session_with_commits({}))
    with Session.open(path, readonly=True) as session:
        assert [t.commit for t in session.history] == [1, 2, 3]  # the control
    for number in (2, 3):
        path.write_bytes(session_with_commits({number: fields}, n=4))
        with Session.open(path, readonly=True) as session, pytest.raises((DamagedError, FormatError)):
            print(session.history)
        assert verify(path).damages


def two_turns(**state: Any) -> bytes:
    """A session of two turns; `state` are fields of the STATE of the first one."""
    m = Minimal(2)
    m.commit["flags"] = 1
    whole = dict(m.state)
    m.state |= state
    w = m.writer()
    first, at = m.places["commit"], m.places
    data = {"n_rows": 1, "row_start": 3, "data": m.k[:, :1].tobytes()}
    span = w.table(SPAN, {
        "row_start": 3, "n_rows": 1, "token_start": 3, "ids": [8], "runs": [(0, 1)], "positions": [(3, 1)],
        "parts": [{"tensor": 0} | data, {"tensor": 1} | data],
    }, commit=2)  # fmt: skip
    made = w.table(STATE, whole | {"row_start": 4}, commit=2)
    digests = [h128(bytes(16) + struct.pack("<3iQ", 5, 6, 7, 3))]
    digests.append(h128(digests[0] + struct.pack("<iQ", 8, 1)))
    rows = [(at["span"], 3, 0, 3, at["state"]), (span, 1, 3, 1, made)]
    names = ["span", "n_tokens", "row_start", "n_rows", "state"]
    tail = [
        dict(zip(names, row, strict=True)) | {"check": w.check_of(row[0]), "digest": digest}
        for row, digest in zip(rows, digests, strict=True)
    ]
    w.commit(
        {
            "number": 2, "previous": first, "previous_digest": w.digest_of(first), "flags": 1, "n_tokens": 4,
            "n_rows": 4, "token_offset": 4, "identity": at["identity"], "layout": at["layout"], "state": made,
            "note": at["note"], "digest": digests[1],
        }, tail,
    )  # fmt: skip
    return bytes(w.data)


@pytest.mark.parametrize(
    "state",
    [
        {"meta": b'{"sampler":{},"random":{}}'},
        {"meta": b'{"token_offset":null}'},
        {"meta": b"[]"},
        {"parts": [{"tensor": 8, "n_rows": 1, "data": bytes(20)}]},
        {"row_start": 2},
    ],
)
def test_an_earlier_state_that_breaks_a_rule_does_not_become_the_current_one(
    state: dict[str, Any], tmp_path: Path
) -> None:
    from kvsnap.errors import FormatError
    from kvsnap.formats import native
    from kvsnap.session import Session

    path = tmp_path / "a"
    for fields in ({}, state):  # the first is the control
        path.write_bytes(two_turns(**fields))
        before = native.load(path).tokens
        assert before == (5, 6, 7, 8)
        with Session.open(path) as session:
            if fields:
                for go in (lambda s=session: s.truncate(3), lambda s=session: s.rewind(1)):
                    with pytest.raises(FormatError):
                        go()
                assert session.load().tokens == before
            else:
                assert session.truncate(3) == 3
                logits = session.load().logits
                assert logits is not None
                assert logits.array.tolist() == np.linspace(-1, 1, 5, dtype="<f4").tolist()


if __name__ == "__main__":
    attack(Path(sys.argv[1]))
