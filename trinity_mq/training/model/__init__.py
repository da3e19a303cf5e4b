"""The policy as torch sees it, and how it is called: attention over packed rows, logprobs without logits."""
