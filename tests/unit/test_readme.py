from pathlib import Path

from tritone.options import markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_option_table_is_that_of_the_code() -> None:
    text = README.read_text()
    table = text.split("by a test -->\n")[1].split("\n<!-- options end -->")[0]
    assert table == markdown_table()
