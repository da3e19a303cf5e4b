"""The curves of a report: the grouping of metrics into pictures, and the pictures as SVG."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.errors import CommandError

Point = tuple[int, float]

MOST_POINTS = 300
"""Maximum points per curve. Longer curves are averaged."""
MOST_CURVES = 6
"""Maximum curves per picture."""
INK = "#010203"
"""Placeholder for the text colour of a picture. The page replaces it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Metrics that are drawn in one picture."""

    title: str
    patterns: Sequence[str]
    """Patterns of metric names, with ``*`` as wildcard."""
    about: str
    """Explanation of the picture for the reader."""


PICTURES = (
    Picture("Evaluation: accuracy", ["eval/*/accuracy/mean@*"], "on tasks that are not trained on"),
    Picture("Evaluation: pass@k", ["eval/*/pass@*"], "at least one of k answers is right"),
    Picture("Evaluation: reward", ["eval/*/reward/mean@*"], "on tasks that are not trained on"),
    Picture("Reward", ["rollout/reward/mean", "rollout/accuracy/mean"], "of the rollouts that are trained on"),
    Picture("Spread of rewards", ["reward_std_within_group"], "standard deviation in a group; 0 teaches nothing"),
    Picture(
        "Groups without spread",
        ["groups/zero_std_all_correct", "groups/zero_std_all_wrong", "rollout/zero_variance_groups"],
        "groups that give a comparison of runs no signal",
    ),
    Picture("Loss", ["actor/pg_loss", "actor/ce_loss", "actor/pair_margin", "critic/vf_loss"], "by component"),
    Picture("Entropy", ["actor/entropy"], "nats a token; a fall to 0 ends exploration"),
    Picture("Distance from the reference", ["actor/ref_kl", "advantage/kl/mean"], "nats a token"),
    Picture("Gradient norm", ["actor/grad_norm"], "before clipping"),
    Picture("Engine against trainer", ["mismatch/k3", "rollout/rollout_vs_train_logprob_diff/mean"], "near 0 is right"),
    Picture("Length of answers", ["response_length/mean", "response_length/max"], "tokens"),
    Picture("Age of data", ["sample/staleness/mean", "sample/staleness/max", "replay/age/mean"], "train steps"),
    Picture("Seconds a step", ["time/batch", "time/wait_data", "time/sync"], "where the trainer's time goes"),
)
"""Pictures of a report in order. Pictures without data are omitted."""


def drawn_pictures(curves: Mapping[str, Sequence[Point]]) -> Iterator[tuple[Picture, dict[str, list[Point]]]]:
    """Yield each picture that has data, with its curves."""
    for picture in PICTURES:
        if chosen := drawn(curves, picture):
            yield picture, chosen


def drawn(curves: Mapping[str, Sequence[Point]], picture: Picture) -> dict[str, list[Point]]:
    """Return the curves of a picture by metric name, averaged to at most :data:`MOST_POINTS` points each."""
    names = [name for pattern in picture.patterns for name in sorted(fnmatch.filter(curves, pattern))]
    all_points = {name: downsample(curves[name]) for name in dict.fromkeys(names)}
    return dict([(name, points) for name, points in all_points.items() if points][:MOST_CURVES])


def downsample(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return the finite points in step order. If there are more than ``most``, neighbours are averaged."""
    finite = sorted((step, value) for step, value in points if math.isfinite(value))
    if len(finite) <= most:
        return finite
    edges = [part * len(finite) // most for part in range(most + 1)]
    parts = [finite[start:end] for start, end in itertools.pairwise(edges)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def as_svg(curves: Mapping[str, Sequence[Point]], number: int) -> str:
    """Return a picture of curves over steps.

    Args:
        curves: Points by metric name, for at least one metric.
        number: Number of the picture in its page. It makes the SVG ids unique within the page.

    Raises:
        CommandError: Matplotlib is not installed.
    """
    with _style():
        return _embedded(_drawn(curves), number)


def _drawn(curves: Mapping[str, Sequence[Point]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.6), layout="constrained")
    axes = figure.add_subplot()
    common = _common([name.split("/") for name in curves])
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker="o" if len(points) < 20 else None, markersize=3, linewidth=1.4, label=name)
    axes.set_xlabel("step")
    axes.grid(alpha=0.2)
    if len(curves) > 1:
        axes.legend(
            ["/".join(name.split("/")[common:]) for name in curves], fontsize="small", frameon=False, labelcolor=INK
        )
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _style() -> contextlib.AbstractContextManager[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise CommandError(f"curves need matplotlib ({error}): pip install 'trinity-mq[report]'") from error
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "trinity-mq",
        "font.size": 9,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    return mpl.rc_context(style)


def _common(names: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share, without the last part of the shortest name."""
    shortest = min(len(name) for name in names)
    return next((n for n in range(shortest) if len({name[n] for name in names}) > 1), shortest - 1)


def _embedded(svg: str, number: int) -> str:
    """Return an SVG file as an HTML element with page-unique ids."""
    body = svg[svg.index("<svg") :].replace(INK, "currentColor")
    names = set(re.findall(r'\bid="([^"]+)"', body))
    pattern = re.compile(r'(\bid="|href="#|url\(#)([^")]+)')
    return pattern.sub(lambda match: f"{match[1]}p{number}-{match[2]}" if match[2] in names else match[0], body)
