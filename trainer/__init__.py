"""From accepted rollouts to a new policy."""
