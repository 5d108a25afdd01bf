"""What every module may need: JSON that somebody may have damaged is refused with the file and the field."""

from pathlib import Path

import pytest

from nanochat.common import read_json

SHAPE = {"step": int, "ranks": [{"pid": int, "start": (str, None)}], "rate": float}
WHOLE = '{"step": 1, "ranks": [{"pid": 2, "start": null}], "rate": 3, "more": []}'


def test_a_value_of_the_right_shape_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(WHOLE)
    assert read_json(path, SHAPE) == read_json(path) == {
        "step": 1, "ranks": [{"pid": 2, "start": None}], "rate": 3, "more": []}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json", SHAPE)


@pytest.mark.parametrize("text, said", [
    (WHOLE[:-1], "not valid JSON"), ("\xff", "not valid JSON"), ("[" * 100_000, "nested too deep"),
    ('{"a": ' * 100_000, "nested too deep"), ("[]", "the whole: expected an object, got a list"),
    ('{"step": 1}', "the field ranks is missing"), (WHOLE.replace("1", "true"), "step: expected a whole number, got"),
    (WHOLE.replace("2", '"2"'), r"ranks\[0\]\.pid: expected a whole number, got a text"),
    (WHOLE.replace("null", "[]"), r"ranks\[0\]\.start: expected a text or null, got a list"),
    (WHOLE.replace("3", "null"), "rate: expected a number, got null")])
def test_damaged_json_is_refused_with_file_field_and_way_out(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"a\.json: {said}.*; run it again"):
        read_json(path, SHAPE, way_out="run it again")
