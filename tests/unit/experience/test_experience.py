import dataclasses

import numpy as np
import pytest
import torch

from trinity_mq.experience import EID, EncodeError, Experience, ExperienceError, encode

BASE = {"tokens": [1, 2, 3, 4, 5], "prompt_length": 2}


class TestType:
    def test_is_decided_in_the_documented_order(self):
        pair = {"chosen": [1], "rejected": [2]}
        assert Experience(**BASE).experience_type == "single_turn"
        assert Experience(**BASE, chosen=[1]).experience_type == "single_turn"
        assert Experience(**BASE, **pair).experience_type == "dpo"
        assert Experience(**BASE, action_mask=[1, 1, 0]).experience_type == "multi_turn"
        assert Experience(**BASE, action_mask=[1, 1, 0], **pair).experience_type == "multi_turn"

    def test_can_be_stated(self):
        stated = Experience(**BASE, action_mask=[False] * 3, experience_type="single_turn")
        assert stated.experience_type == "single_turn"
        assert stated.action_mask.tolist() == [False] * 3

    @pytest.mark.parametrize("kind", ["multi_turn", "dpo", "sft"])
    def test_stated_wrongly_is_refused(self, kind):
        with pytest.raises(ExperienceError):
            Experience(**BASE, experience_type=kind)


class TestNormalising:
    @pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "array", "tensor"])
    def test_every_form_gives_the_same_experience(self, form):
        made = Experience(
            eid=EID(suffix="s"),
            tokens=form([1, 2, 3]),
            prompt_length=1,
            logprobs=form([-1, -2]),
            advantages=form([0.5, 1.5]),
            returns=form([0.5, 1.5]),
            token_level_reward=form([0, 1]),
            teacher_logprobs=form([0.25, 0.5]),
            action_mask=form([1, 0]),
            routed_experts=form([[[1, 2]], [[3, 255]]]),
        )
        dtypes = {
            "tokens": torch.int32,
            "logprobs": torch.float32,
            "advantages": torch.float32,
            "returns": torch.float32,
            "token_level_reward": torch.float32,
            "teacher_logprobs": torch.float32,
            "action_mask": torch.bool,
            "routed_experts": torch.uint8,
        }
        assert {name: getattr(made, name).dtype for name in dtypes} == dtypes
        assert made.tokens.tolist() == [1, 2, 3]
        assert made.logprobs.tolist() == [-1.0, -2.0]
        assert made.action_mask.tolist() == [True, False]
        assert made.routed_experts.tolist() == [[[1, 2]], [[3, 255]]]

    def test_half_precision_is_kept_and_double_is_not(self):
        for dtype, kept in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float64", "float32")):
            values = torch.ones(3, dtype=getattr(torch, dtype))
            assert Experience(**BASE, logprobs=values).logprobs.dtype == getattr(torch, kept)

    def test_scalars_become_python_numbers(self):
        made = Experience(**BASE, reward=np.float32(0.5), temperature=torch.tensor(1), index=np.int64(3))
        assert (made.reward, made.temperature, made.index) == (0.5, 1.0, 3)
        assert (type(made.reward), type(made.temperature), type(made.index)) == (float, float, int)

    def test_dicts_are_not_shared(self):
        info = {"a": 1}
        first, second = Experience(**BASE, info=info), Experience(**BASE, info=info)
        first.info["b"] = 2
        assert (second.info, info) == ({"a": 1}, {"a": 1})


class TestMask:
    def test_truncated_prompt_needs_no_logprobs_and_no_response(self):
        cut = {"truncate_status": "prompt_truncated"}
        assert Experience(tokens=[1, 2, 3], prompt_length=2, **cut).action_mask.tolist() == [False]
        assert Experience(tokens=[1, 2, 3], prompt_length=3, **cut).action_mask.tolist() == []
        assert Experience(tokens=[1, 2], prompt_length=2, logprobs=[0.0], **cut).action_mask.tolist() == [False]


class TestRefused:
    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"tokens": [1.5, 2.0, 3.0]}, ["tokens", "float32", "integer"]),
            ({"tokens": [True, False, True]}, ["tokens", "bool"]),
            ({"tokens": [1, 2, 2**31]}, ["tokens", "2147483648", "int32"]),
            ({"tokens": torch.tensor([1, -(2**31) - 1, 5])}, ["tokens", "-2147483649"]),
            ({"tokens": [[1, 2], [3, 4]]}, ["tokens", "(2, 2)", "one dimension"]),
            ({"tokens": [1, None, 3]}, ["tokens", "None"]),
            ({"tokens": None}, ["tokens", "None"]),
            ({"tokens": "abc"}, ["tokens", "abc"]),
            ({"tokens": []}, ["tokens", "empty"]),
            ({"tokens": [1, 2]}, ["tokens", "2", "prompt_length 2"]),
            ({"prompt_length": 0}, ["prompt_length", "0", "at least 1"]),
            ({"prompt_length": 1.0}, ["prompt_length", "1.0", "whole"]),
            ({"prompt_length": 0, "action_mask": [1] * 5}, ["prompt_length", "0"]),
            ({"action_mask": [1, 0]}, ["action_mask", "2", "3", "multi_turn"]),
            ({"action_mask": [1, 2, 0]}, ["action_mask", "2", "0 and 1"]),
            ({"logprobs": [0.0]}, ["logprobs", "1", "5 - 2 = 3", "single_turn"]),
            ({"logprobs": [0.0, None, 0.0]}, ["logprobs", "None"]),
            ({"logprobs": [True, False, True]}, ["logprobs", "bool"]),
            ({"advantages": [0.0] * 4}, ["advantages", "4", "3"]),
            ({"returns": [0.0] * 4}, ["returns", "4", "3"]),
            ({"token_level_reward": [0.0] * 4}, ["token_level_reward", "4", "3"]),
            ({"teacher_logprobs": [0.0] * 4}, ["teacher_logprobs", "4", "3"]),
            ({"action_mask": [1, 1, 1], "teacher_logprobs": [0.0] * 4}, ["teacher_logprobs", "4", "multi_turn"]),
            ({"routed_experts": [[1], [2]]}, ["routed_experts", "(2, 1)"]),
            ({"routed_experts": [[[1]]]}, ["routed_experts", "1 rows", "4"]),
            ({"routed_experts": [[[256]]] * 4}, ["routed_experts", "256"]),
            ({"reward": "1"}, ["reward", "'1'", "number"]),
            ({"reward": torch.ones(2)}, ["reward", "(2,)"]),
            ({"temperature": -1}, ["temperature", "-1.0"]),
            ({"temperature": float("nan")}, ["temperature", "nan"]),
            ({"truncate_status": "cut"}, ["truncate_status", "cut", "prompt_truncated"]),
            ({"eid": "3/1"}, ["eid", "3/1"]),
            ({"eid": {"batch": 1, "uid": 2}}, ["eid", "uid"]),
            ({"response_text": 5}, ["response_text", "5", "str"]),
            ({"messages": {"role": "user"}}, ["messages", "list"]),
            ({"multi_modal_inputs": {"pixels": ["a"]}}, ["multi_modal_inputs"]),
            ({"chosen": [1], "rejected": []}, ["rejected", "dpo"]),
            ({"chosen": [1], "rejected": [2], "logprobs": [0.0]}, ["logprobs", "dpo"]),
            ({"versions": [(1, 0, 0)]}, ["versions", "1"]),
            ({"versions": [(0, 0, 0), (0, 0, 1)]}, ["versions", "rising"]),
            ({"versions": [(0, 0, 0), (3, 0, 1)]}, ["versions", "3"]),
            ({"versions": [(0, 0)]}, ["versions", "(0, 0)"]),
            ({"versions": [(0, -1, 0)]}, ["versions", "-1"]),
            ({"versions": 5}, ["versions", "5"]),
        ],
    )
    def test_error_names_field_value_and_rule(self, wrong, named):
        with pytest.raises(ExperienceError) as error:
            Experience(**(BASE | wrong))
        for part in named:
            assert part in str(error.value), str(error.value)
        if "chosen" not in wrong:
            changed = Experience(**BASE)
            vars(changed).update(wrong)
            with pytest.raises(EncodeError, match="|".join(wrong)):
                encode([Experience(**BASE), changed])

    def test_truncated_prompt_still_has_to_agree_with_its_mask(self):
        with pytest.raises(ExperienceError, match="advantages"):
            Experience(**BASE, truncate_status="prompt_truncated", logprobs=[0.0] * 3, advantages=[0.0])


class TestVersions:
    def test_oldest_and_newest_compare_generation_first(self):
        made = Experience(**BASE, versions=[(0, 1, 9), (1, 2, 0), (2, 1, 10)])
        assert (made.version_min, made.version_max) == ((1, 9), (2, 0))


class TestDict:
    def test_holds_the_documented_keys_and_no_more(self):
        made = Experience(eid=EID(1, 2, 3, 4, "s"), **BASE, info={"a": 1})
        assert made.to_dict() == {
            "eid": {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "s"},
            "type": "single_turn",
            "prompt_length": 2,
            "response_length": 3,
            "info": {"a": 1},
            "metrics": {},
        }

    def test_dpo_has_the_lengths_of_both_responses(self, dpo):
        found = dpo.to_dict()
        assert (found["type"], found["prompt_length"]) == ("dpo", 3)
        assert (found["response_length"], found["rejected_length"]) == (2, 1)
        assert found["chosen_messages"] == [{"role": "assistant", "content": "yes"}]


class TestEquality:
    @pytest.mark.parametrize(
        "change",
        [
            {"reward": 2.0},
            {"tokens": torch.tensor([1, 2, 3, 4, 6], dtype=torch.int32)},
            {"advantages": torch.zeros(3)},
            {"returns": torch.tensor([1.0, 2.0, 3.0])},
            {"logprobs": None},
            {"info": {"answer": 13}},
            {"eid": EID()},
            {"experience_type": "multi_turn"},
            {"custom_fields": []},
            {"versions": [(0, 1, 4)]},
            {"multi_modal_inputs": {"pixels": torch.zeros(2, 3, 4), "size": torch.tensor(5)}},
        ],
    )
    def test_sees_every_difference(self, single, change):
        assert single == dataclasses.replace(single)
        assert single != dataclasses.replace(single, **change)

    def test_is_about_experiences_only(self, single):
        assert single != single.to_dict()
        with pytest.raises(TypeError):
            hash(single)

    def test_repr_is_short(self, single):
        assert repr(single) == f"Experience({single.eid.uid}, single_turn, 2+3 tokens, reward=1.0)"
