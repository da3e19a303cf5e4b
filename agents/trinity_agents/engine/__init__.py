"""Engine processes: the rollout engine of the policy, and auxiliary engines that are never trained."""
