"""The rows of one head, shown or exported: head."""

from __future__ import annotations

import re
from typing import Any

import click
import numpy as np

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, no_name
from kvsnap.cli._output import emit, examples, json_option, remark, show_table, table
from kvsnap.cli._paths import check_target
from kvsnap.errors import InputError
from kvsnap.inspection.exporting import HeadTable, head_table, targets_of

__all__ = ["COMMANDS"]

Bounds = tuple[int | None, int | None]


def _rows(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Bounds:
    """Return the rows that A:B means; a callback for click. Raise `InputError`."""
    if value is None:
        return None, None
    found = re.fullmatch(r"([0-9]{1,18})?:([0-9]{1,18})?", value.strip())
    if found is None:
        raise InputError("not a range of rows", expected="A:B, A: or :B, as 0:16", found=value)
    return (None if found[1] is None else int(found[1])), (None if found[2] is None else int(found[2]))


@click.command()
@click.argument("file", callback=named)
@click.argument("layer", type=int)
@click.argument("head_", metavar="HEAD", type=int)
@click.option("--role", metavar="ROLE", help="Another role than keys and values: latent, rope, index, cross_k, ...")
@click.option("--rows", metavar="A:B", callback=_rows, help="Only rows A to B (without B) of the sequence.")
@click.option(
    "-o", "--output", metavar="PATH", callback=no_name,
    help="Write x.csv or x.parquet (columns), x.npz (arrays), or x.npy (as x.k.npy and x.v.npy).",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Let -o replace a file that is there already.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap head chat.kvsnap 0 2",
    "kvsnap head chat.kvsnap 0 2 -o head.parquet",
    "kvsnap head chat.kvsnap 0 2 --rows 0:64 -o head.csv",
    "kvsnap head state.coli_kv 3 0 --role index -o index.npy",
)
def head(
    file: str, layer: int, head_: int, role: str | None, rows: Bounds, output: str | None, overwrite: bool, keys: Keys,
    as_json: bool,
) -> None:  # fmt: skip
    """Show or export the keys and values of one HEAD of one LAYER (both count from 0), or the rows of another role.

    Keys are as the model uses them, with rope applied. Values are float32. A table (.csv, .parquet) has a row for each
    row: its number, position, token id where it is known, then k_0 k_1 ... v_0 v_1 ...
    """
    if output is not None:
        for target in targets_of(output, ("k", "v") if role is None else (role,)):
            check_target(target, option="-o", overwrite=overwrite)
    elif overwrite:
        raise click.UsageError("--overwrite goes with -o")
    snapshot = kvsnap.load(file, key=keys.of(file))
    found = head_table(snapshot, layer, head_, role=role, rows=rows)
    written = () if output is None else found.save(output, overwrite=overwrite)
    stats = {name: _stats(values) for name, values in found.values.items()}
    first = next(iter(found.values.values()))
    if as_json:
        ends = found.positions
        positions = [int(ends[0]), int(ends[-1])] if ends is not None and len(ends) else []
        numbers = [int(found.rows[0]), int(found.rows[-1])] if len(found.rows) else []
        emit({"layer": layer, "head": head_, "role": role, "shape": list(first.shape), "rows": numbers,
              "positions": positions, **stats, "bound": found.bound, "written": list(written)})  # fmt: skip
        return
    _show(found, stats)
    for path in written:
        remark(f"wrote {path}")


def _show(found: HeadTable, stats: dict[str, dict[str, float | int]]) -> None:
    first = next(iter(found.values.values()))
    names = [name.replace("_", " ") for name in next(iter(stats.values()))]
    title = f"layer {found.layer}, head {found.head}: {first.shape[0]:,} rows of {first.shape[1]}"
    made = table("", *names, title=title)
    for name, row in stats.items():
        made.add_row(name, *(f"{v:,}" if isinstance(v, int) else f"{v:.5g}" for v in row.values()))
    show_table(made)
    if found.bound:
        remark(f"note: not exact: values are off by up to {found.bound:.3g}")


def _stats(values: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float | int]:
    """Return figures of the values that are numbers, and how many are none; norms of the rows without such a one."""
    fine = np.isfinite(values)
    stats: dict[str, float | int] = dict.fromkeys(("min", "max", "mean", "std", "mean_norm", "max_norm"), 0.0)
    if fine.any():
        wide = values[fine].astype(np.float64)
        stats.update(min=float(wide.min()), max=float(wide.max()), mean=float(wide.mean()), std=float(wide.std()))
    whole = values[fine.all(axis=-1)].astype(np.float64)
    if whole.size:
        norms = np.sqrt((whole * whole).sum(axis=-1))
        stats.update(mean_norm=float(norms.mean()), max_norm=float(norms.max()))
    return {**stats, "not_finite": int(values.size - fine.sum())}


COMMANDS = (head,)
