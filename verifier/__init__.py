"""From a rollout to a signed verdict."""
