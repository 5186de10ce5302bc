from lincorr_lightning.results.tables import markdown_table


def test_markdown_escapes_text_and_rounds_numbers() -> None:
    table = markdown_table(["a|b", "r"], [["x_*y*", 0.98765], [None, 3], ["two\nlines", 1.0]])
    assert table.splitlines() == [
        r"| a\|b | r |",
        "| --- | --- |",
        r"| x\_\*y\* | 0.988 |",
        "|  | 3 |",
        "| two lines | 1.000 |",
    ]
