"""Comparing identities: every field can match, differ and be unknown, and the words say which and how."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from kvsnap.errors import CompatibilityError, ContextError, FormatError, InputError
from kvsnap.identity import (
    AdapterDigest,
    Compatibility,
    Identity,
    WeightDigest,
    compare,
    describe_weight,
    flatten_config,
    quantisation_text,
)
from synthetic import IDENTITY as SYNTHETIC

IDENTITY = replace(SYNTHETIC, cache_quantisation="none")

# name of the field, name in reports, another value, level
FIELDS: list[tuple[str, str, Any, str]] = [
    ("architecture", "architecture", "other", "fatal"),
    ("config", "config.rope_theta", (("num_layers", "2"), ("rope_theta", "500000.0")), "fatal"),
    (
        "weights",
        "weights: layer 0 q_proj",
        (IDENTITY.weights[0], replace(IDENTITY.weights[1], digest="f" * 32)),
        "fatal",
    ),
    ("cache_dtype", "dtype", "bfloat16", "fatal"),
    ("quantisation", "quantisation", '{"bits":4}', "fatal"),
    ("cache_quantisation", "cache_quantisation", '{"bits":4}', "fatal"),
    ("tokenizer", "tokenizer", "00" * 16, "fatal"),
    ("adapters", "adapters", (AdapterDigest("style", "cd" * 16, "1.0"),), "fatal"),
    ("chat_template", "chat_template", "00" * 16, "advice"),
    ("engine", "engine", "other", "fatal"),
    ("runtime", "runtime.threads", (("threads", "2"),), "exactness"),
]


def one(report: Compatibility, name: str) -> Any:
    return next(f for f in report.fields if f.name == name or f.name.startswith(f"{name}:"))


def test_every_field_of_an_identity_is_tested_here() -> None:
    assert {f.name for f in fields(Identity)} == {name for name, *_ in FIELDS}


def test_an_identity_matches_itself() -> None:
    report = compare(IDENTITY, IDENTITY, needed=3, limit=3)
    assert {f.verdict for f in report.fields} == {"match"}
    assert report.ok
    assert report.exact
    assert not report.refusals
    report.raise_if_refused()


@pytest.mark.parametrize(("field", "name", "value", "level"), FIELDS, ids=[f[0] for f in FIELDS])
def test_a_field_that_differs(field: str, name: str, value: Any, level: str) -> None:
    other = replace(IDENTITY, **{field: value})
    for saved, found in ((IDENTITY, other), (other, IDENTITY)):
        report = compare(saved, found)
        check = one(report, name)
        assert (check.verdict, check.level) == ("differ", level)
        assert [f.name for f in report.fields if f.verdict == "differ"] == [check.name]
        assert check.saved != check.found
        assert report.ok == (level != "fatal")
        assert report.exact == (level == "advice")
        if level != "fatal":
            report.raise_if_refused()
            continue
        accept = name.split(":", maxsplit=1)[0]
        with pytest.raises(CompatibilityError) as caught:
            report.raise_if_refused()
        assert caught.value.report is report
        assert f"accept=[{accept.split('.')[0]!r}]" in str(caught.value)
        assert check.saved in str(caught.value)
        assert check.found in str(caught.value)
        accepted = compare(saved, found, accept=(accept,))
        assert accepted.ok
        assert not accepted.exact
        assert accepted.accepted == (accept,)
        others = [f[1].split(":")[0] for f in FIELDS if f[0] != field and f[3] == "fatal"]
        assert not compare(saved, found, accept=others).ok


@pytest.mark.parametrize(("field", "name", "value", "level"), FIELDS, ids=[f[0] for f in FIELDS])
def test_a_field_that_is_unknown(field: str, name: str, value: Any, level: str) -> None:
    empty = replace(IDENTITY, **{field: getattr(Identity(), field)})
    for saved, found in ((IDENTITY, empty), (empty, IDENTITY), (empty, empty)):
        report = compare(saved, found)
        shown = name if field == "runtime" else "config" if field == "config" else name.split(":", maxsplit=1)[0]
        if field == "runtime" and saved is found:
            continue  # nobody knows it: there is nothing to compare
        assert one(report, shown).verdict == "unknown"
        # Unknown weights need to be accepted by name; other unknown fields only take the promise of exactness away.
        assert report.ok == (field != "weights")
        assert report.exact == (field not in {"architecture", "weights", "cache_dtype", "engine"})
        assert compare(saved, found, accept=("weights",)).ok


def test_the_words_are_those_promised() -> None:
    weights = (IDENTITY.weights[0], replace(IDENTITY.weights[1], digest="f" * 32))
    with pytest.raises(CompatibilityError, match="weights differ: layer 0 q_proj") as caught:
        compare(IDENTITY, replace(IDENTITY, weights=weights)).raise_if_refused()
    assert "111111111111" in str(caught.value)
    assert "ffffffffffff" in str(caught.value)
    assert str(one(compare(IDENTITY, replace(IDENTITY, cache_dtype="")), "dtype")) == (
        "dtype: unknown (saved float32, found unknown)"
    )
    report = compare(IDENTITY, replace(IDENTITY, config=(("rope_theta", "5.0"),)))
    assert "config.rope_theta differ: saved 10000.0, found 5.0" in str(report)
    missing = compare(IDENTITY, replace(IDENTITY, weights=IDENTITY.weights[:1]))
    assert "found absent" in str(missing)
    assert not missing.ok
    many = tuple(WeightDigest(f"model.layers.{i}.mlp.up_proj.weight", "float32", (1,), "0") for i in range(9))
    with pytest.raises(CompatibilityError, match="and 7 more"):
        compare(IDENTITY, replace(IDENTITY, weights=many)).raise_if_refused()


def test_a_setting_that_one_side_lacks_is_not_a_difference() -> None:
    newer = replace(IDENTITY, config=(*IDENTITY.config, ("added_later", "true")))
    assert compare(IDENTITY, newer).ok
    assert compare(newer, IDENTITY).ok


def test_accept_names_a_field_or_is_refused() -> None:
    other = replace(IDENTITY, config=(("rope_theta", "5.0"),), cache_dtype="float16")
    assert compare(IDENTITY, other, accept=("config", "dtype")).ok
    assert compare(IDENTITY, other, accept=("config.rope_theta", "dtype")).ok
    assert not compare(IDENTITY, other, accept=("config.rope", "dtype")).ok
    with pytest.raises(InputError, match="'wieghts', which is no field") as caught:
        compare(IDENTITY, other, accept=("wieghts",))
    assert "weights" in str(caught.value)


def test_what_chooses_kernels_may_stand_among_the_settings_of_an_earlier_file() -> None:
    versions = (("transformers", '"5.24.0"'),)
    kernels = ("kernels", '{"chunk_size_feed_forward": 0}')
    now = replace(IDENTITY, engine="transformers", runtime=(kernels, *versions))
    before = replace(now, config=(("chunk_size_feed_forward", "0"), *now.config), runtime=versions)
    for report in (compare(before, now), compare(now, before)):
        assert report.ok
        assert one(report, "runtime.kernels").verdict == "unknown"
    other = replace(before, config=(("chunk_size", "0"), *now.config))
    assert [f.name for f in compare(other, now).refusals] == ["config.chunk_size"], "the control"


def test_accept_takes_single_settings_and_some_of_the_weights() -> None:
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (1, 10) for p in "qk"]
    config = (("rope_parameters.factor", "2.0"), ("rope_parameters.rope_type", '"yarn"'))
    saved = Identity(
        config=config, weights=tuple(WeightDigest(n, "float32", (1,), "0") for n in names),
        quantisation='{"bits": 4, "group": 64}',
    )  # fmt: skip
    found = replace(
        saved, config=(("rope_parameters.factor", "4.0"), config[1]), quantisation='{"bits":8,"group":32}',
        weights=tuple(replace(w, digest="1") for w in saved.weights),
    )  # fmt: skip
    report = compare(saved, found)
    assert [f.name for f in report.refusals] == [
        "config.rope_parameters.factor", "quantisation.bits", "quantisation.group", "weights: layer 1 q_proj",
        "weights: layer 1 k_proj", "weights: layer 10 q_proj", "weights: layer 10 k_proj",
    ]  # fmt: skip
    assert report.to_accept == ("config", "quantisation", "weights")

    def left(*accept: str) -> list[str]:
        return [f.name for f in compare(saved, found, accept=accept).refusals]

    everything = ["config.rope_parameters.factor", "quantisation", "weights"]
    assert left(*everything) == []
    assert left("config.rope_parameters", "quantisation.bits", "weights") == ["quantisation.group"]
    assert left(*everything[:2], "weights.layer 1") == ["weights: layer 10 q_proj", "weights: layer 10 k_proj"]
    assert left(*everything[:2], "weights.layer 10", "weights.layer 1 k_proj") == ["weights: layer 1 q_proj"]
    assert "config.rope_parameters.factor" in left("config.rope_parameters.fact", *everything[1:])
    for wrong in ("adapter", "config_rope", "weights: layer 1", "quantization"):
        with pytest.raises(InputError, match="which is no field"):
            compare(saved, found, accept=(wrong,))


def test_the_same_settings_written_otherwise_are_the_same() -> None:
    saved, found = (replace(IDENTITY, quantisation=t) for t in ('{"bits": 4, "group": 8}', '{"group":8,"bits":4}'))
    assert compare(saved, found).exact
    assert not compare(saved, replace(found, quantisation='{"group":8}')).ok
    assert quantisation_text({"kind": "hqq", "bits": 4}) == '{"bits":4,"kind":"hqq"}'
    assert quantisation_text(None) == "none"
    report = compare(saved, replace(found, quantisation="none"))
    assert [f.name for f in report.refusals] == ["quantisation"]


def test_adapters_are_compared_by_content_scale_and_order() -> None:
    a, b = AdapterDigest("a", "aa" * 16, "1"), AdapterDigest("b", "bb" * 16, "2")

    def verdict(*found: AdapterDigest) -> str:
        return one(compare(replace(IDENTITY, adapters=(a, b)), replace(IDENTITY, adapters=found)), "adapters").verdict

    assert verdict(a, b) == "match"
    assert verdict(replace(a, name="x"), replace(b, name="y")) == "match", "the name decides nothing"
    for other in ((b, a), (a,), (), (a, replace(b, scale="1")), (a, replace(b, digest="cc" * 16)), (a, b, b)):
        assert verdict(*other) == "differ"


@pytest.mark.parametrize(("needed", "limit", "fits"), [(5, 5, True), (6, 5, False), (10**9, None, True)])
def test_the_context_must_hold_what_is_needed(needed: int, limit: int | None, fits: bool) -> None:
    report = compare(IDENTITY, IDENTITY, needed=needed, limit=limit)
    assert report.ok == report.context_fits == fits
    if not fits:
        with pytest.raises(ContextError, match="needs 6 positions, the context of this model holds 5"):
            report.raise_if_refused()


def test_json_and_back() -> None:
    for identity in (IDENTITY, Identity(), replace(IDENTITY, adapters=())):
        assert Identity.from_dict(json.loads(json.dumps(identity.to_dict()))) == identity
    report = json.loads(json.dumps(compare(IDENTITY, Identity()).to_dict()))
    assert not report["ok"]
    assert {f["verdict"] for f in report["fields"]} == {"unknown"}
    assert compare(IDENTITY, replace(IDENTITY, adapters=())).refusals  # no adapter is known to be none


@pytest.mark.parametrize(
    "data",
    [
        [], {"weights": {}}, {"weights": [["a"]]}, {"weights": [["a", "b", [True], "c"]]},
        {"weights": [[1, "b", [], "c"]]},
        {"config": []}, {"config": {"a": 1}}, {"adapters": 1}, {"adapters": [["a", "b"]]}, {"engine": 1},
        {"runtime": {"a": None}}, {"architecture": None},
    ],
    ids=repr,
)  # fmt: skip
def test_data_of_other_types_is_refused(data: Any) -> None:
    with pytest.raises(FormatError, match="identity"):
        Identity.from_dict(data)


def test_names_of_weights_for_people() -> None:
    for name, shown in {
        "model.layers.0.self_attn.q_proj.weight": "layer 0 q_proj",
        "model.layers.11.self_attn.q_proj.bias": "layer 11 self_attn.q_proj.bias",
        "transformer.h.3.attn.c_attn.weight": "layer 3 c_attn",
        "gpt_neox.layers.2.attention.dense.weight": "layer 2 dense",
        "model.embed_tokens.weight": "embed_tokens",
        "lm_head.weight": "lm_head",
        "model.rotary_emb.inv_freq": "rotary_emb.inv_freq",
        "model.layers.0.self_attn.indexer.k_norm.weight": "layer 0 indexer.k_norm",
        "model.layers.3.mlp.experts.7.up_proj.weight": "layer 3 experts.7.up_proj",
        "model.decoder.layers.1.self_attn.k_proj.weight": "decoder layer 1 k_proj",
        "model.encoder.layers.1.self_attn.k_proj.weight": "encoder layer 1 k_proj",
        "model.language_model.layers.1.self_attn.k_proj.weight": "layer 1 k_proj",
    }.items():
        assert describe_weight(name) == shown


def test_a_config_is_flattened_to_names_and_canonical_text() -> None:
    config = {"b": {"y": 1, "x": [1, {"k": None}]}, "a": "text", "skip": 1, "empty": {}}
    assert flatten_config(config, skip=("skip",)) == (
        ("a", '"text"'), ("b.x", '[1, {"k": null}]'), ("b.y", "1"), ("empty", "{}"),
    )  # fmt: skip
