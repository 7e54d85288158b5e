"""The command that looks at the attention of a prompt: attention."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np

import kvsnap
from kvsnap.attention import AttentionSnapshot, HeadFigures, LayerAttention
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import adapter_option, choose_model, model_options, open_engine, refusing
from kvsnap.cli._names import count_as_use, library_option, named, no_name
from kvsnap.cli._output import count, emit, examples, json_option, show_table, size, table
from kvsnap.cli._run import accept_option, chat_option, ids_of, ids_option, prompt_of
from kvsnap.cli._turn import restored
from kvsnap.errors import InputError, MissingError
from kvsnap.protocols import Engine

__all__ = ["COMMANDS"]

_SHOWN = 12
"""Rows that a head's last query looks at most, which are shown."""
_FIGURES = ("entropy", "first", "distance", "key_norm", "query_norm")


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", metavar="PATH", help="Read the prompt from a file (- for stdin).")
@ids_option
@chat_option
@click.option(
    "--after", metavar="FILE", callback=named, help="Restore a snapshot or a session first; PROMPT comes behind it."
)
@accept_option
@click.option(
    "--layer", "layers", type=int, multiple=True, metavar="N",
    help="Look at this layer only, and show each of its heads; repeatable.",
)  # fmt: skip
@click.option("--head", type=int, metavar="N", help="Show what the last token looks at by this query head of --layer.")
@click.option(
    "--last", type=int, default=64, show_default=True, metavar="N",
    help="Take figures, queries and weights of so many tokens at the end; 0: of all.",
)  # fmt: skip
@click.option("--weights", is_flag=True, help="Put the weights into --npz, or of the heads that are shown into --json.")
@click.option("--values", is_flag=True, help="Put the values into --npz, too.")
@click.option("--npz", metavar="FILE", callback=no_name, help="Write keys and queries to a file for numpy.load.")
@click.option("--overwrite", is_flag=True, help="Replace FILE when it is there already.")
@model_options
@adapter_option
@library_option
@key_options()
@json_option
@examples(
    'kvsnap attention "The cat sat on the mat because it was tired."',
    'kvsnap attention "And what was its name?" --after story.kvsnap',
    'kvsnap attention "The cat sat on the mat because it was tired." --layer 4 --head 0',
    "kvsnap attention --prompt-file report.txt --layer 4 --weights --npz report.npz",
)
def attention(
    prompt: str | None, prompt_file: str | None, prompt_ids: str | None, chat: bool, after: str | None,
    accept: tuple[str, ...], layers: tuple[int, ...], head: int | None, last: int, weights: bool, values: bool,
    npz: str | None, overwrite: bool, model: str | None, dtype: str | None, attention: str | None, keys: Keys,
    as_json: bool,
) -> None:  # fmt: skip
    """Evaluate PROMPT and show what each layer and head of the model attends to.

    Figures are means over the tokens at the end (--last) and, for a layer, over its query heads: entropy of the weights
    in bits, the share of the first token (many heads rest on it), the share of a learned sink, how many tokens back a
    head looks, and the lengths of keys and queries. Keys and queries are those that are compared with each other: after
    RoPE, without the scaling.
    """
    given = prompt_of(prompt, prompt_file, prompt_ids, chat=chat, needed=True)
    _check(layers, head, last, weights=weights, values=values, npz=npz, as_json=as_json)
    if npz is not None:
        _check_target(npz, overwrite=overwrite)
    name, engine = _engine(after, model, dtype, attention, accept, keys)
    found = kvsnap.inspect_attention(
        engine, ids_of(engine, given, chat=chat), behind=after is not None, weights=True, values=values,
        layers=layers or None, last=last or None,
    )  # fmt: skip
    if head is not None:
        found.weights(layers[0], head)  # an unknown head is told before anything is written
    written = None if npz is None else kvsnap.save_attention(found if weights else _without_weights(found), npz)
    if as_json:
        emit({**_data(found, head, weights=weights and npz is None), "model": name, "npz": npz})
        return
    _print(found, engine, layers, head)
    if npz is not None and written is not None:
        print(f"{npz}: {size(written)}")


def _engine(
    after: str | None, model: str | None, dtype: str | None, attention: str | None, accept: Sequence[str], keys: Keys
) -> tuple[str, Engine]:
    """Return the name of the model, and an engine that holds what the file holds, if one is given."""
    if after is None:
        chosen = choose_model(model, {})
        return chosen.name, open_engine(chosen.name, dtype, attention)
    snapshot = kvsnap.load(after, key=keys.of(after))
    count_as_use(after)
    with refusing(choose_model(model, snapshot.metadata)) as chosen:
        engine = open_engine(chosen.name, dtype, attention, snapshot.identity)
        restored(snapshot, engine, accept, None)
    return chosen.name, engine


def _check(
    layers: Sequence[int], head: int | None, last: int, *, weights: bool, values: bool, npz: str | None, as_json: bool
) -> None:
    if head is not None and len(layers) != 1:
        raise click.UsageError("--head is one of a layer: name it with one --layer")
    if last < 0:
        raise InputError("--last is too small", expected="0 or more", found=last)
    if weights and npz is None and not as_json:
        raise click.UsageError("--weights go into --npz or --json")
    if values and npz is None:
        raise click.UsageError("--values go into --npz")


def _check_target(path: str, *, overwrite: bool) -> None:
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise MissingError("no such directory to write to", path=directory)
    if os.path.lexists(path) and not overwrite:
        raise InputError("there is a file of this name: use another name, or --overwrite to replace it", path=path)


def _without_weights(found: AttentionSnapshot) -> AttentionSnapshot:
    bare = [tuple(replace(layer, weights=None) for layer in layers) for layers in (found.layers, found.cross)]
    return replace(found, layers=bare[0], cross=bare[1])


# -- as data ---------------------------------------------------------------------------------------------------------


def _data(found: AttentionSnapshot, head: int | None, *, weights: bool) -> dict[str, Any]:
    return {
        "architecture": found.architecture,
        "num_layers": found.num_layers,
        "num_heads": found.num_heads,
        "num_query_heads": found.num_query_heads,
        "seq_len": found.seq_len,
        "head_dim": found.head_dim,
        "tokens": list(found.tokens),
        "query_rows": found.query_rows.tolist(),
        "layers": [_layer_data(found, layer, head, cross=False, weights=weights) for layer in found.layers],
        "cross": [_layer_data(found, layer, head, cross=True, weights=weights) for layer in found.cross],
    }


def _layer_data(
    found: AttentionSnapshot, layer: LayerAttention, head: int | None, *, cross: bool, weights: bool
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "index": layer.index, "kind": layer.kind, "missing": layer.missing or None, "num_heads": layer.num_heads,
        "num_query_heads": layer.num_query_heads, "head_dim": layer.head_dim, "first_row": layer.first_row,
        "window": layer.window, "scaling": layer.scaling, "shares": layer.shares, "heads": [],
    }  # fmt: skip
    if layer.missing:
        return data
    for figures in found.figures(layer.index, cross=cross):
        if head is None or figures.head == head:
            shown = {"weights": found.weights(layer.index, figures.head, cross=cross).tolist()} if weights else {}
            data["heads"].append({**figures.to_dict(), **shown})
    return data


# -- for people ------------------------------------------------------------------------------------------------------


def _print(found: AttentionSnapshot, engine: Engine, layers: Sequence[int], head: int | None) -> None:
    print(
        f"{found.architecture}: {count(found.num_layers, 'layer')}, {count(found.num_query_heads, 'query head')} on "
        f"{count(found.num_heads, 'key head')} of {found.head_dim}, {count(found.seq_len, 'token')}; "
        f"figures of the last {len(found.query_rows):,}"
    )
    for cross, held in ((False, found.layers), (True, found.cross)):
        if not held:
            continue
        if cross:
            print("\nto the encoder:")
        if layers:
            for index in layers:
                _print_heads(found, index, cross=cross)
        else:
            _print_layers(found, held, cross=cross)
    if head is not None:
        _print_looks(found, engine, layers[0], head)


_COLUMNS = ("entropy", "on first", "on sink", "back", "|k|", "|q|")


def _cells(figures: Sequence[HeadFigures]) -> list[str]:
    means = {name: float(np.mean([getattr(f, name) for f in figures])) for name in (*_FIGURES, "rest")}
    return [
        f"{means['entropy']:.2f}", f"{means['first']:.1%}", f"{means['rest']:.1%}" if means["rest"] > 1e-3 else "",
        f"{means['distance']:.1f}", f"{means['key_norm']:.1f}", f"{means['query_norm']:.1f}",
    ]  # fmt: skip


def _print_layers(found: AttentionSnapshot, held: Sequence[LayerAttention], *, cross: bool) -> None:
    shown = table("layer", "kind", *_COLUMNS, "sharpest head", "most on first", right=("layer", *_COLUMNS))
    for layer in held:
        if layer.missing:
            shown.add_row(str(layer.index), layer.missing)
            continue
        figures = found.figures(layer.index, cross=cross)
        kind = f"{layer.kind} (window {layer.window})" if layer.window else layer.kind
        sharp, resting = min(figures, key=lambda f: f.entropy), max(figures, key=lambda f: f.first)
        shown.add_row(
            str(layer.index), kind, *_cells(figures), f"{sharp.head} ({sharp.entropy:.2f})",
            f"{resting.head} ({resting.first:.0%})",
        )  # fmt: skip
    show_table(shown)


def _print_heads(found: AttentionSnapshot, index: int, *, cross: bool) -> None:
    missing = (found.cross if cross else found.layers)[index].missing
    print(f"\nlayer {index}{': ' + missing if missing else ''}\n")
    if missing:
        return
    shown = table("head", "of key head", *_COLUMNS, right=("head", "of key head", *_COLUMNS))
    for figures in found.figures(index, cross=cross):
        shown.add_row(str(figures.head), str(figures.key_head), *_cells([figures]))
    show_table(shown)


def _print_looks(found: AttentionSnapshot, engine: Engine, index: int, head: int) -> None:
    """Print the rows that the last query of a head looks at most."""
    from rich.markup import escape

    layer, shares = found.layer(index), found.weights(index, head)[-1]
    print(f"\nlayer {index}, head {head}: what row {layer.query_rows[-1]} looks at\n")
    shown = table("row", "token", "weight", right=("row", "weight"))
    for place in np.argsort(-shares, kind="stable")[:_SHOWN]:
        row = layer.first_row + int(place)
        shown.add_row(str(row), escape(_piece(engine, found.tokens[row])), f"{shares[place]:.1%}")
    show_table(shown)


def _piece(engine: Engine, token: int) -> str:
    try:
        return repr(engine.detokenize([token]))
    except InputError:  # no tokenizer
        return str(token)


COMMANDS = (attention,)
