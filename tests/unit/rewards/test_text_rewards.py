import pytest

from trinity_mq.rewards.text import char_match, exact_match, format_reward


@pytest.mark.parametrize(
    ("response", "truth", "finished", "accuracy"),
    [
        ("7", "7", True, 1.0),
        (" 7\n", "7", True, 1.0),
        ("7", "7", False, 0.0),
        ("77", "7", True, 0.0),
        ("7", None, True, 0.0),
    ],
)
def test_exact_match(response, truth, finished, accuracy):
    assert exact_match(response, truth, finished=finished) == {"accuracy": accuracy}


@pytest.mark.parametrize("response", ["", "2", "23", "237", "273", "2378", "999", "732"])
@pytest.mark.parametrize("finished", [True, False])
def test_char_match_is_the_measured_reward(response, finished):
    truth = "237"
    exact = response == truth and finished
    right = sum(i < len(response) and response[i] == c for i, c in enumerate(truth)) / len(truth)
    measured = 0.5 * exact + 0.5 * (0.8 * right + 0.2 * (finished and len(response) == len(truth)))
    parts = char_match(response, truth, finished=finished)
    assert sum(parts.values()) == pytest.approx(measured, abs=1e-12)
    assert parts["accuracy"] == float(exact)


def test_char_match_without_a_truth_is_zero():
    assert char_match("7", None, finished=True) == {"accuracy": 0.0, "partial_credit": 0.0}


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("so \\boxed{7}", True, 0.1),
        ("so \\boxed{7}", False, -0.1),
        ("so \\boxed{ }", True, -0.1),
        ("so 7", True, -0.1),
        ("\\boxed{\\frac{1}{2}}", True, 0.1),
    ],
)
def test_format_reward(response, finished, score):
    assert format_reward(response, None, finished=finished) == {"format_score": score}
    assert format_reward(response, None, finished=finished, score=1.0) == {"format_score": 10 * score}
