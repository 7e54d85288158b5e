"""Names of sessions: a table of what is legal and what is not, and names that look alike."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.errors import InputError
from kvsnap.library.names import check_free, check_name, likeness

LEGAL = [
    "chat", "a", "a b", "a.b", "v1.2.3", "with-dash_and+plus", "notes@home", "100%", "(draft)", "it's", "#1", "~x",
    "\u0437\u0430\u043c\u0435\u0442\u043a\u0438", "\u304a\u904a\u3073", "\u00fc",
    "\u65e5\u672c\u8a9e\u3002\u7b2c\u4e00", "\u03a9mega", "\u30ce\u30fc\u30c8", "caf\u00e9", "\U0001f600", "a\u3000b",
    "console", "com", "com10", "nullable", "x" * 200, "\u00fc" * 100, "\u0644\u063a\u0629", "na\u00efve \u2014 draft",
]  # fmt: skip

ILLEGAL = [
    # places
    "", ".", "..", "...", "a/b", "/etc/x", "../x", "a\\b", "C:", "a:b", "a|b", "a?b", "a*b", "a<b", "a>b", 'a"b',
    # characters that are not seen
    "a\0b", "\0", "a\nb", "a\tb", "a\x1b[31m", "a\x7f", "a\x85b", "a\u200bb", "a\u200db", "a\u202eb", "\u2066a",
    "a\ufeff", "a\u00adb", "a\u2028b", "a\u2029b", "a\u034fb", "a\u3164b", "a\ufe0f", "a\U000e0041", "a\u2800b",
    "a\u180eb", "a\U000e0100",
    # at the ends
    " a", "a ", ".a", "a.", "-a", "--help", "@a", "\uff20a", "\uff0da", "a\u3000", "\u3000a", "\u0301a",
    # blanks that are none
    "a\u00a0b", "a\u2003b", "a\u202fb",
    # devices
    "CON", "con", "nul", "NUL.txt", "aux.kvsnap", "COM1", "com9.x", "LPT3", "com\u00b9", "con .txt", "CONIN$", "PRN",
    "\uff23\uff2f\uff2e",
    # look-alikes
    "a\u2215b", "a\u2044b", "a\u29f8b", "a\uff0fb", "a\uff3cb", "\u2024\u2024", "a\u2024b", "\ufe52", "\uff0e\uff0e",
    "\u2025", "a\u2026", "a\uff1ab", "a\uff1fb", "a\uff0ab", "\u2100", "\u00bd", "a\u2571b", "a\u2216b", "a\u0338b",
    # not text
    "a\ud800", "\udcff", "\ue000", "\uf8ff", "\u0378", "\U0010ffff", "\ufdd0",
    # too long, not composed
    "x" * 201, "\u00fc" * 101, "e\u0301", "\u212b",
]  # fmt: skip


@pytest.mark.parametrize("name", LEGAL, ids=ascii)
def test_legal_names_pass_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ILLEGAL, ids=ascii)
def test_illegal_names_are_refused_with_a_message_that_can_be_printed(name: str) -> None:
    with pytest.raises(InputError) as refused:
        check_name(name)
    assert str(refused.value).encode("ascii", "strict")


@pytest.mark.parametrize("name", [None, 3, b"a", Path("a")], ids=repr)
def test_what_is_no_text_is_no_name(name: object) -> None:
    with pytest.raises(InputError, match="text"):
        check_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "other"),
    [("A", "a"), ("chat", "Chat"), ("STRASSE", "stra\u00dfe"), ("\uff21", "a"), ("\ufb01n", "fin"), ("a\u3000b", "a b"),
     ("\u03a3", "\u03c2"), ("chat1", "chat\u2460")],
)  # fmt: skip
def test_a_name_that_looks_like_another_is_refused_by_that_name(name: str, other: str) -> None:
    assert check_free(name, ["quite another"]) == name
    with pytest.raises(InputError) as refused:
        check_free(name, ["quite another", other])
    assert other in str(refused.value)


def test_the_same_name_is_taken_and_others_are_free() -> None:
    with pytest.raises(InputError, match="already"):
        check_free("a", ["a"])
    assert check_free("\u0430", ["a"]) == "\u0430"  # Cyrillic


@given(st.text(max_size=12))
def test_whatever_passes_is_one_safe_file_name(text: str) -> None:
    try:
        name = check_name(text)
    except InputError:
        return
    for form in (name, unicodedata.normalize("NFKC", name), unicodedata.normalize("NFD", name)):
        assert not set(form) & set('/\\:\0<>"|?*')
        assert form.strip(" .") == form
    assert Path(name).name == name
    assert 0 < len(name.encode()) <= 200
    assert likeness(likeness(name)) == likeness(name)
