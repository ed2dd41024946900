"""Elements of HTML escape all text that is given to them."""

from __future__ import annotations

from personafl.core.html_elements import Html, element, join_html


def test_text_is_escaped_and_html_is_not() -> None:
    assert element("p", "a < b & ", element("b", '"c"')) == "<p>a &lt; b &amp; <b>&quot;c&quot;</b></p>"
    assert join_html(["<i>", Html("<i>")]) == "&lt;i&gt;<i>"


def test_attributes_are_escaped_and_empty_ones_left_out() -> None:
    assert element("td", "1", class_='x"y', style="") == '<td class="x&quot;y">1</td>'
