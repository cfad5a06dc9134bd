from shared.wording import counted


def test_numbers_in_sentences() -> None:
    assert counted(1, "request") == "1 request"
    assert [counted(n, "copy", "copies") for n in (0, 1, 2)] == ["0 copies", "1 copy", "2 copies"]
