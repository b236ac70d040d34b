"""The reward curve: on disk point by point, read back as written, a picture that parses."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.demo.curve import Curve, Point, format_csv, format_svg, read_csv

POINTS = [Point(1, 70.0, 64, 0.25), Point(2, 130.5, 96, 0.375), Point(3, 200.25, 96, 0.5)]
SVG = "{http://www.w3.org/2000/svg}"


def test_every_point_is_on_disk_at_once(tmp_path):
    curve = Curve(tmp_path / "out")
    for count, point in enumerate(POINTS, 1):
        curve.add(point)
        assert len(read_csv((tmp_path / "out" / "curve.csv").read_text())) == count


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10_000)),
        max_size=20,
    )
)
def test_the_table_is_read_back_as_written(rows):
    points = [Point(policy, tenths / 10, n, reward / 10_000) for policy, tenths, n, reward in rows]
    assert read_csv(format_csv(points)) == points


@pytest.mark.parametrize("text", ["", "policy,seconds\n1,2\n", "policy,seconds,rollouts,reward\n1,2,x,0\n"])
def test_another_table_is_refused(text):
    with pytest.raises(ValueError):
        read_csv(text)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_picture_has_a_dot_for_every_point_within_its_frame(count):
    root = ET.fromstring(format_svg(POINTS[:count], "a < b & c", (0.2, 0.6)))
    _, _, width, height = map(float, root.get("viewBox").split())
    dots = root.findall(f"{SVG}circle")
    assert len(dots) == count
    for dot in dots:
        assert 0 < float(dot.get("cx")) < width
        assert 0 < float(dot.get("cy")) < height
    heights = [float(dot.get("cy")) for dot in dots]
    assert heights == sorted(heights, reverse=True)  # more reward is further up
    assert next(text.text for text in root.iter(f"{SVG}text")) == "a < b & c"
