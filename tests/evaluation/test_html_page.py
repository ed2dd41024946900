"""A page of its own has its title twice, and escapes text that is no HTML."""

from __future__ import annotations

from personafl.core.html_elements import element
from personafl.evaluation.html_page import page


def test_a_page_has_its_title_and_the_parts_of_its_body_in_lines() -> None:
    text = page("a < b", "p { color: red }", element("p", "one"), "", "<two>")
    assert "<title>a &lt; b</title><style>p { color: red }</style>" in text
    assert text.endswith("<body>\n<h1>a &lt; b</h1>\n<p>one</p>\n&lt;two&gt;\n</body></html>\n")
