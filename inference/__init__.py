"""From an assignment to signed rollouts with commitments."""
