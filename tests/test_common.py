"""What every module may need: the command line of all scripts."""

import pytest

from nanochat.common import Parser


def parser() -> Parser:
    p = Parser(prog="tool", instead={"--resume-from-step": "say --resume=PATH"})
    p.add_argument("--input-dir", help="where text is")
    p.add_argument("--depth", type=int, default=20, help="layers")
    p.add_argument("--fast", action="store_true", help="without care")
    return p


def test_underscores_are_dashes_in_names_and_stay_in_values() -> None:
    found = parser().parse_args(["--input_dir=a_b", "--depth", "4"])
    assert (found.input_dir, found.depth) == ("a_b", 4)


@pytest.mark.parametrize("argv, told", [
    (["--dept=4"], "error: --dept: did you mean --depth? (all flags: --help)"),
    (["--input", "x"], "error: --input: did you mean --input-dir?"),
    (["--zeal"], "error: --zeal: there is no such flag"),
    (["--resume-from-step=7"], "error: --resume-from-step: say --resume=PATH"),
    (["--depth=four"], "error: argument --depth: invalid int value: 'four'")])
def test_what_is_wrong_is_one_line_with_what_was_meant(argv: list[str], told: str,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(argv)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(told) and said.count("\n") == 1


def test_flags_of_subcommands_are_suggested_too(capsys: pytest.CaptureFixture[str]) -> None:
    p = Parser()
    p.add_subparsers(dest="command").add_parser("rows").add_argument("--text")
    assert p.parse_args(["rows", "--text=x"]).text == "x"
    with pytest.raises(SystemExit):
        p.parse_args(["rows", "--txet=x"])
    assert "did you mean --text?" in capsys.readouterr().err


def test_help_shows_defaults_and_no_empty_ones() -> None:
    told = " ".join(parser().format_help().split())
    assert "layers (default: 20)" in told and "where text is (" not in told and "without care (" not in told
