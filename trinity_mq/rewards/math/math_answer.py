r"""Reward 1 for the right number, wherever a response states it."""

from __future__ import annotations

from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.rewards.ground_truth import BOOLEANS, accept_any_truth_type
from trinity_mq.rewards.math.answers import extract_answer, truth_answer
from trinity_mq.rewards.math.grammar import reads_as_words


@accept_any_truth_type
def math_answer(response: str, truth: str | None, *, finished: bool, prompt_end: str | None = None) -> dict[str, float]:
    r"""Return accuracy 1 if the number that ``response`` states after its thoughts equals the number of ``truth``
    exactly, else 0.

    A response states its answer in the last ``\boxed{}`` or ``<answer></answer>``; else in the last ``####`` whose line
    reads as an answer; else in the last sentence "the answer is"; else in the last quantity of the text. In a response
    cut at a limit only the first two count, because the last number of half a calculation is not an answer.
    :mod:`answers` has the details.

    Numbers are compared as fractions: ``1,234.50`` is ``1234.5``, ``$18`` is ``18``, ``0.5`` is ``1/2``, ``50%`` is
    ``50``, ``3.2e5`` is ``320000``, and ``\textbf{(B)}\ 12`` is ``12`` unless ``truth`` has another letter. An
    unevaluated calculation (``2 + 17``, ``2 * 9``, ``36/2``) is wrong unless ``truth`` is also a calculation: otherwise
    a model would learn to repeat the question. A boolean ``truth`` requires the word. For any other ``truth`` that is
    not a number (``\sqrt{2}``, ``(1, 2)``, ``10:30``) only the same spelling is right. No response is right for a
    ``truth`` in words. Use ``math_equal`` for truths that are not numbers.
    """
    right = truth_answer(truth) if truth else None
    is_boolean = right is not None and right.text.lower() in BOOLEANS
    answer = extract_answer(after_thoughts(response, prompt_end), finished=finished, words=is_boolean)
    if right is None or answer is None:
        return {"accuracy": 0.0}
    if right.choice and answer.choice and right.choice != answer.choice:
        return {"accuracy": 0.0}
    if right.number is not None:
        is_number = right.is_calculation or not answer.is_calculation
        return {"accuracy": float(is_number and answer.number == right.number)}
    if is_boolean:
        return {"accuracy": float(right.text.lower() == answer.text.lower())}
    same = (
        bool(right.text)
        and not reads_as_words(right.text)
        and "".join(right.text.split()) == "".join(answer.text.split())
    )
    return {"accuracy": float(same)}
