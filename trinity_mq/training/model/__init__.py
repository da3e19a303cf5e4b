"""The policy as a torch model: attention over packed rows, shared prefixes, logprobs without full logits, LoRA."""
