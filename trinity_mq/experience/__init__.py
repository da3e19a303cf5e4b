"""Experiences: sampled sequences with their ids, their wire format, and batches as columns and tensors."""

from trinity_mq.experience.batch import ExperienceBatch, decode, encode
from trinity_mq.experience.codec.body import CONTENT_TYPE
from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import ExperienceError
from trinity_mq.experience.gather import (
    gather_action_masks,
    gather_attention_masks,
    gather_custom_fields,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
)
from trinity_mq.experience.group import group_by, split_dpo_experience_to_single_turn
from trinity_mq.experience.hf import from_hf_datasets, to_hf_datasets
from trinity_mq.experience.record import CustomField, Experience
from trinity_mq.experience.serialization import decode_any

__all__ = [
    "CONTENT_TYPE",
    "EID",
    "CustomField",
    "DecodeError",
    "EncodeError",
    "Experience",
    "ExperienceBatch",
    "ExperienceError",
    "decode",
    "decode_any",
    "encode",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_custom_fields",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
]
