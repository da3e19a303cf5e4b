"""A run's report as one self-contained HTML page."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.observability.report.curves import as_svg, drawn_pictures
from trinity_mq.observability.report.evaluations import evaluation_table
from trinity_mq.observability.report.text import distinct, load_failures, loss_counts, make_report, metric_curve
from trinity_mq.telemetry import LINE_FIELDS, METRICS_FILE, mask_passwords, read_metrics
from trinity_mq.terminal import write_output

LIBRARIES = ("trinity-mq", "torch", "transformers", "vllm")
TEMPLATE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ config.name }}</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: right; vertical-align: top }
th { font-weight: 600 } .words td, .words th, th:first-child { text-align: left } tbody tr { border-top: 1px solid #8884 }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1.5rem }
figure { margin: 0 } figcaption { font-weight: 600 } figcaption small { font-weight: 400; opacity: .7 }
svg { width: 100%; height: auto } pre { overflow-x: auto; font-size: 13px } .scroll { overflow-x: auto }
</style>
<h1>{{ config.name }}</h1>
<table class="words">
{% for name, text in facts %}<tr><th>{{ name }}</th><td>{{ text }}</td></tr>
{% endfor %}</table>
{% if pictures %}<h2>Curves</h2>
<div class="pictures">
{% for title, about, svg in pictures %}<figure><figcaption>{{ title }} <small>{{ about }}</small></figcaption>{{ svg|safe }}</figure>
{% endfor %}</div>
{% endif %}{% if table.rows %}<h2>Evaluations</h2>
<div class="scroll"><table>
<thead><tr><th>step</th>{% for taskset, figure in table.columns %}<th>{{ taskset }}<br>{{ figure }}</th>{% endfor %}</tr></thead>
<tbody>{% for step, row in table.rows.items() %}<tr><td>{{ step }}</td>{% for value in row %}<td>{{ "-" if value is none else "%.3f"|format(value) }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endif %}<h2>Lost</h2>
{% if losses or failures %}<ul>{% for words, count in losses.items() %}<li>{{ count }} {{ words }}</li>{% endfor %}
{% for line in failures %}<li>{{ line }}</li>{% endfor %}</ul>{% else %}<p>Nothing.</p>{% endif %}
<details><summary>Configuration</summary><pre>{{ settings }}</pre></details>
<details><summary>Last value of every metric</summary><table class="words">
{% for name, step, value in last %}<tr><td>{{ name }}</td><td>{{ "%.6g"|format(value) }}</td><td>step {{ step }}</td></tr>
{% endfor %}</table></details>
</html>
"""  # noqa: E501


def page(config: Config) -> str:
    """Return the report of a run as HTML, made from the run's folder.

    Raises:
        CommandError: The run has no metrics, or a library is not installed.
    """
    folder = config.path
    all_lines = read_metrics(folder / METRICS_FILE)
    if not all_lines:
        raise CommandError(f"run {config.name!r} has no metrics yet in {folder / METRICS_FILE}")
    lines = distinct(all_lines)
    names = sorted({name for line in lines for name in line if name not in LINE_FIELDS})
    curves = {name: points for name in names if (points := metric_curve(lines, name))}
    pictures = [
        (picture.title, picture.about, as_svg(chosen, number))
        for number, (picture, chosen) in enumerate(drawn_pictures(curves))
    ]
    text: str = _template().render(
        config=config,
        facts=_facts(config, folder),
        pictures=pictures,
        table=evaluation_table(lines),
        losses=loss_counts(lines),
        failures=[failure.line() for failure in load_failures(folder)],
        settings=_settings(config),
        last=[(name, *points[-1]) for name, points in curves.items()],
    )
    return text


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise CommandError(f"the page needs jinja2 ({error}): pip install 'trinity-mq[report]'") from error
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE)


def _facts(config: Config, folder: Path) -> list[tuple[str, str]]:
    head = make_report(config.name, folder, config.mode).splitlines()[0].partition(": ")[2]
    model = config.model.model_path or "a tiny model made for the run"
    return [
        ("did", head),
        ("mode", config.mode),
        ("algorithm", config.algorithm.algorithm_type),
        ("model", model),
        ("folder", str(folder.absolute())),
        ("made with", ", ".join(_versions())),
    ]


def _versions() -> list[str]:
    versions = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return versions


def _settings(config: Config) -> str:
    return mask_passwords(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False))


REPORT_FILE = "report.html"


def write_report(config: Config, out: Path | None = None) -> Path:
    """Write the report of a run and return its file.

    Raises:
        CommandError: The run has no metrics, a library is not installed, or the file cannot be written.
    """
    text = page(config)
    path = out or config.path / REPORT_FILE
    write_output(path, text)
    return path
