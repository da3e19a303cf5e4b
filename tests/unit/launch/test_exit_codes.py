from __future__ import annotations

import pytest

from trinity_mq.launch.exit_codes import closing_line, exit_code


@pytest.mark.parametrize(
    ("finished", "steps", "code"),
    [
        (True, 3, 0),
        (True, None, 0),  # a trainer elsewhere may have reported to nobody here
        (True, 0, 4),
        (False, 3, 3),
        (False, 0, 4),
        (False, None, 4),
    ],
)
def test_the_code_tells_what_was_trained(finished: bool, steps: int | None, code: int) -> None:
    assert exit_code(finished=finished, steps=steps) == code
    line = closing_line(code, "trinity-mq run x.yaml", finished=finished)
    assert (line is None) == (code == 0)
    assert line is None or f"(exit code {code})" in line


def test_a_finished_run_is_not_resumed() -> None:
    assert "same command" not in str(closing_line(4, "trinity-mq run x.yaml", finished=True))
    assert closing_line(130, "trinity-mq run x.yaml", finished=False) == (
        "not finished (exit code 130); resume with the same command: trinity-mq run x.yaml"
    )


def test_the_same_command_is_no_advice_where_it_would_fail_again() -> None:
    assert "resume with the same command" not in str(closing_line(3, "trinity-mq run x", finished=False, curable=False))
